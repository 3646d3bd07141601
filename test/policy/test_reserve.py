"""On which engines looser work leaves room for a tight tier."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.reserve import Asked, Place, guards

FOUR = [Place(name, 7.0) for name in "abcd"]


def asked(strict: float, loose: float) -> list[Asked]:
    return [Asked("strict", 10.0, strict), Asked("loose", 20.0, loose)]


def test_each_tier_has_its_share_of_the_engines() -> None:
    """The loosest tier of all has nobody to leave room for it."""
    assert list(guards(FOUR, asked(1, 1)).values()) == [10.0, 10.0, 20.0, 20.0]
    assert list(guards(FOUR, asked(3, 1)).values()) == [10.0, 10.0, 10.0, 20.0]
    assert list(guards(FOUR, asked(4, 1)).values()) == [10.0, 10.0, 10.0, 20.0]
    assert list(guards(FOUR, asked(8, 1)).values()) == [10.0] * 4
    assert list(guards(FOUR, [Asked("strict", 10.0, 1.0)]).values()) == [10.0] * 4
    assert list(guards(FOUR, []).values()) == [math.inf] * 4


def test_one_engine_at_least_leaves_room_and_it_is_the_quickest() -> None:
    places = [Place("slow", 7.0), Place("quick", 3.0)]
    assert guards(places, asked(1, 1e9)) == {"slow": 20.0, "quick": 10.0}
    assert guards(places[:1], asked(1, 1e9)) == {"slow": 10.0}


def test_an_engine_leaves_no_room_for_a_tier_that_is_promised_nothing_there() -> None:
    places = [Place("a", 3.0, frozenset({"loose"})), Place("b", 7.0, frozenset({"strict"}))]
    assert guards(places, asked(1, 0)) == {"a": 20.0, "b": 10.0}


@given(st.integers(1, 40), st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 1000)), min_size=1, max_size=5))
def test_the_tightest_tier_keeps_its_share_to_half_an_engine(engines: int, tiers: list[tuple[float, float]]) -> None:
    every = [Asked(str(n), tpot, share) for n, (tpot, share) in enumerate(tiers)]
    found = guards([Place(str(n), 1.0) for n in range(engines)], every)
    tightest = min(one.tpot_ms for one in every)
    mine = sum(one.share for one in every if one.tpot_ms == tightest) / sum(one.share for one in every)
    assert sum(value == tightest for value in found.values()) >= max(1, engines * mine - 0.5 - 1e-6)


def test_of_two_engines_one_is_left_to_a_looser_tier_that_asks_for_a_little_less() -> None:
    """Rounded down it would find none at 49 in a hundred, and one at 51."""
    places = [Place("a", 7.0), Place("b", 7.0)]
    assert guards(places, asked(51, 49)) == {"a": 10.0, "b": 20.0}
    assert guards(places, asked(80, 20)) == {"a": 10.0, "b": 10.0}
