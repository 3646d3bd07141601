"""On which engines looser work leaves room for a tight tier."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.reserve import FILL, NO_ROOM, Asked, Guard, Place, guards

FOUR = [Place(name, 7.0) for name in "abcd"]


def asked(strict: float, loose: float) -> list[Asked]:
    return [Asked("strict", 10.0, strict), Asked("loose", 20.0, loose)]


def targets(places: Sequence[Place], asked: Sequence[Asked]) -> dict[str, float]:
    return {engine: guard.tpot_ms for engine, guard in guards(places, asked).items()}


def test_each_tier_has_its_share_of_the_engines() -> None:
    """The loosest tier of all has nobody to leave room for it."""
    assert list(targets(FOUR, asked(1, 1)).values()) == [10.0, 10.0, 20.0, 20.0]
    assert list(targets(FOUR, asked(3, 1)).values()) == [10.0, 10.0, 10.0, 20.0]
    assert list(targets(FOUR, asked(4, 1)).values()) == [10.0, 10.0, 10.0, 20.0]
    assert list(targets(FOUR, asked(8, 1)).values()) == [10.0] * 4
    assert list(targets(FOUR, [Asked("strict", 10.0, 1.0)]).values()) == [10.0] * 4
    assert list(targets(FOUR, []).values()) == [math.inf] * 4


def test_one_engine_at_least_leaves_room_and_it_is_the_quickest() -> None:
    places = [Place("slow", 7.0), Place("quick", 3.0)]
    assert targets(places, asked(1, 1e9)) == {"slow": 20.0, "quick": 10.0}
    assert targets(places[:1], asked(1, 1e9)) == {"slow": 10.0}


def test_an_engine_leaves_no_room_for_a_tier_that_is_promised_nothing_there() -> None:
    places = [Place("a", 3.0, frozenset({"loose"})), Place("b", 7.0, frozenset({"strict"}))]
    assert targets(places, asked(1, 0)) == {"a": 20.0, "b": 10.0}


@given(st.integers(1, 40), st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 1000)), min_size=1, max_size=5))
def test_the_tightest_tier_keeps_its_share_to_half_an_engine(engines: int, tiers: list[tuple[float, float]]) -> None:
    every = [Asked(str(n), tpot, share) for n, (tpot, share) in enumerate(tiers)]
    found = targets([Place(str(n), 1.0) for n in range(engines)], every)
    tightest = min(one.tpot_ms for one in every)
    mine = sum(one.share for one in every if one.tpot_ms == tightest) / sum(one.share for one in every)
    assert sum(value == tightest for value in found.values()) >= max(1, engines * mine - 0.5 - 1e-6)


def test_of_two_engines_one_is_left_to_a_looser_tier_that_asks_for_a_little_less() -> None:
    """Rounded down it would find none at 49 in a hundred, and one at 51."""
    places = [Place("a", 7.0), Place("b", 7.0)]
    assert targets(places, asked(51, 49)) == {"a": 10.0, "b": 20.0}
    assert targets(places, asked(80, 20)) == {"a": 10.0, "b": 10.0}


def test_room_is_left_where_looser_work_has_an_engine_of_its_own() -> None:
    two, one = [Place("a", 7.0), Place("b", 7.0)], [Place("a", 7.0)]
    assert guards(two, asked(1, 1)) == {"a": Guard(10.0, FILL), "b": Guard(20.0, NO_ROOM)}
    assert guards(two, asked(9, 1)) == {"a": Guard(10.0, NO_ROOM), "b": Guard(10.0, NO_ROOM)}
    assert guards(one, asked(1, 1)) == {"a": Guard(10.0, NO_ROOM)}


def test_on_one_engine_room_is_left_for_a_tier_that_fares_worse_than_its_weight() -> None:
    def fill(kept: float, looser: float, weight: float = 1.0) -> float:
        strict = Asked("strict", 10.0, 1.0, weight, kept)
        return guards([Place("a", 7.0)], [strict, Asked("loose", 20.0, 1.0, kept=looser)])["a"].fill

    assert fill(1.0, 1.0) == fill(0.5, 0.5) == fill(0.5, 0.4) == NO_ROOM
    assert fill(0.5, 0.6) == fill(0.5, 0.5, weight=2.0) == fill(0.9, 0.5, weight=3.0) == FILL
    assert fill(0.96, 1.0, weight=9.0) == NO_ROOM, "nearly all of it is in time"
    assert fill(0.5, 0.2, weight=2.0) == NO_ROOM


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 10), st.floats(0.1, 10)), max_size=4))
def test_where_all_is_in_time_room_is_left_only_where_looser_work_has_engines_of_its_own(
    engines: int, tiers: list[tuple[float, float, float]]
) -> None:
    every = [Asked(str(n), tpot, share, weight) for n, (tpot, share, weight) in enumerate(tiers)]
    found = set(guards([Place(str(n), 1.0) for n in range(engines)], every).values())
    if every and len(found) == 1:
        assert found.pop().fill == NO_ROOM
