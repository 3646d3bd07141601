"""How tiers have fared of late: the part of their requests that was promised its targets, and had them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

_LATE_MS = 5_000.0
"""Requests of so long ago count a third."""


class Fared:
    """See the module.

    Args:
        clock_ms: the time.
    """

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self._came: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(_LATE_MS, clock_ms))
        self._kept: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(_LATE_MS, clock_ms))

    def came(self, tier: str) -> None:
        """A request has come, admitted or not."""
        self._came[tier].add(1.0)

    def promised(self, tier: str) -> None:
        """It is promised its targets."""
        self._kept[tier].add(1.0)

    def broken(self, tier: str) -> None:
        """A request that was promised its targets has missed one."""
        self._kept[tier].add(-1.0)

    def kept(self, tier: str) -> float:
        """The part that was promised its targets, less what has missed them; 1 if none has come."""
        came = self._came[tier].value
        return min(1.0, max(0.0, self._kept[tier].value / came)) if came > 0 else 1.0


class Decaying:
    """A number of which older parts count less.

    Args:
        late_ms: after so long a part counts 1/e of what it did.
        clock_ms: the time.
    """

    def __init__(self, late_ms: float, clock_ms: Callable[[], float]) -> None:
        self._late_ms, self._clock_ms = late_ms, clock_ms
        self._value, self._at = 0.0, 0.0

    def add(self, part: float) -> None:
        now = self._clock_ms()
        self._value, self._at = self.value + part, now

    @property
    def value(self) -> float:
        return self._value * math.exp((self._at - self._clock_ms()) / self._late_ms)
