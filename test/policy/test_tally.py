"""Running sums: the same as counting anew after whatever has happened."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.tally import Part, Sums, Tally

parts = st.builds(
    Part,
    st.integers(0, 1000),
    st.integers(0, 1000),
    unread=st.booleans(),
    decoding=st.booleans(),
    preemptible=st.booleans(),
    promised=st.booleans(),
    tpot_ms=st.sampled_from([None, 10.0, 12.5, 20.0]),
    aged=st.booleans(),
)
events = st.tuples(st.sampled_from(["put", "change", "drop"]), st.integers(0, 5), st.sampled_from("abc"), parts)


@given(st.lists(events, max_size=60))
def test_sums_are_those_of_what_is_there(happened: list[tuple[str, int, str, Part]]) -> None:
    tally, there = Tally(), {}
    for event, key, holder, part in happened:
        if event == "put":
            tally.put(key, holder, part)
            there[key] = (holder, part)
        elif event == "change":
            tally.change(key, part)
            if key in there:
                there[key] = (there[key][0], part)
        else:
            tally.drop(key)
            there.pop(key, None)
        for name in "abc":
            mine = [part for holder, part in there.values() if holder == name]
            sums = tally.of(name)
            assert (sums.requests, sums.unread) == (len(mine), sum(part.prompt for part in mine if part.unread))
            assert sums.context == sum(part.prompt + part.output for part in mine)
            assert sums.decoding == sum(part.decoding for part in mine)
            assert sums.preemptible == sum(part.preemptible for part in mine)
            assert (sums.promised, sums.aged) == (sum(p.promised for p in mine), sum(p.aged for p in mine))
            assert sums.tightest_tpot_ms == min((p.tpot_ms for p in mine if p.tpot_ms is not None), default=math.inf)


def test_nobody_has_anything() -> None:
    tally = Tally()
    tally.put("r", "a", Part(5))
    tally.put("r", "b", replace(Part(5), tpot_ms=3.0))
    assert tally.of("a") == Sums()
    tally.drop("r")
    assert tally.of("b") == Sums()


def test_what_parts_do_not_tell_yet_counts_until_it_is_taken_back() -> None:
    tally = Tally()
    tally.put("r", "a", Part(5, 1))
    tally.put("s", "a", Part(7, 1))
    tally.grow("a", 16)
    assert tally.of("a").context == 30
    tally.grow("a", -8)
    tally.change("r", Part(5, 9))
    assert tally.of("a").context == 30
    tally.grow("b", 3)
    assert tally.of("b") == Sums()
