"""Goodput in simulated time: admission, placement and limits together, beside the same engine without them."""

from __future__ import annotations

import functools

import pytest
from simulated import Arrival, Speed, poisson, run

from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible


def tiers(weight: float) -> SloConfig:
    strict = Tier("strict", 400.0, 30.0, weight=weight, when_infeasible=WhenInfeasible.REJECT)
    return SloConfig((strict, Tier("loose", 2000.0, 80.0)), "loose")


SPEED = Speed(batch=12.0, token=0.06, step=6.0, request=0.6)
SLOWER = Speed(batch=36.0, token=0.18, step=18.0, request=1.8)
FASTER = Speed(batch=6.0, token=0.03, step=3.0, request=0.3)
AT_CAPACITY = 15.5
"""Requests a second of which the engine meets all targets without any admission, and not many more."""


def arrivals(rate: float, seed: int) -> list[Arrival]:
    return poisson(rate, 15.0, ("strict", "loose"), prompt=128, output=48, seed=seed)


@functools.cache
def met(
    rate: float, seed: int = 1, stock: bool = False, believed: Speed = SPEED, weight: float = 1.0
) -> dict[str, float]:
    return run(tiers(weight), arrivals(rate, seed), SPEED, stock=stock, believed=believed)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_met_without_admission_is_met_with_it(seed: int) -> None:
    assert met(AT_CAPACITY, seed, stock=True) == {"strict": 1.0, "loose": 1.0, "total": 1.0}
    assert met(AT_CAPACITY, seed) == {"strict": 1.0, "loose": 1.0, "total": 1.0}


def test_the_strict_tier_lives_and_the_total_does_not_fall_under_overload() -> None:
    stock = [times * AT_CAPACITY * met(times * AT_CAPACITY, stock=True)["total"] for times in (1, 2, 4)]
    assert stock[1] < 0.7 * stock[0] and met(2 * AT_CAPACITY, stock=True)["strict"] < 0.1
    for weight, least in ((1.0, (1.0, 1.0)), (8.0, (1.7, 2.0))):
        met_at = [met(times * AT_CAPACITY, weight=weight) for times in (1, 2, 4)]
        good = [times * AT_CAPACITY * one["total"] for times, one in zip((1, 2, 4), met_at, strict=True)]
        strict = [times * one["strict"] for times, one in zip((1, 2, 4), met_at, strict=True)]
        assert good[1] > good[0] and good[2] > 0.95 * good[1]
        assert strict[0] == 1.0 and strict[1] > least[0] and strict[2] > least[1], weight


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tiers_of_equal_weight_fare_alike_in_overload(seed: int) -> None:
    """The loose one can wait for room, which the strict one cannot."""
    for times in (2, 4):
        found = met(times * AT_CAPACITY, seed)
        assert 0.6 < found["strict"] / found["loose"] < 1.2


@pytest.mark.parametrize(("rate", "seed"), [(6.0, 2), (10.0, 1)])
def test_an_engine_that_is_thought_slow_is_found_out(rate: float, seed: int) -> None:
    """Believed steps leave no room for prompts; parts of a page would be so slow that the belief came true."""
    assert met(rate, seed, believed=SLOWER)["total"] >= 0.93


def test_an_engine_that_is_thought_fast_is_found_out() -> None:
    assert met(2 * AT_CAPACITY, believed=FASTER, weight=8.0)["strict"] > 0.7
    assert met(2 * AT_CAPACITY, believed=FASTER)["total"] > 0.55


def test_what_is_late_does_not_make_the_rest_late() -> None:
    """First come, first served, everything behind the first late one would be late as well."""
    assert met(20.0)["loose"] > 0.85
