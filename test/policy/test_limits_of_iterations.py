"""How much an engine may do in an iteration."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.limits import OPEN, SAFETY, STEPS, Bounds, Limits, chunk_tokens, limits_for
from sglang_adapt.policy.profile import Corrected, Correction, ModelFigures, ReckonedTimes, gpu_figures

H100 = ReckonedTimes(ModelFigures(1, 32, 16_060_522_496, 131_072, 2), gpu_figures("H100")[0])
BOUNDS = Bounds(16, 8192, 256)


def test_without_a_target_or_a_step_there_is_no_limit() -> None:
    assert limits_for(H100, 9, 900.0, 0, math.inf, BOUNDS) == OPEN
    assert limits_for(H100, 0, 0.0, 0, 10.0, BOUNDS) == OPEN
    assert chunk_tokens(H100, 0.0, 10.0, BOUNDS) == 8192


def test_a_tighter_target_makes_smaller_parts() -> None:
    chunks = [chunk_tokens(H100, 8.0, tpot_ms, BOUNDS) for tpot_ms in (11.0, 20.0, 50.0, 100.0, 1000.0)]
    assert chunks == sorted(chunks) and chunks[0] == 256 and chunks[-1] == 8192
    assert 256 < chunks[1] < chunks[2] < 8192


def test_prompts_that_take_little_time_are_not_cut() -> None:
    """Of 20 ms 19 count: a step of 8 leaves that while prompts take under 57.9 % of the time."""
    assert chunk_tokens(H100, 8.0, 20.0, BOUNDS, 0.57) == 8192
    assert chunk_tokens(H100, 8.0, 20.0, BOUNDS, 0.58) == chunk_tokens(H100, 8.0, 20.0, BOUNDS) < 8192


def test_parts_are_not_so_small_that_they_cost_as_much_as_large_ones() -> None:
    """On this GPU 16 tokens take 7.3 ms, 192 too, and then each token its time."""
    assert H100.prefill_ms(16) > 0.99 * H100.prefill_ms(192)
    assert chunk_tokens(H100, 8.0, 10.37, BOUNDS) == 192
    assert 8192 / 192 * H100.prefill_ms(192) <= 2 * H100.prefill_ms(8192) < 8192 / 128 * H100.prefill_ms(128)


def test_where_no_part_keeps_the_target_prompts_are_not_cut() -> None:
    """Parts would make first tokens late, and keep nothing."""
    assert chunk_tokens(H100, 8.0, 10.0, BOUNDS) == chunk_tokens(H100, 8.0, 1.0, BOUNDS) == 8192


def test_what_was_promised_may_always_run() -> None:
    """Even where the prediction says that it is too much."""
    assert limits_for(H100, 40, 40_000.0, 40, 1.0, BOUNDS) == Limits(None, 41)
    assert limits_for(H100, 256, 40_000.0, 256, 1.0, BOUNDS) == Limits(None, None)


@given(st.integers(1, 256), st.floats(1, 1e6), st.floats(1, 200), st.sampled_from([1, 16, 64]))
def test_a_step_and_its_prompts_stay_below_the_target(running: int, context: float, tpot: float, page: int) -> None:
    bounds = Bounds(page, 8192, 256)
    step = H100.decode_ms(running, context)
    limits = limits_for(H100, running, context, 0, tpot, bounds)
    chunk = bounds.prefill_tokens if limits.prefill_tokens is None else limits.prefill_tokens
    assert chunk % page == 0 and page <= chunk <= 8192
    assert chunk == 8192 // page * page or step + H100.prefill_ms(chunk) / STEPS <= SAFETY * tpot
    requests = bounds.requests if limits.requests is None else limits.requests
    assert 1 <= requests <= 256
    assert requests == 1 or H100.decode_ms(requests, context / running * requests) <= SAFETY * tpot


@given(
    step_ms=st.floats(0.1, 60.0),
    tpot_ms=st.floats(0.5, 200.0),
    stretch=st.floats(0.1, 8.0),
    page=st.sampled_from((1, 16, 48)),
    most=st.sampled_from((16, 500, 2048, 8192)),
)
def test_a_part_is_the_largest_that_fits_and_is_not_too_dear(
    step_ms: float, tpot_ms: float, stretch: float, page: int, most: int
) -> None:
    """The table says what going through all sizes says, also for times that were corrected."""
    bounds = Bounds(page, most, 256)
    times = Corrected(H100, Correction(prefill=stretch, most=32.0))
    least = times.prefill_ms(max(page, most)) / max(page, most)
    sizes = {page, max(page, most) // page * page}
    sizes |= {n * page for power in range(14) for n in (2**power, 3 * 2**power // 2) if n * page <= most}
    chosen = chunk_tokens(times, step_ms, tpot_ms, bounds)
    spare_ms = STEPS * (SAFETY * tpot_ms - step_ms)
    fitting = [size for size in sizes if times.prefill_ms(size) <= spare_ms * (1 - 1e-9)]
    cheap = [size for size in sizes if times.prefill_ms(size) <= 2 * least * size * (1 + 1e-9)]
    assert chosen in sizes or chosen == max(page, most)
    if chosen == max(page, most):
        best = min((size for size in cheap if size >= max(fitting, default=page)), default=max(sizes))
        assert not fitting or (best >= max(fitting) and (best > max(fitting) or best >= most // page * page))
        return
    assert chosen >= max(fitting, default=page)
    if times.prefill_ms(chosen) > spare_ms * (1 + 1e-9):
        assert chosen <= min((size for size in cheap if size >= max(fitting, default=page)), default=max(sizes))
