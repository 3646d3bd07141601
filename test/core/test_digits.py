"""Numbers in plain digits."""

from __future__ import annotations

import argparse
import math

import pytest

from sglang_adapt.core.digits import NotANumberError, number, whole


@pytest.mark.parametrize("text", ["1_0", "１", "٣", "", "x", "1.5", "0x10", "1e3"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(NotANumberError, match="is not a whole number; write it in digits"):
        whole(text)


@pytest.mark.parametrize("text", ["1_0", "１.5", "٣", "", "x", "1,5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(NotANumberError, match="is not a number; write it in digits"):
        number(text)


def test_numbers() -> None:
    assert [whole(text) for text in ("7", "-1", " 10 ")] == [7, -1, 10]
    assert [number(text) for text in ("7", "-.5", "1e3", "inf")] == [7.0, -0.5, 1000.0, math.inf]


def test_a_flag_tells_it_under_its_name() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--many", type=whole)
    with pytest.raises(argparse.ArgumentError, match="argument --many: '1_0' is not a whole number"):
        parser.parse_args(["--many", "1_0"])
