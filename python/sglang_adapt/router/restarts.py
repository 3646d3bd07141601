"""How often something that dies is started again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RestartLimit:
    """Give up after `restarts` restarts within `window_s` seconds."""

    restarts: int
    window_s: float


@dataclass
class Restarts:
    """The restarts of one thing."""

    limit: RestartLimit
    times: deque[float] = field(default_factory=deque)

    def again(self, now: float) -> bool:
        """May it be started again at `now` (seconds)? Counts the restart if so."""
        while self.times and now - self.times[0] > self.limit.window_s:
            self.times.popleft()
        if len(self.times) >= self.limit.restarts:
            return False
        self.times.append(now)
        return True
