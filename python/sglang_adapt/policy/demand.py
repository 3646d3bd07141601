"""What each tier asks for: arrivals of the last windows, and what is unfinished, as one figure of load.

Pure functions over frozen data. The windows, and planning by them: Nitsum, 3.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEWEST = 2
"""Windows that are enough for a rate to be believed when it is above the mean: bursts count at once, pauses do not."""
FIRST_PROMPT, FIRST_OUTPUT = 256.0, 128.0
"""Tokens of a request where none has been seen yet."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A tier as the planner sees it.

    Attributes:
        tier: its name.
        weight: what one of its requests is worth.
        ttft_ms, tpot_ms: targets; None where it has none.
    """

    tier: str
    weight: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of one tier in one window.

    Attributes:
        requests: that arrived.
        prompt_tokens: they have together.
        prompt_squares: of the tokens of each prompt, together.
        ended: requests that ended in this window.
        output_tokens: these have given together.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0
    ended: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A time, in s, and what arrived in it by tier."""

    seconds: float
    arrivals: Mapping[str, Arrivals]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Requests of a tier that have not ended; `waiting` of them are in no engine."""

    requests: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a tier asks for.

    Attributes:
        terms: of the tier.
        rate_rps: arrivals.
        prompt_tokens, output_tokens: of a request, in the mean.
        unfinished: requests now.
        prompt_spread: variance of the tokens of prompts by the square of their mean; 0 if all are equal.
    """

    terms: Terms
    rate_rps: float = 0.0
    prompt_tokens: float = FIRST_PROMPT
    output_tokens: float = FIRST_OUTPUT
    unfinished: Unfinished = Unfinished()
    prompt_spread: float = 0.0

    @property
    def is_there(self) -> bool:
        """Does anybody ask for it now?"""
        return self.rate_rps > 0 or self.unfinished.requests > 0

    def offered_rps(self, alone_ms: float, horizon_s: float) -> float:
        """The load in requests/s: what arrives, and what is unfinished.

        What waits is to be done within the horizon; no more of it than has come within the TTFT target, since the rest
        is late whatever is done (if nothing arrives, it is all there is to do). What runs counts as if it were to end
        within the horizon, or within twice the time that a request takes alone, so that a steady flow of long requests
        is not counted twice.

        Args:
            alone_ms: that a request takes on the slowest engine, alone.
        """
        running = self.unfinished.requests - self.unfinished.waiting
        at_once = running / max(horizon_s, 2e-3 * alone_ms)
        waiting = float(self.unfinished.waiting)
        if self.terms.ttft_ms is not None and self.rate_rps > 0:
            waiting = min(waiting, self.rate_rps * self.terms.ttft_ms / 1e3)
        return max(self.rate_rps, at_once) + waiting / horizon_s


def demands(
    terms: Sequence[Terms],
    windows: Sequence[Window],
    unfinished: Mapping[str, Unfinished],
    before: Mapping[str, Demand],
) -> tuple[Demand, ...]:
    """Demand by tier, in the order of `terms`.

    Args:
        terms: the tiers.
        windows: the last ones, oldest first; none of them of no time.
        unfinished: by tier.
        before: what was known, for the lengths of tiers of which no request came or ended.
    """
    return tuple(_demand(one, windows, unfinished.get(one.tier, Unfinished()), before.get(one.tier)) for one in terms)


def _demand(terms: Terms, windows: Sequence[Window], unfinished: Unfinished, before: Demand | None) -> Demand:
    seen = [window.arrivals.get(terms.tier, Arrivals()) for window in windows]
    requests, ended = sum(one.requests for one in seen), sum(one.ended for one in seen)
    prompt = FIRST_PROMPT if before is None else before.prompt_tokens
    output = FIRST_OUTPUT if before is None else before.output_tokens
    spread = 0.0 if before is None else before.prompt_spread
    if requests:
        prompt = sum(one.prompt_tokens for one in seen) / requests
        squares = sum(one.prompt_squares for one in seen) / requests
        spread = max(0.0, squares / prompt**2 - 1) if prompt else 0.0
    if ended:
        output = sum(one.output_tokens for one in seen) / ended
    rate = max(_rate(seen, windows), _rate(seen[-NEWEST:], windows[-NEWEST:]))
    return Demand(terms, rate, prompt, output, unfinished, spread)


def _rate(seen: Sequence[Arrivals], windows: Sequence[Window]) -> float:
    seconds = sum(window.seconds for window in windows)
    return sum(one.requests for one in seen) / seconds if seconds else 0.0
