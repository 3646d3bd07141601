"""Requests that wait in the router: order, and what is told of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.admission import Outcome
from sglang_adapt.router.held import Held


def test_what_can_be_in_time_goes_first_by_the_time_it_has_left() -> None:
    held = Held()
    held.add("old", Outcome.BEST_EFFORT, 900.0, 20.0)
    held.add("urgent", Outcome.BEST_EFFORT, 100.0, 20.0)
    held.add("bulk", Outcome.BACKGROUND, None, None)
    assert held.next_in_time(lambda rid: False) == "urgent"
    assert held.next_in_time(lambda rid: rid == "urgent") == "old"
    assert held.first() == "old" and list(held.heads()) == ["old", "bulk"]


def test_the_loosest_target_is_of_best_effort_that_waits() -> None:
    held = Held()
    assert held.loosest_ms == 0.0
    held.add("bulk", Outcome.BACKGROUND, None, None)
    held.add("own", Outcome.BACKGROUND, None, 90.0)
    assert held.loosest_ms == 0.0, "background work takes nobody's place"
    held.add("tight", Outcome.BEST_EFFORT, 1.0, 10.0)
    held.add("loose", Outcome.BEST_EFFORT, 1.0, 20.0)
    assert held.loosest_ms == 20.0
    held.drop("loose")
    held.drop("loose")
    assert held.loosest_ms == 10.0
    held.drop("tight")
    assert held.loosest_ms == 0.0 and len(held) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([10.0, 20.0, 60.0]))))
def test_the_loosest_target_is_that_of_a_count(steps: list[tuple[int, bool, float]]) -> None:
    held, waits = Held(), dict[str, float]()
    for number, comes, tpot_ms in steps:
        rid = str(number)
        if comes and rid not in waits:
            held.add(rid, Outcome.BEST_EFFORT, 1.0, tpot_ms)
            waits[rid] = tpot_ms
        elif not comes:
            held.drop(rid)
            waits.pop(rid, None)
        assert held.loosest_ms == max(waits.values(), default=0.0)
