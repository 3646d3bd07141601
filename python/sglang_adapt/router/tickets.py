"""Requests that were admitted and have not come tokenized yet: each keeps its place for a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from sglang_adapt.core.messages import AdmitRequest
from sglang_adapt.policy.admission import Decision
from sglang_adapt.policy.tally import Part, Tally

TICKET_MS = 5000.0
"""A request that was admitted keeps its place this long until it comes tokenized."""


@dataclass(slots=True)
class Ticket:
    """One such request, what was decided, and until when its place is kept."""

    request: AdmitRequest
    decision: Decision
    expires_ms: float


class Tickets:
    """See the module.

    Args:
        tally: what is promised on an engine counts there.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.open: OrderedDict[int, Ticket] = OrderedDict()
        self.of_tier: Counter[str] = Counter()

    def give(self, request: AdmitRequest, decision: Decision, now_ms: float) -> None:
        """A request was admitted."""
        self.open[request.id] = Ticket(request, decision, now_ms + TICKET_MS)
        self.of_tier[request.terms.tier] += 1
        if decision.engine is not None:
            part = Part(request.tokens, unread=True, promised=True, tpot_ms=request.terms.tpot_ms)
            self._tally.put(request.id, decision.engine, part)

    def take_back(self, number: int) -> None:
        """Its place is free, if it has one."""
        known = self.open.pop(number, None)
        if known is not None:
            self.of_tier[known.request.terms.tier] -= 1
            self._tally.drop(number)

    def expire(self, now_ms: float) -> None:
        """Take back those whose time is over."""
        while self.open and next(iter(self.open.values())).expires_ms < now_ms:
            self.take_back(next(iter(self.open)))
