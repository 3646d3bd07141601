"""How tiers have fared of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.router.fared import Fared


def test_who_was_promised_and_had_it_counts_among_who_came() -> None:
    now = 0.0
    fared = Fared(lambda: now)
    assert fared.kept("a") == 1.0
    for _ in range(4):
        fared.came("a")
    for _ in range(3):
        fared.promised("a")
    fared.broken("a")
    assert fared.kept("a") == pytest.approx(0.5) and fared.kept("b") == 1.0
    # What comes later counts more.
    now = 20_000.0
    fared.came("a")
    fared.promised("a")
    assert fared.kept("a") > 0.95


@given(st.lists(st.tuples(st.sampled_from(("came", "promised", "broken")), st.floats(0, 1e5)), max_size=40))
def test_it_is_a_part_whatever_happens(events: list[tuple[str, float]]) -> None:
    """A request that came long ago may be promised, or miss a target, when the others are forgotten."""
    now = 0.0
    fared = Fared(lambda: now)
    for event, wait in events:
        now += wait
        getattr(fared, event)("a")
        assert 0.0 <= fared.kept("a") <= 1.0
