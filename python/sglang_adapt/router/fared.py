"""How tiers have fared of late: the part of their requests that was promised its targets, and had them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from sglang_adapt.router.decaying import Decaying

_LATE_MS = 5_000.0
"""Requests of so long ago count a third."""


class Fared:
    """See the module.

    Args:
        clock_ms: the time.
    """

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self._came: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(_LATE_MS))
        self._kept: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(_LATE_MS))

    def came(self, tier: str) -> None:
        """A request has come, admitted or not."""
        self._came[tier].add(1.0, self._clock_ms())

    def promised(self, tier: str) -> None:
        """It is promised its targets."""
        self._kept[tier].add(1.0, self._clock_ms())

    def broken(self, tier: str) -> None:
        """A request that was promised its targets has missed one."""
        self._kept[tier].add(-1.0, self._clock_ms())

    def kept(self, tier: str) -> float:
        """The part that was promised its targets, less what has missed them; 1 if none has come."""
        now = self._clock_ms()
        came = self._came[tier].at(now)
        return min(1.0, max(0.0, self._kept[tier].at(now) / came)) if came > 0 else 1.0
