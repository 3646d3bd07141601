"""How long a request may become: the smallest limit that holds what it asks for, the same wherever it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.lengths import MARGIN, MOST, fits, limit_for, longest, most_output

LIMITS = [1000, 2000, 4000]


@pytest.mark.parametrize(
    ("prompt", "asked", "limit", "need", "output"),
    [
        (100, 50, 1000, 151, 50),
        (100, 899, 1000, 1000, 899),
        (100, 900, 2000, 1001, 900),
        (100, None, 1000, 1000, 899),
        (994, None, 1000, 1000, 5),
        (995, None, 2000, 2000, 1004),
        (995, 2, 2000, 1001, 2),
        (1500, 4, 2000, 1506, 4),
        (100, MOST, 4000, 4000, 3899),
        (5000, 10, 4000, 4000, 0),
    ],
)
def test_the_smallest_limit_that_holds_it(prompt: int, asked: int | None, limit: int, need: int, output: int) -> None:
    assert limit_for(prompt, asked, LIMITS) == limit
    assert longest(prompt, asked, LIMITS) == need
    assert most_output(prompt, asked, LIMITS) == output


@given(st.integers(1, 4000 - MARGIN - 1), st.none() | st.integers(0, 5000))
def test_what_is_accepted_never_becomes_longer_than_what_has_to_hold_it(prompt: int, asked: int | None) -> None:
    assert fits(prompt, LIMITS[-1])
    need, output = longest(prompt, asked, LIMITS), most_output(prompt, asked, LIMITS)
    assert prompt + output < need <= limit_for(prompt, asked, LIMITS)
    assert asked is None or output <= asked
    # A request that the narrowest engine holds is given nothing of a wider one.
    if asked is None and fits(prompt, LIMITS[0]):
        assert prompt + output == LIMITS[0] - 1
