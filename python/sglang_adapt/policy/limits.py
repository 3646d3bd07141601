"""How much an engine may do in one iteration so that what it has promised holds: pure decisions.

An iteration is prompts of at most so many tokens and then `STEPS` decode steps, or as many fewer as there are fewer
tokens. So the mean time between two tokens is that of a step and of its part of those prompts, and both limits follow
from the tightest target that runs there (Nitsum, 4.2.1). The engine keeps them: `upstream/limits.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from sglang_adapt.policy.profile import Corrected, Times

SAFETY = 0.95
"""Predictions have to stay below this part of a target."""

STEPS = 4
"""Decode steps for each full part of prompts. TPOT is a mean, so one large part for several steps does what small ones
do, and a batch of prompts costs much however small it is."""

_DEAREST = 2.0
"""A prompt is not read in parts so small that it takes more than this many times as long."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What engines of a TP size can do at most.

    Attributes:
        page_tokens: of a KV page; prompts are cut at multiples of it.
        prefill_tokens: of prompts in an iteration.
        requests: that run at a time.
    """

    page_tokens: int
    prefill_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one engine now; None: as much as it can.

    Attributes:
        prefill_tokens: of prompts in an iteration.
        requests: that decode.
    """

    prefill_tokens: int | None = None
    requests: int | None = None


OPEN = Limits()
"""Nothing that runs there has a target."""


def chunk_tokens(times: Times, step_ms: float, tpot_ms: float, bounds: Bounds, share: float = 1.0) -> int:
    """Prompt tokens of an iteration, so that a step and its part of them stay below `SAFETY` of a target.

    Args:
        times: of the engine.
        step_ms: of its decode step; 0 if nothing decodes, and nothing waits for prompts.
        tpot_ms: the tightest target; may be infinite.
        bounds: the result is a multiple of its pages, of a coarse ladder so that it rarely changes.
        share: of the engine's time that prompts take, up to 1. While it leaves the target kept, prompts are not cut:
            parts would only make first tokens late.

    It is not smaller than what takes `_DEAREST` times as long a token as the largest does. Smaller parts would cost
    about as much each and be more of them: everything would take longer, whatever runs beside. If even such a part is
    more than a step has to spare, cutting does not keep the target, and prompts are not cut either: how many are let
    in has to keep it (`admission`).
    """
    most = max(bounds.page_tokens, bounds.prefill_tokens)
    if math.isinf(tpot_ms) or step_ms <= SAFETY * tpot_ms * (1 - share):
        return most
    spare_ms = STEPS * (SAFETY * tpot_ms - step_ms)
    plain, stretch = (times.times, times.correction.prefill) if isinstance(times, Corrected) else (times, 1.0)
    parts = _parts(plain, most, bounds.page_tokens)
    at = bisect_right(parts.took_ms, spare_ms / stretch) - 1
    return parts.chosen[at] if at >= 0 and parts.chosen_ms[at] * stretch <= max(spare_ms, 0.0) else most


@dataclass(frozen=True, slots=True)
class _Parts:
    """The ladder of chunks: what each takes, and which one is taken where it is the largest that fits, or the first."""

    took_ms: tuple[float, ...]
    chosen: tuple[int, ...]
    chosen_ms: tuple[float, ...]


@lru_cache(maxsize=64)
def _parts(times: Times, most: int, page_tokens: int) -> _Parts:
    """Of times that do not change, so that a decision is one look into a table; it is made for each engine."""
    token_ms = times.prefill_ms(most) / most
    sizes = [pages * page_tokens for pages in _ladder(most // page_tokens)]
    took = [times.prefill_ms(tokens) for tokens in sizes]
    chosen, cheap = [], sizes[-1]
    for tokens, took_ms in zip(reversed(sizes), reversed(took), strict=True):
        if took_ms <= _DEAREST * token_ms * tokens:
            cheap = tokens
        chosen.append(cheap)
    chosen.reverse()
    return _Parts(tuple(took), tuple(chosen), tuple(times.prefill_ms(tokens) for tokens in chosen))


def limits_for(
    times: Times, running: int, context: float, promised: int, tpot_ms: float, bounds: Bounds, share: float = 1.0
) -> Limits:
    """What an engine may do in an iteration.

    Args:
        times: of the engine.
        running: requests on it.
        context: tokens that they have together.
        promised: those among them that have been promised their targets.
        tpot_ms: the tightest of these; infinite if there is none.
        bounds: of its TP size.
        share: of its time that prompts take, as in `chunk_tokens`.
    """
    if math.isinf(tpot_ms) or not running:
        return OPEN
    chunk = chunk_tokens(times, times.decode_ms(running, context), tpot_ms, bounds, share)
    spare_ms = SAFETY * tpot_ms - times.prefill_ms(bounds.page_tokens) / STEPS
    # What has been promised may always run, and the next one.
    fitting = min(bounds.requests, promised + 1)
    for requests in _ladder(bounds.requests):
        if times.decode_ms(requests, context / running * requests) > spare_ms:
            break
        fitting = max(fitting, requests)
    return Limits(
        None if chunk >= bounds.prefill_tokens else chunk,
        None if fitting >= bounds.requests else fitting,
    )


@lru_cache(maxsize=64)
def _ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`."""
    steps, at = {1, max(1, most)}, 2
    while at < most:
        steps |= {at, min(most, at + at // 2)}
        at *= 2
    return tuple(sorted(steps))
