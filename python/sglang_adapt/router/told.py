"""What has become of requests that were to be handed over, for the control endpoint and the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_adapt.router.handover_steps import HandoverSteps


@dataclass
class Told:
    """See the module.

    Attributes:
        counts: `handed_over`, `kept` (decoded where they were prefilled, for want of room or of roles), `recomputed`
            (their taker died) and `given_up` (by their clients, on the way).
        ahead_tokens: of those handed over, tokens whose KV had gone ahead.
        steps: how long the steps of those handed over took.
        count: called with an outcome and how many requests it had.
        took: called with the seconds of each hand-over, from the source's word to the taker's answer.
        waits: called with how many requests wait for room now.
    """

    counts: Counter[str] = field(default_factory=Counter)
    ahead_tokens: int = 0
    steps: HandoverSteps = field(default_factory=HandoverSteps)
    count: Callable[[str, int], None] = lambda outcome, requests: None
    took: Callable[[float], None] = lambda seconds: None
    waits: Callable[[int], None] = lambda requests: None

    def add(self, outcome: str, requests: int) -> None:
        if requests:
            self.counts[outcome] += requests
            self.count(outcome, requests)
