"""Who has which role now, and who takes a request over."""

from __future__ import annotations

import pytest

from sglang_adapt.core.layout import Role
from sglang_adapt.policy.roles import Rooms, Taker, choose_taker, roles_now

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


@pytest.mark.parametrize(
    ("roles", "up", "now"),
    [
        ([P, D, D], {0, 1, 2}, [P, D, D]),
        ([P, D, D], {0, 2}, [P, D, D]),
        ([P, D, D], {0}, [M, M, M]),
        ([P, D, D], {1, 2}, [M, M, M]),
        ([P, D, M], {0, 2}, [P, D, M]),
        ([P, D, M], {1, 2}, [P, D, M]),
        ([P, P, M], {0, 1}, [M, M, M]),
        ([P, D], set(), [P, D]),
        ([M, M], {0}, [M, M]),
    ],
)
def test_engines_are_mixed_while_a_role_is_missing(roles: list[Role], up: set[int], now: list[Role]) -> None:
    named = {str(number): role for number, role in enumerate(roles)}
    assert list(roles_now(named, {str(number) for number in up}).values()) == now


def test_the_engine_with_the_most_room_in_tokens_takes_over() -> None:
    small, large = Taker("small", 8, 100, 0, 0), Taker("large", 32, 40, 0, 0)
    chosen = choose_taker([small, large], 200, ())
    assert chosen is large
    assert choose_taker([small, large.after(1000)], 200, ()) is small
    # 25 blocks, and two for what comes: 27 of 30 and of 26.
    assert choose_taker([Taker("one", 8, 30, 0, 0)], 200, ()) is not None
    assert choose_taker([Taker("one", 8, 26, 0, 0)], 200, ()) is None
    assert choose_taker([], 1, ()) is None


def test_requests_that_run_need_blocks_soon() -> None:
    assert Taker("one", 8, 100, 80, 5).free == 80


def test_engines_where_no_target_suffers_take_over_first() -> None:
    small, large = Taker("small", 8, 100, 0, 0), Taker("large", 32, 40, 0, 0)
    assert choose_taker([small, large], 200, {"small"}) is small
    assert choose_taker([small, large], 200, {"small", "large"}) is large
    assert choose_taker([small.after(1000), large], 200, {"small"}) is large


def rooms(beside: dict[str, int], pressed: dict[str, int]) -> Rooms:
    """Engines with so many free blocks of 8 tokens, beside what goes ahead to them and without it."""
    return Rooms(*({name: Taker(name, 8, free, 0, 0) for name, free in one.items()} for one in (beside, pressed)))


def test_what_goes_ahead_makes_way_only_where_nobody_else_has_room() -> None:
    there = rooms({"one": 10, "two": 30}, {"one": 90, "two": 60})
    assert there.choose(200, ["one", "two"], ()) == "two"
    assert there.choose(400, ["one", "two"], ()) == "one"
    assert there.choose(800, ["one", "two"], ()) is None


def test_only_an_engine_that_holds_all_that_a_request_may_become_takes_it_over() -> None:
    there = rooms({"one": 30, "two": 60}, {"one": 30, "two": 60})
    assert there.choose(200, ["one"], {"two"}) == "one"
    assert there.choose(200, [], {"one", "two"}) is None


def test_each_request_leaves_less_room_for_the_next() -> None:
    there = rooms({"one": 60}, {"one": 60}).after("one", 200, ahead=False)
    assert (there.beside["one"].free, there.pressed["one"].free) == (33, 33)


def test_what_went_ahead_was_counted_before() -> None:
    there = rooms({"one": 60}, {"one": 90}).after("one", 200, ahead=True)
    assert (there.beside["one"].free, there.pressed["one"].free) == (60, 63)


def test_a_request_may_go_where_it_went_ahead_although_others_find_no_room_there() -> None:
    there = rooms({"one": 60}, {"one": 60})
    assert there.after("full", 200, ahead=True) == there
