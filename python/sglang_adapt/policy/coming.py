"""An engine's load as it is as soon as one more request has been sent to it."""

from __future__ import annotations

import math
from dataclasses import replace

from sglang_adapt.policy.admission import Load


def own_ms(load: Load, tokens: int) -> float:
    """How long an engine reads a prompt of `tokens` tokens, of which `load.cached` are there."""
    return load.times.prefill_ms(max(1, tokens - load.cached), load.cached)


def with_coming(load: Load, tokens: int, output: int, tpot_ms: float | None) -> Load:
    """The load with a request in it that is being sent.

    Args:
        load: without it; `cached` is of its prompt.
        tokens: of its prompt.
        output: tokens that it has given already, at another engine.
        tpot_ms: that it was promised, if it was promised one.
    """
    return replace(
        load,
        requests=load.requests + 1,
        context=load.context + tokens + output,
        prefill_ms=load.prefill_ms + own_ms(load, tokens),
        tightest_tpot_ms=min(load.tightest_tpot_ms, tpot_ms or math.inf),
    )
