"""A number of which older parts count less, as of requests that came of late."""

from __future__ import annotations

import math


class Decaying:
    """See the module. Times in ms, of one clock.

    Args:
        over_ms: after so long a part counts 1/e of what it did.

    Attributes:
        changed_ms: when it was changed last.
    """

    def __init__(self, over_ms: float) -> None:
        self._over_ms = over_ms
        self._value = self.changed_ms = 0.0

    def add(self, part: float, now_ms: float) -> None:
        self.put(self.at(now_ms) + part, now_ms)

    def put(self, value: float, now_ms: float) -> None:
        """It is so much now, whatever it was."""
        self._value, self.changed_ms = value, now_ms

    def at(self, now_ms: float) -> float:
        """What it is at a time, not before it was changed last."""
        return self._value * math.exp((self.changed_ms - now_ms) / self._over_ms)
