"""How many tokens a request is expected to give."""

from __future__ import annotations

import pytest

from sglang_adapt.router.outputs import Outputs


def test_the_first_of_a_tier_says_what_the_next_will_give() -> None:
    outputs = Outputs()
    assert outputs.expect("strict", None) == 128
    outputs.finished("strict", 40)
    assert outputs.expect("strict", None) == 40
    assert outputs.expect("loose", None) == 128


def test_later_ones_move_the_mean() -> None:
    outputs = Outputs()
    outputs.finished("strict", 40)
    outputs.finished("strict", 140)
    assert outputs.expect("strict", None) == pytest.approx(45)


def test_nobody_gives_more_than_it_asks_for() -> None:
    outputs = Outputs()
    assert outputs.expect("strict", 16) == 16
    assert outputs.expect("strict", 4096) == 128


def test_tiers_that_are_gone_are_forgotten() -> None:
    outputs = Outputs()
    outputs.finished("strict", 40)
    outputs.finished("loose", 60)
    outputs.keep_only({"loose"})
    assert (outputs.expect("strict", None), outputs.expect("loose", None)) == (128, 60)
