"""What an engine can do for a tier: the planner's estimates agree with what the router admits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sglang_adapt.policy.admission import WINDOW_MS, Job, Load, forecast, is_feasible
from sglang_adapt.policy.demand import Demand, Terms
from sglang_adapt.policy.efficiency import Estimate, Speed, estimate, with_shorter_prompts
from sglang_adapt.policy.limits import SAFETY, Bounds
from sglang_adapt.policy.profile import ModelFigures, ReckonedTimes, Times, gpu_figures


def h100(tp: int) -> Speed:
    """Llama-3.1-8B on H100, reckoned."""
    model = ModelFigures(tp, 32, 16_000_000_000 // tp, 131_072 // tp, 2)
    times = ReckonedTimes(model, gpu_figures("NVIDIA H100")[0])
    return Speed(tp, times, Bounds(16, 8192, 256), 300_000 * tp, 100_000)


def admitted(demand: Demand, speed: Speed, found: Estimate, times_batch: float) -> bool:
    """Does the router admit one more request on an engine that has `times_batch` of the estimate's batch?"""
    terms = demand.terms
    assert terms.ttft_ms is not None and terms.tpot_ms is not None
    running = max(0, round(times_batch * found.batch) - 1)
    share = found.capacity_rps * times_batch / 1e3 * speed.times.prefill_ms(demand.prompt_tokens)
    job = Job(int(demand.prompt_tokens), demand.output_tokens, terms.ttft_ms, terms.tpot_ms)
    load = Load(
        "e",
        speed.times,
        requests=running,
        context=running * (demand.prompt_tokens + demand.output_tokens / 2),
        tightest_tpot_ms=terms.tpot_ms if running else float("inf"),
        prefill_ms=min(1.0, share) * WINDOW_MS,
        bounds=speed.bounds,
        decoding=running,
    )
    return is_feasible(job, load, forecast(job, load))


prompts, outputs = st.integers(16, 4000), st.integers(2, 1500)


@example(1, 16, 7, 30, 10)
@given(st.sampled_from((1, 2, 4)), prompts, outputs, st.integers(30, 4000), st.integers(3, 80))
def test_what_is_planned_is_admitted(tp: int, prompt: int, output: int, ttft: int, tpot: int) -> None:
    demand = Demand(Terms("t", 1.0, ttft, tpot), 1.0, prompt, output)
    speed = h100(tp)
    found = estimate(demand, speed)
    assume(found.capacity_rps > 0)
    assert found.ttft_ms <= SAFETY * ttft
    assert found.tpot_ms <= SAFETY * tpot
    # The router adds the prompt of the request in question to those of the last time, which the mean rate has in it.
    assert admitted(demand, speed, found, 0.95)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("prompt", "output", "tpot"), [(200, 1000, 9), (1000, 300, 12), (50, 400, 10)])
def test_the_router_does_not_admit_a_multiple_of_what_is_planned(tp: int, prompt: int, output: int, tpot: int) -> None:
    demand = Demand(Terms("t", 1.0, 2000, tpot), 1.0, prompt, output)
    speed = h100(tp)
    found = estimate(demand, speed)
    assert found.batch > 1
    assert not admitted(demand, speed, found, min(4.0, speed.bounds.requests / found.batch + 0.1))


def test_a_target_that_only_a_wide_engine_meets() -> None:
    demand = Demand(Terms("t", 1.0, 500, 7.5), 1.0, 500, 200)
    assert [estimate(demand, h100(tp)).capacity_rps > 0 for tp in (1, 2, 4)] == [False, True, True]
    assert estimate(demand, h100(1)).tpot_ms > SAFETY * 7.5


def test_the_rate_is_what_the_batch_ends() -> None:
    # Little's law: requests there = arrivals a second x seconds that each decodes.
    found = estimate(Demand(Terms("t", 1.0, 1000, 15), 1.0, 800, 200), h100(1))
    assert found.batch == pytest.approx(found.capacity_rps * 200 * found.tpot_ms / 1e3)


def test_times_grow_with_load_and_capacity_with_targets() -> None:
    demand = Demand(Terms("t", 1.0, 1000, 15), 1.0, 800, 200)
    found = estimate(demand, h100(1))
    times = [found.time_ms(load / 10) for load in range(12)]
    assert times == sorted(times)
    assert times[0] == found.alone_ms < times[5] < times[10] == times[11]
    looser = estimate(replace(demand, terms=Terms("t", 1.0, 1000, 30)), h100(1))
    assert looser.capacity_rps > 1.2 * found.capacity_rps
    shared = estimate(replace(demand, terms=Terms("t")), h100(1), 1000, 15, own=False)
    assert shared == found


def test_a_batch_that_is_larger_and_ends_less_is_not_wanted() -> None:
    class Worse(ReckonedTimes):
        """Each further request on the engine costs more than the one before."""

        def decode_ms(self, batch: float, context: float) -> float:
            return 5.0 + 0.01 * batch**2

    times = Worse(ModelFigures(1, 32, 16_000_000_000, 131_072, 2), gpu_figures("NVIDIA H100")[0])
    found = estimate(Demand(Terms("t"), 1.0, 16, 400), replace(h100(1), times=times))
    assert found.batch < 100 < h100(1).bounds.requests
    assert list(found.rates_rps) == sorted(found.rates_rps)
    assert found.capacity_rps == max(found.rates_rps)


def test_requests_wait_for_the_prompts_of_others() -> None:
    # Prompts take nearly all of the time: within a TTFT of twice a prompt's own time, no more than so much of it.
    demand = Demand(Terms("t"), 1.0, 4000, 2)
    alone = estimate(demand, h100(1)).alone_ms
    found = estimate(replace(demand, terms=Terms("t", 1.0, 2 * alone, 1000)), h100(1))
    busy = found.capacity_rps * h100(1).times.prefill_ms(4000) / 1e3
    assert 0.4 < busy < 0.7
    # Without a target the queue grows as busy / (1 - busy); nothing is planned that has no end.
    assert estimate(demand, h100(1)).capacity_rps < 1e3 / h100(1).times.prefill_ms(4000)
    assert estimate(demand, h100(1)).times_ms[-1] > 5 * alone


def test_memory_bounds_the_batch_and_the_length() -> None:
    demand = Demand(Terms("t"), 1.0, 800, 200)
    roomy, small = estimate(demand, h100(1)), estimate(demand, replace(h100(1), kv_tokens=8000))
    assert small.batch == 8 < roomy.batch
    assert estimate(demand, replace(h100(1), request_tokens=999)).capacity_rps == 0


def test_prompts_that_are_cut_cost_more() -> None:
    class Steps(ReckonedTimes):
        """Every read of prompts costs 10 ms, however short."""

        latency_ms = 0.0

        def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
            return 10.0 + 0.01 * tokens if tokens > 0 else 0.0

    plain = h100(1)
    times: Times = Steps(ModelFigures(1, 32, 16_000_000_000, 131_072, 2), gpu_figures("NVIDIA H100")[0])
    speed = replace(plain, times=times)
    whole = estimate(Demand(Terms("t", 1.0, 5000, 200), 1.0, 4000, 50), speed)
    cut = estimate(Demand(Terms("t", 1.0, 5000, 14), 1.0, 4000, 50), speed)
    # 14 ms leave about 5 ms x 4 steps for each part: 10 ms of it are lost each time.
    assert 0 < cut.capacity_rps < 0.6 * whole.capacity_rps


@given(
    st.sampled_from((1, 2, 4)), st.integers(200, 4000), st.integers(20, 800), st.integers(8, 60), st.floats(0.3, 1.0)
)
def test_shorter_prompts_are_about_as_many_as_if_estimated_anew(
    tp: int, prompt: int, output: int, tpot: int, part: float
) -> None:
    asked = Demand(Terms("a", 1.0, 1000, tpot), 1.0, prompt, output)
    found = estimate(asked, h100(tp))
    assume(found.capacity_rps > 0)
    shorter = replace(asked, prompt_tokens=part * prompt)
    anew, known = estimate(shorter, h100(tp)), with_shorter_prompts(found, shorter, h100(tp), tpot)
    assert found.capacity_rps <= known.capacity_rps
    assert 0.8 * anew.capacity_rps <= known.capacity_rps <= 1.2 * anew.capacity_rps
    assert known.rates_rps[-1] == pytest.approx(known.capacity_rps)
    assert known.times_ms == found.times_ms
