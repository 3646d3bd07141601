"""One engine in simulated time, against figures that can be reckoned by hand."""

from __future__ import annotations

import math

import pytest
from simulations import Line

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.policy.limits import STEPS, Bounds, Limits
from sglang_adapt.simulate.engine import MOST_STEPS, Request, SimulatedEngine
from sglang_adapt.simulate.load import Arrival

TIMES = Line(batch=10.0, token=0.1, step=5.0, request=1.0)


def engine(kv_tokens: int = 10_000, chunk: int = 1000, requests: int = 8) -> SimulatedEngine:
    return SimulatedEngine(EngineSpec(0, 1), TIMES, Bounds(1, chunk, requests), kv_tokens)


def request(number: int, prompt: int, output: int, at_ms: float = 0.0, rank: int = 0) -> Request:
    return Request(number, f"r{number}", Arrival(at_ms, prompt, output, "a"), rank, unread=prompt)


def run(one: SimulatedEngine, coming: list[Request]) -> list[tuple[float, int]]:
    """Until all have ended; the times and numbers of batches' ends."""
    ends, coming = [], sorted(coming, key=lambda request: request.arrival.at_ms)
    while coming or one.due_ms < math.inf:
        if coming and coming[0].arrival.at_ms < one.due_ms:
            one.add(coming.pop(0), 0.0 if not ends else max(ends[-1][0], 0.0))
            continue
        now = one.due_ms
        one.finish()
        ends.append((now, len(one.requests)))
        one.start(now)
    return ends


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    alone = request(0, 100, 50)
    one = engine()
    run(one, [alone])
    assert alone.first_ms == pytest.approx(20.0)
    assert alone.last_ms == pytest.approx(20.0 + 49 * 6.0)
    assert alone.given == 50 and not one.requests and one.free_tokens == 10_000 and one.context == 0


def test_steps_in_which_nothing_changes_are_few_events() -> None:
    alone = request(0, 100, 1 + 4 * MOST_STEPS)
    assert len(run(engine(), [alone])) == 1 + 4


def test_a_request_that_comes_waits_for_the_step_in_flight_only() -> None:
    one, first, second = engine(), request(0, 100, 100), request(1, 100, 10, at_ms=33.0)
    one.add(first, 0.0)
    one.finish()
    one.start(20.0)
    one.add(second, 33.0)
    # Steps of 6 ms since 20 ms: the third one ends at 38 ms.
    assert one.due_ms == pytest.approx(38.0)
    progress = one.finish()
    assert progress.tokens == 3
    one.start(38.0)
    assert one.due_ms == pytest.approx(38.0 + 20.0)
    assert one.finish().first == (second,)


def test_prompts_are_read_in_parts_and_by_rank() -> None:
    one = engine(chunk=100)
    low, high = request(0, 250, 1, rank=0), request(1, 250, 1, rank=2)
    one.paused = True
    one.add(low, 0.0)
    one.add(high, 0.0)
    one.paused = False
    one.start(0.0)
    ends = run(one, [])
    # In the third the end of one and the beginning of the other share what a batch of one token takes.
    assert [end for end, _ in ends] == pytest.approx([20.0, 40.0, 59.9, 79.9, 99.9])
    assert high.first_ms == pytest.approx(59.9) and low.first_ms == pytest.approx(99.9)


def test_with_a_limit_steps_follow_each_part() -> None:
    one, first = engine(), request(0, 100, 100)
    one.add(first, 0.0)
    one.finish()
    one.limits = Limits(prefill_tokens=100)
    one.add(request(1, 200, 1, at_ms=20.0), 20.0)
    one.start(20.0)
    assert one.due_ms == pytest.approx(40.0)
    one.finish()
    one.start(40.0)
    assert one.due_ms == pytest.approx(40.0 + STEPS * 6.0)
    assert one.finish().tokens == STEPS


def test_what_has_no_room_waits_until_another_one_has_ended() -> None:
    one = engine(kv_tokens=250)
    first, second = request(0, 100, 50), request(1, 100, 50)
    run(one, [first, second])
    assert second.first_ms == pytest.approx(first.last_ms + 20.0)


def test_what_leaves_says_what_has_kv() -> None:
    one, runs, waits = engine(), request(0, 100, 50), request(1, 5000, 5)
    one.add(runs, 0.0)
    one.finish()
    one.start(20.0)
    one.pause(27.0)
    now = one.due_ms
    one.finish()
    one.add(waits, now)
    assert one.due_ms == math.inf
    assert one.leave() == [runs, waits]
    assert (runs.read, runs.unread, runs.given) == (103, 0, 3)
    assert (waits.read, waits.unread) == (0, 5000)
    assert one.free_tokens == 10_000 and one.context == 0
