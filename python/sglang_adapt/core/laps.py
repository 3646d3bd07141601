"""How long the steps of one piece of work took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter


class Laps:
    """A stopwatch. Time starts when it is made.

    Attributes:
        ms: milliseconds of each step so far, in order.
    """

    def __init__(self) -> None:
        self._last = perf_counter()
        self.ms: dict[str, float] = {}

    def lap(self, step: str) -> None:
        """What was done since the last lap was this step; a step that is named again grows."""
        now = perf_counter()
        self.ms[step] = round(self.ms.get(step, 0.0) + 1e3 * (now - self._last), 3)
        self._last = now


def slowest(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By step the longest time that any rank has said."""
    longest: dict[str, float] = {}
    for rank in ranks:
        for step, ms in rank.items():
            longest[step] = max(longest.get(step, 0.0), ms)
    return longest
