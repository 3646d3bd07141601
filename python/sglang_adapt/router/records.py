"""One request with a tier, from its arrival to its end, as admission knows it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_adapt.core.messages import RequestReport
from sglang_adapt.core.slo import Terms
from sglang_adapt.policy.admission import Decision, Outcome
from sglang_adapt.policy.tally import Part
from sglang_adapt.router.prefixes import Prefix
from sglang_adapt.upstream.limits import BACKGROUND, BEST_EFFORT, FEASIBLE

_PRIORITY = {Outcome.FEASIBLE: FEASIBLE, Outcome.BEST_EFFORT: BEST_EFFORT, Outcome.BACKGROUND: BACKGROUND}


@dataclass(slots=True)
class Record:
    """See the module. Times in ms, of the router's clock.

    Attributes:
        terms: its tier and targets.
        tokens: of its prompt.
        arrived_ms, sent_ms, first_ms, last_ms: when it arrived, was first sent to an engine, and had its first and
            its last token so far.
        decision: what was promised.
        most_output: tokens that it asks for at most, if it says so.
        output: tokens that it has given.
        aged: it was sent because it had waited its time.
        engine: where it was last.
        prefixes: beginnings of its prompt.
    """

    terms: Terms
    tokens: int
    arrived_ms: float
    decision: Decision
    most_output: int | None = None
    sent_ms: float | None = None
    first_ms: float | None = None
    last_ms: float = 0.0
    output: int = 0
    aged: bool = False
    engine: str = ""
    prefixes: tuple[Prefix, ...] = ()

    @property
    def promised(self) -> bool:
        return self.decision.outcome is Outcome.FEASIBLE

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to its first token, if that has come."""
        return None if self.first_ms is None else self.first_ms - self.arrived_ms

    @property
    def tpot_ms(self) -> float | None:
        """Between its tokens so far, the mean; None if there are fewer than two."""
        if self.first_ms is None or self.output < 2:
            return None
        return (self.last_ms - self.first_ms) / (self.output - 1)

    @property
    def missed(self) -> bool:
        """Is one of its targets missed by what it has so far?"""
        ttft, tpot = self.ttft_ms, self.tpot_ms
        late = ttft is not None and self.terms.ttft_ms is not None and ttft > self.terms.ttft_ms
        return late or (tpot is not None and self.terms.tpot_ms is not None and tpot > self.terms.tpot_ms)

    @property
    def priority(self) -> int:
        """Stock's `priority`: by what was promised. Old work counts as promised: it waits no longer."""
        return FEASIBLE if self.aged else _PRIORITY[self.decision.outcome]

    @property
    def part(self) -> Part:
        """What it adds to its engine."""
        unread = self.first_ms is None
        return Part(
            self.tokens,
            self.output,
            unread=unread,
            decoding=not unread,
            preemptible=self.priority == BACKGROUND,
            promised=self.promised,
            tpot_ms=self.terms.tpot_ms if self.promised else None,
            aged=self.aged,
        )

    def report(self, rid: str, *, finished: bool) -> RequestReport:
        """How it has ended: finished, or aborted or failed."""
        return RequestReport(
            rid=rid,
            terms=self.terms,
            outcome=self.decision.outcome.value,
            ended="finished" if finished else "stopped",
            engine=self.engine,
            arrived_ms=self.arrived_ms,
            queue_ms=None if self.sent_ms is None else self.sent_ms - self.arrived_ms,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            forecast_ttft_ms=self.decision.ttft_ms,
            forecast_tpot_ms=self.decision.tpot_ms,
            prompt_tokens=self.tokens,
            output_tokens=self.output,
        )
