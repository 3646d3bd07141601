"""Which tiers are to be expected, by what has come of late."""

from __future__ import annotations

import pytest

from sglang_adapt.core.slo import SloConfig, Terms, Tier
from sglang_adapt.router.expected import Expected

TERMS = Terms("strict", 100.0, 10.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def expected(clock: Clock) -> Expected:
    return Expected(SloConfig((Tier("strict", 100.0, 10.0),), "strict"), lambda name: 2.0, clock)


def silent_ms(gap_ms: float, requests: int) -> float:
    """So long nothing has come when a load of requests `gap_ms` apart counts as ended."""
    clock = Clock()
    seen = expected(clock)
    for _ in range(requests):
        seen.asked(TERMS)
        clock.now += gap_ms
    clock.now -= gap_ms
    for silent in range(0, 60_000, 50):
        if seen.is_quiet():
            return silent
        clock.now += 50
    raise AssertionError("it never counts as ended")


@pytest.mark.parametrize(
    ("gap_ms", "least", "most"), [(10.0, 1000, 1100), (400.0, 1900, 2100), (2000.0, 8_000, 10_100)]
)
def test_a_load_has_ended_when_nothing_comes_for_much_longer_than_before(gap_ms: float, least: int, most: int) -> None:
    assert least <= silent_ms(gap_ms, 200) <= most


def test_nothing_has_come_yet() -> None:
    assert expected(Clock()).is_quiet()
