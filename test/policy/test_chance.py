"""Closed formulas of chance, beside simulated queues and answers."""

from __future__ import annotations

import math
import random

import pytest

from sglang_adapt.policy.chance import admitted_rps, kept_share, steady_batch


def simulated_rps(offered: float, room: float, seed: int) -> float:
    """Of a queue with one server and equal work of a second, that takes in only who waits no longer than `room`."""
    chance = random.Random(seed)
    now = work = taken = 0.0
    for _ in range(40_000):
        gap = chance.expovariate(offered)
        now, work = now + gap, max(0.0, work - gap)
        if work <= room:
            work, taken = work + 1.0, taken + 1
    return taken / now


@pytest.mark.parametrize("offered", [0.5, 0.8, 1.0, 1.2, 1.5])
@pytest.mark.parametrize("room", [3.0, 10.0])
def test_who_finds_a_queue_short_enough(offered: float, room: float) -> None:
    assert admitted_rps(offered, 1.0, room, 0.0) == pytest.approx(simulated_rps(offered, room, 1), abs=0.06)


def test_without_a_target_all_that_can_be_is_served() -> None:
    assert admitted_rps(0.9, 1.0, math.inf, 1.0) == pytest.approx(0.9)
    assert admitted_rps(2.0, 1.0, math.inf, 1.0) == pytest.approx(1.0)
    assert admitted_rps(1.0, 0.0, 5.0, 0.0) == admitted_rps(0.0, 1.0, 5.0, 0.0) == 0.0


@pytest.mark.parametrize(("rate", "target"), [(0.02, 8.0), (0.035, 10.0), (0.035, 12.0)])
def test_short_answers_meet_more_prompts_than_the_mean(rate: float, target: float) -> None:
    """Prompts of 10 ms at `rate` a ms beside steps of 4 ms, answers of 93 tokens in the mean."""
    chance = random.Random(2)
    tpot = 4.0 / (1 - 10.0 * rate)
    kept = 0
    for _ in range(4000):
        tokens = max(1, round(chance.expovariate(1 / 93)))
        spread = math.sqrt(rate * tpot / tokens) * 10.0
        kept += chance.gauss(tpot, spread) <= target
    assert kept_share(target, tpot, rate * 100.0, 93) == pytest.approx(kept / 4000, abs=0.03)
    assert kept_share(math.inf, tpot, rate * 100.0, 93) == kept_share(target, tpot, 0.0, 93) == 1.0


def test_many_engines_may_be_fuller_than_one() -> None:
    assert 0.5 * 100 < steady_batch(100, 1) < steady_batch(100, 4) < 100
    assert steady_batch(4, 1) == 2.0
