"""What arrives at the router, by tier and window, for the planner. Only there if somebody plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from sglang_adapt.policy.demand import Arrivals, Unfinished, Window
from sglang_adapt.policy.pilot import WINDOWS


class Traffic:
    """Counts requests as they pass.

    Args:
        tier_of: the tier of a request by its id, when it arrives.
        clock_s: a clock that never goes back, in s.
    """

    def __init__(self, tier_of: Callable[[str], str], clock_s: Callable[[], float]) -> None:
        self._tier_of = tier_of
        self._clock_s = clock_s
        self._began = clock_s()
        self._now: dict[str, Arrivals] = {}
        self._tiers: dict[str, str] = {}
        self.windows: deque[Window] = deque(maxlen=WINDOWS)

    def arrived(self, rid: str, tokens: int) -> None:
        """A request has been accepted, with a prompt of about `tokens`."""
        tier = self._tiers[rid] = self._tier_of(rid)
        self._count(tier, tokens)

    def refused(self, tier: str, tokens: int) -> None:
        """A request of a tier was not admitted. It is asked for as well: another layout might have room for it."""
        self._count(tier, tokens)

    def _count(self, tier: str, tokens: int) -> None:
        known = self._now.get(tier, Arrivals())
        self._now[tier] = replace(
            known,
            requests=known.requests + 1,
            prompt_tokens=known.prompt_tokens + tokens,
            prompt_squares=known.prompt_squares + tokens * tokens,
        )

    def finished(self, rid: str, tokens: int) -> None:
        """A request has given all its `tokens`."""
        tier = self._tiers.pop(rid, None)
        if tier is not None:
            known = self._now.get(tier, Arrivals())
            self._now[tier] = replace(known, ended=known.ended + 1, output_tokens=known.output_tokens + tokens)

    def tier(self, rid: str) -> str | None:
        """The tier of a request that is unfinished; None if it is not known."""
        return self._tiers.get(rid)

    def close(self) -> None:
        """The window is over; the next one begins."""
        now = self._clock_s()
        if now > self._began:
            self.windows.append(Window(now - self._began, self._now))
            self._began, self._now = now, {}

    def unfinished(self, requests: Iterable[tuple[str, bool]]) -> dict[str, Unfinished]:
        """By tier, out of all that are unfinished: (id, waits for its first token). Any other is forgotten."""
        tiers: dict[str, str] = {}
        found: dict[str, Unfinished] = {}
        for rid, waits in requests:
            tier = self._tiers.get(rid)
            if tier is not None:
                tiers[rid] = tier
                known = found.get(tier, Unfinished())
                found[tier] = Unfinished(known.requests + 1, known.waiting + waits)
        self._tiers = tiers
        return found
