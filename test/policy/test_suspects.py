"""Requests that may be why engines die: who goes on, and whom a death counts for."""

from __future__ import annotations

import pytest

from sglang_adapt.policy.suspects import PAST_TOKENS, Record, charged, to_go_on

LIMIT = 2
FRESH, ONCE = Record(0, 3, 0), Record(1, 3, 3)
TRIED = Record(2, 3 + PAST_TOKENS - 1, 3)
PASSED = Record(2, 3 + PAST_TOKENS, 3)


def test_a_suspect_is_tried_until_it_has_passed_the_point_of_its_last_death() -> None:
    told = [(record.is_suspect(LIMIT), record.is_tried(LIMIT)) for record in (FRESH, ONCE, TRIED, PASSED)]
    assert told == [(False, False), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({"a": FRESH, "b": ONCE}, ["a", "b"]),
        ({"a": FRESH, "b": TRIED, "c": PASSED}, ["a", "b"]),
        # Nobody else can have been it: a suspect that ends engines from time to time does not go on for ever.
        ({"a": FRESH, "c": PASSED}, ["a", "c"]),
        ({}, []),
    ],
)
def test_a_death_counts_for_the_one_that_is_tried_and_for_no_suspect_beside_it(
    lost: dict[str, Record], expected: list[str]
) -> None:
    assert charged(lost, LIMIT) == expected


def test_suspects_go_on_one_by_one_and_the_others_at_once() -> None:
    stranded = {"a": TRIED, "b": ONCE, "c": TRIED, "d": FRESH}
    assert to_go_on(stranded, LIMIT, one_is_tried=False) == ["a", "b", "d"]
    assert to_go_on(stranded, LIMIT, one_is_tried=True) == ["b", "d"]
