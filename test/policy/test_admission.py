"""Which request an engine can take within all targets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adapt.policy.admission import (
    SAFETY,
    Forecast,
    Job,
    Load,
    Outcome,
    admit,
    aged_place,
    decodes_beside,
    forecast,
    guarded_ms,
    is_feasible,
    is_late,
    place,
    retry_after_s,
    room_for,
    with_takers,
)
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.profile import ModelFigures, ReckonedTimes, gpu_figures
from sglang_adapt.policy.reserve import NO_ROOM, Guard

H100 = ReckonedTimes(ModelFigures(1, 32, 16_060_522_496, 131_072, 2), gpu_figures("H100")[0])
STRICT = Job(1000, 200, 300.0, 10.0)
LOOSE = Job(1000, 200, 300.0, 20.0)
LOOSE_LINEAR = Job(1, 1, 1000.0, 20.0)


class Linear:
    """A token of a prompt takes 1 ms, a step 1 ms a request."""

    latency_ms = 0.0

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return tokens

    def decode_ms(self, batch: float, context: float) -> float:
        return batch


def test_an_idle_engine_takes_what_its_times_allow() -> None:
    assert admit(STRICT, [Load("a", H100)], reject=False, waiting=0, queue_limit=9).engine == "a"
    impossible = Job(1000, 200, 300.0, 5.0)
    assert admit(impossible, [Load("a", H100)], reject=False, waiting=0, queue_limit=9).outcome is Outcome.BEST_EFFORT


def test_what_is_assigned_is_deducted() -> None:
    """An engine takes feasible requests until the next would break a target, and no more."""
    load, taken = Load("a", Linear(), tightest_tpot_ms=10.1), 0
    job = Job(1, 1, 1000.0, 10.1)
    while admit(job, [load], reject=False, waiting=0, queue_limit=99).outcome is Outcome.FEASIBLE:
        taken += 1
        load = Load("a", Linear(), taken, 0, 0.0, 10.1)
    assert taken == 9 == math.floor(SAFETY * 10.1)


def test_prompts_before_it_count_for_the_first_token() -> None:
    job = Job(10, 1, 100.0, 1000.0)
    assert forecast(job, Load("a", Linear(), 2, 50)).ttft_ms == 2 + 60
    assert is_feasible(job, Load("a", Linear(), 2, 83), forecast(job, Load("a", Linear(), 2, 83)))
    assert not is_feasible(job, Load("a", Linear(), 2, 84), forecast(job, Load("a", Linear(), 2, 84)))


def test_time_already_waited_counts() -> None:
    late = Job(10, 1, 100.0, 1000.0, waited_ms=86.0)
    assert admit(late, [Load("a", Linear())], reject=False, waiting=0, queue_limit=9).outcome is Outcome.BEST_EFFORT


def test_a_long_prompt_is_read_in_parts_so_that_others_keep_their_targets() -> None:
    """Of 6 ms 5.7 may be used: four steps of 3 have 8 tokens of the prompt beside them, four of 4 have 6."""
    bounds = Bounds(1, 1024, 64)
    load = Load("a", Linear(), 3, 0, 0.0, tightest_tpot_ms=6.0, bounds=bounds, decoding=3, prefill_ms=1000.0)
    job = Job(100, 10, 5000.0, 1000.0)
    seen = forecast(job, load)
    assert seen.ttft_ms == 3 + 100 / 8 * (8 + 4 * 3)
    assert seen.others_tpot_ms == 4 + 6 / 4 and is_feasible(job, load, seen)
    assert not is_feasible(Job(100, 10, 250.0, 1000.0), load, forecast(Job(100, 10, 250.0, 1000.0), load))
    # While prompts take little of its time they are not cut.
    seen = forecast(job, replace(load, prefill_ms=0.0))
    assert seen.ttft_ms == 3 + 100 and seen.others_tpot_ms == pytest.approx(4 / (1 - 100 / 2000))
    # Where not even the smallest part fits beside a step, there is no room.
    coarse = Load("a", Linear(), 3, 0, 0.0, tightest_tpot_ms=6.0, bounds=Bounds(16, 1024, 64))
    job = Job(1000, 10, 50_000.0, 1000.0)
    assert admit(job, [coarse], reject=False, waiting=0, queue_limit=9).outcome is Outcome.BEST_EFFORT


def test_least_load_wins_and_a_cached_prefix_decides_between_equals() -> None:
    idle, busy = Load("idle", H100), Load("busy", H100, 20, 3000, 20_000.0, cached=900)
    assert admit(LOOSE, [busy, idle], reject=False, waiting=0, queue_limit=9).engine == "idle"
    warm = Load("warm", H100, cached=0)
    same = Load("same", H100, cached=100)
    assert admit(LOOSE, [warm, same], reject=False, waiting=0, queue_limit=9).engine == "same"
    assert admit(LOOSE, [warm, Load("other", H100)], reject=False, waiting=0, queue_limit=9).engine == "warm"
    few = [Load("two", H100, 2, context=200.0), Load("one", H100, 1, context=100.0)]
    assert admit(LOOSE, few, reject=False, waiting=0, queue_limit=9).engine == "one"


def test_background_waits_and_a_full_queue_refuses() -> None:
    background = Job(100, 10, None, None)
    assert admit(background, [Load("a", H100)], reject=False, waiting=0, queue_limit=1).outcome is Outcome.BACKGROUND
    refused = admit(background, [Load("a", H100)], reject=False, waiting=1, queue_limit=1)
    assert refused.outcome is Outcome.REFUSED and refused.retry_after_s == 1 and "1 requests" in refused.reason


def test_a_refusal_says_what_would_have_been_and_when_to_come_again() -> None:
    load = Load("a", Linear(), 1, 5000)
    decision = admit(Job(10, 10, 1000.0, 100.0), [load], reject=True, waiting=0, queue_limit=9)
    assert decision.outcome is Outcome.REFUSED
    assert "within 1000 ms" in decision.reason and "at best 5011" in decision.reason
    # 5,011 ms less the 900 that it may take.
    assert decision.retry_after_s == 5


def test_while_no_engine_serves_requests_wait_up_to_the_limit() -> None:
    assert admit(STRICT, [], reject=True, waiting=0, queue_limit=1).outcome is Outcome.BEST_EFFORT
    refused = admit(STRICT, [], reject=False, waiting=1, queue_limit=1)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.REFUSED, 1)


def test_room_that_costs_no_target() -> None:
    job = Job(50, 10, None, None)
    tight = Load("a", Linear(), 5, 0, 0.0, tightest_tpot_ms=6.0)
    queued = Load("b", Linear(), 1, 100)
    idle = Load("c", Linear())
    assert room_for(job, [tight, queued], 120.0) is None
    assert room_for(job, [tight, queued], 151.0) == 1
    assert room_for(job, [tight, queued, idle], 120.0) == 2
    assert room_for(job, [idle, idle], 120.0, first=1) == 1
    # However long its prompt, an engine that does nothing takes it.
    assert room_for(Job(10_000, 1, None, None), [idle], 120.0) == 0
    assert room_for(job, [Load("d", Linear(), 4, bounds=Bounds(1, 1 << 20, 4))], 1e9) is None


def test_a_long_prompt_without_a_promise_is_read_in_parts_beside_what_was_promised() -> None:
    """A prompt of 3,000 tokens takes more than the time over which shares are reckoned: whole, it fits nowhere."""
    job = Job(3000, 10, None, None)
    busy = Load("a", Linear(), 3, 0, 0.0, tightest_tpot_ms=6.0, bounds=Bounds(1, 1024, 64), decoding=3)
    assert forecast(job, busy).others_tpot_ms > 0.75 * 6.0
    # Parts of 6 tokens beside four steps of 4 ms: 3,000 / 6 x (6 + 16) = 11,000 ms.
    assert room_for(job, [busy], 11_000.0) == 0
    assert room_for(job, [busy], 10_999.0) is None, "the next prompt with a promise would come late"
    assert room_for(job, [replace(busy, prefill_tokens=1)], 1e9) is None, "one at a time"
    assert room_for(job, [replace(busy, requests=4, decoding=4)], 1e9) is None, "five steps are above 4.5 ms"
    # A step of 4 ms leaves 6.8 ms for four of them: pages of 16 tokens do not fit.
    assert room_for(job, [replace(busy, bounds=Bounds(16, 1024, 64))], 1e9) is None
    # A short prompt waits until less has been read of late.
    assert room_for(Job(100, 10, None, None), [replace(busy, prefill_ms=1500.0)], 1e9) is None
    # The same for a target that is to be expected, if something was promised there.
    assert room_for(job, [replace(busy, tightest_tpot_ms=50.0, guard=Guard(6.0))], 11_000.0) == 0


def test_a_reader_takes_what_it_reads_in_time_and_what_somebody_decodes_in_time() -> None:
    """Ten requests that it reads are five more for each taker, and decode steps there cost its first tokens nothing."""
    reader = Load("r", Linear(), 10, 50, 100.0, tightest_tpot_ms=9.0)
    takers = [Load("t", Linear(), 3, tightest_tpot_ms=9.0), Load("u", Linear(), 30, tightest_tpot_ms=90.0)]
    mixed = Load("m", Linear(), 10, 50, tightest_tpot_ms=90.0)
    placed = with_takers([reader, mixed], {"r"}, takers)
    assert placed[1] == mixed and placed[0].takers is not None
    assert [one.requests for one in placed[0].takers] == [8, 35]
    # 50 tokens before its own 10, no step; the ninth request of the first taker.
    job = Job(10, 1, 100.0, 10.0)
    seen = forecast(job, placed[0])
    assert seen == Forecast(60.0, 9.0, 0.0, False)
    # 9 is more than 0.95 of what the others there have been promised, 9.5 is not.
    assert not is_feasible(job, placed[0], seen)
    there = replace(takers[0], tightest_tpot_ms=10.0)
    assert is_feasible(job, with_takers([reader], {"r"}, [there, takers[1]])[0], seen)
    # A first token that is late is so whoever decodes.
    late = Job(10, 1, 60.0, 10.0)
    assert not is_feasible(late, with_takers([reader], {"r"}, [there, takers[1]])[0], seen)
    # Where all takers are full there is no place, and none without a taker.
    full = replace(there, bounds=Bounds(1, 1024, 8))
    assert forecast(job, with_takers([reader], {"r"}, [full])[0]).full
    assert not is_feasible(job, with_takers([reader], {"r"}, [])[0], seen)


def test_a_request_that_waits_to_be_handed_over_is_decoded_between_prompts() -> None:
    reader = replace(Load("r", Linear(), 2, 20, tightest_tpot_ms=9.0, decoding=1), takers=(Load("t", Linear()),))
    seen = forecast(Job(10, 1, 1000.0, 10.0), reader)
    # The step in flight, and 20 tokens before its own 10.
    assert seen.ttft_ms == 1 + 30 and 1 < seen.others_tpot_ms < 2


def test_work_without_a_promise_is_read_where_it_costs_no_target_later() -> None:
    job = Job(10, 1, None, None)
    reader = Load("r", Linear())
    busy, idle = Load("t", Linear(), 6, tightest_tpot_ms=9.0), Load("u", Linear())
    # Seven requests take 7 ms a step; three quarters of 9 are less.
    assert not decodes_beside(job, busy) and decodes_beside(job, idle)
    assert room_for(job, with_takers([reader], {"r"}, [busy]), 1e9) is None
    assert room_for(job, with_takers([reader], {"r"}, [busy, idle]), 1e9) == 0


def test_room_is_left_for_what_is_to_be_expected() -> None:
    job = Job(1, 10, None, None)

    def load(guard_ms: float) -> Load:
        return Load("a", Linear(), 6, guard=Guard(guard_ms))

    assert room_for(job, [load(math.inf)], 1e9) == 0
    # 7 requests take 7 ms a step, three quarters of 9 are less.
    assert room_for(job, [load(9.0)], 1e9) is None
    assert room_for(job, [load(10.0)], 1e9) == 0
    # The same for what has a looser target, but not for what is expected itself.
    loose, strict = Job(1, 1, 1000.0, 50.0), Job(1, 1, 1000.0, 9.0)
    assert admit(loose, [load(9.0)], reject=False, waiting=0, queue_limit=9).outcome is Outcome.BEST_EFFORT
    assert admit(loose, [load(10.0)], reject=False, waiting=0, queue_limit=9).outcome is Outcome.FEASIBLE
    assert admit(strict, [load(9.0)], reject=False, waiting=0, queue_limit=9).outcome is Outcome.FEASIBLE


def test_looser_work_has_room_where_a_step_is_most_of_a_stricter_target() -> None:
    """A step of one request takes 7.3 ms here: three quarters of 10 ms would be as good as nothing."""
    alone = H100.decode_ms(1, 1.0)
    assert 7.0 < alone < 7.5
    load = Load("a", H100, 2, 0, 2000.0, guard=Guard(10.0))
    assert 7.5 < guarded_ms(load) < SAFETY * 10.0
    assert is_feasible(LOOSE, load, forecast(LOOSE, load))
    many = Load("a", H100, 60, 0, 60_000.0, guard=Guard(10.0))
    assert not is_feasible(LOOSE, many, forecast(LOOSE, many)), "the stricter tier still finds room"


def test_no_room_is_left_for_a_target_that_cannot_be_kept() -> None:
    load = Load("a", H100, 60, 0, 60_000.0, guard=Guard(5.0))
    assert guarded_ms(load) == math.inf
    assert is_feasible(LOOSE, load, forecast(LOOSE, load))


def test_where_no_room_is_left_looser_work_goes_as_far_as_the_tight_tier_itself() -> None:
    strict, loose = Job(1, 1, 1000.0, 10.0), Job(1, 1, 1000.0, 50.0)
    for requests in range(12):
        load = Load("a", Linear(), requests, guard=Guard(10.0, NO_ROOM))
        both = {is_feasible(job, load, forecast(job, load)) for job in (strict, loose)}
        # 10 requests take 10 ms a step.
        assert both == {requests + 1 <= SAFETY * 10}, requests


def test_while_looser_work_waits_a_tight_target_binds_no_engine_that_is_open_to_it() -> None:
    """Of two engines one leaves room for the strict tier; what is promised on the other one is looser."""
    strict, loose = Job(1, 1, 1000.0, 10.0), Job(1, 1, 1000.0, 20.0)

    def loads(waits_ms: float, guarded: int = 8, tightest_ms: float = 20.0) -> list[Load]:
        kept = Load("guarded", Linear(), guarded, tightest_tpot_ms=10.0, guard=Guard(10.0), waits_ms=waits_ms)
        return [kept, Load("open", Linear(), 5, tightest_tpot_ms=tightest_ms, waits_ms=waits_ms)]

    def where(job: Job, loads: list[Load]) -> str | None:
        return admit(job, loads, reject=True, waiting=0, queue_limit=9).engine

    assert where(strict, loads(0.0)) == "open", "the least load, while nothing waits"
    assert where(strict, loads(20.0)) == "guarded", "where room is left for it, however full that is"
    assert where(strict, loads(0.0, guarded=10)) == "open"
    assert where(strict, loads(20.0, guarded=10)) is None, "the open one is the looser tier's while that waits"
    assert where(strict, loads(10.0, guarded=10)) == "open", "what waits is no looser"
    assert where(strict, loads(20.0, guarded=10, tightest_ms=10.0)) == "open", "it is bound already"
    assert where(strict, loads(20.0, guarded=10, tightest_ms=math.inf)) == "open", "nothing is promised there"
    assert where(loose, loads(20.0)) == where(loose, loads(0.0)) == "open"


def test_what_is_late_leaves_room_for_what_is_not() -> None:
    """In overload late work would else fill engines for ever, and all that comes would be late in turn."""
    load = Load("a", Linear(), 3, tightest_tpot_ms=10.0)
    # 4 requests take 4 ms a step: less than three quarters of the target, more than a quarter of what it leaves.
    assert room_for(LOOSE_LINEAR, [load], 1e9) == 0
    assert room_for(LOOSE_LINEAR, [load], 1e9, late=True) is None
    assert room_for(LOOSE_LINEAR, [replace(load, requests=2)], 1e9, late=True) == 0
    assert room_for(LOOSE_LINEAR, [replace(load, tightest_tpot_ms=math.inf)], 1e9, late=True) == 0


def test_what_has_waited_is_promised_its_targets_if_they_can_still_be_met() -> None:
    busy, idle = Load("busy", Linear(), 1, 60), Load("idle", Linear())
    decision = place(Job(20, 1, 100.0, 1000.0, waited_ms=60.0), [busy, idle])
    assert decision is not None and (decision.outcome, decision.engine) == (Outcome.FEASIBLE, "idle")
    assert place(Job(20, 1, 100.0, 1000.0, waited_ms=60.0), [busy]) is None
    assert place(Job(20, 1, None, None), [idle]) is None and place(Job(20, 1, 100.0, 9.0), []) is None


def test_what_not_even_an_idle_engine_could_give_in_time_is_late() -> None:
    busy = Load("busy", Linear(), 9, 5000)
    assert not is_late(Job(20, 1, 100.0, 9.0, waited_ms=80.0), [busy])
    assert is_late(Job(20, 1, 100.0, 9.0, waited_ms=80.1), [busy])


def test_old_work_gets_one_place_an_engine() -> None:
    loads = [Load("a", Linear(), 5), Load("b", Linear(), 2), Load("c", Linear(), 9, bounds=Bounds(1, 1 << 20, 9))]
    assert aged_place(loads, [0, 0, 0]) == 1
    assert aged_place(loads, [0, 1, 0]) == 0
    assert aged_place(loads, [1, 1, 0]) is None


engine_loads = st.builds(
    Load,
    st.just("a"),
    st.just(H100),
    st.integers(0, 300),
    st.integers(0, 50_000),
    st.floats(0, 1e6),
    st.sampled_from([10.0, 20.0, 50.0, math.inf]),
    st.floats(0, 4000),
    st.sampled_from([Bounds(16, 2048, 64), Bounds(1, 1 << 30, 1 << 30)]),
    st.integers(0, 2000),
)
jobs = st.builds(
    Job, st.integers(1, 20_000), st.floats(1, 2000), st.floats(1, 10_000), st.floats(1, 200), st.floats(0, 5000)
)


def test_background_work_gives_way() -> None:
    full = Load("a", Linear(), 4, bounds=Bounds(1, 1024, 4), preemptible=1)
    assert admit(Job(1, 1, 100.0, 100.0), [full], reject=False, waiting=0, queue_limit=9).engine == "a"
    assert room_for(Job(1, 1, None, None), [full], 1e9) is None


@given(jobs, st.lists(engine_loads, min_size=1, max_size=5), st.booleans())
@settings(deadline=None)
def test_feasible_means_every_target_is_predicted_to_hold(job: Job, loads: list[Load], reject: bool) -> None:
    loads = [Load(str(at), *(getattr(load, f) for f in Load.__slots__[1:])) for at, load in enumerate(loads)]
    decision = admit(job, loads, reject=reject, waiting=0, queue_limit=1)
    fits = [load for load in loads if is_feasible(job, load, forecast(job, load))]
    if decision.outcome is Outcome.FEASIBLE:
        assert decision.engine in {load.engine for load in fits}
        assert decision.ttft_ms is not None and decision.ttft_ms <= job.ttft_ms
        assert decision.tpot_ms is not None and decision.tpot_ms <= job.tpot_ms
    else:
        assert not fits
        assert decision.outcome is (Outcome.REFUSED if reject else Outcome.BEST_EFFORT)
        assert not reject or 1 <= decision.retry_after_s <= 60


@given(jobs, engine_loads, st.integers(0, 50), st.integers(0, 5000), st.floats(0, 1e5), st.floats(0, 1000))
@settings(deadline=None)
def test_more_to_do_never_makes_an_infeasible_request_feasible(
    job: Job, load: Load, requests: int, tokens: int, context: float, prefill_ms: float
) -> None:
    more = Load(
        "a",
        H100,
        load.requests + requests,
        load.prefill_tokens + tokens,
        load.context + context,
        load.tightest_tpot_ms,
        load.prefill_ms + prefill_ms,
        load.bounds,
        load.cached,
    )
    if is_feasible(job, more, forecast(job, more)):
        assert is_feasible(job, load, forecast(job, load))


@given(jobs, st.lists(engine_loads, min_size=1, max_size=4), st.floats(0, 500), st.integers(0, 3))
@settings(deadline=None)
def test_room_never_breaks_a_promise(job: Job, loads: list[Load], spare_ms: float, first: int) -> None:
    at = room_for(job, loads, spare_ms, first)
    if at is not None and loads[at].requests:
        found = forecast(job, loads[at])
        assert not found.full and found.others_tpot_ms <= loads[at].tightest_tpot_ms
    if at is None:
        assert all(load.requests for load in loads)
    assert 1 <= retry_after_s(job, loads) <= 60
