"""How long the steps of hand-overs take, for the control endpoint: the last ones, as p50 and p90."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from sglang_adapt.core.laps import slowest

MOST = 50
"""Values of each step that are kept."""

STEPS = (
    "tell",
    "place",
    "wait",
    "make",
    "start copy",
    "return",
    "wait for batch",
    "let in",
    "in all",
    "arrive",
)
"""The steps in order.

`tell`: from when the results of the prompts' batch were settled, and the first tokens sent, until the router knows;
`place`: until the taker is called; `wait`, `make`, `start copy`, `return`: of the call, by the slowest rank, the last
one back to the router; `wait for batch`, `let in`: what the taker does meanwhile, until the requests are in its next
batch; `in all`: from the settled results until then; `arrive`: from the taker's answer until the router knows that all
KV is there, and the source can let go."""


class HandoverSteps:
    """See the module."""

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {step: deque(maxlen=MOST) for step in STEPS}

    def add(self, step: str, ms: float) -> None:
        self._last[step].append(ms)

    def add_ranks(self, ranks: Iterable[Mapping[str, float]]) -> None:
        """What each rank of a taker has said of its steps; the slowest one counts."""
        for step, ms in slowest(ranks).items():
            self.add(step, ms)

    def said(self) -> dict[str, dict[str, float]]:
        """By step, in order, less those of which nothing is known."""
        return {step: _spread(values) for step, values in self._last.items() if values}


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{part}": round(ordered[min(len(ordered) - 1, len(ordered) * part // 100)], 3) for part in (50, 90)}
