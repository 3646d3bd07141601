"""Requests in no engine: all are seen, each leaves one by one, and another layout takes those that it can let go."""

from __future__ import annotations

import pytest

from sglang_adapt.router.long_requests import Lengths, LongRequests
from sglang_adapt.router.waiting import Message, Waiting


def filled() -> Waiting:
    long = LongRequests(Lengths({}), lambda: 0.0)
    waiting = Waiting(long)
    waiting.paused |= {"a": Message(1, b"a"), "b": Message(2, b"b")}
    long.wait("c", 3, b"c")
    waiting.for_room["d"] = Message(4, b"d")
    return waiting


def test_all_that_wait_are_seen() -> None:
    waiting = filled()
    assert list(waiting) == ["a", "b", "c", "d"]
    assert len(waiting) == 4


@pytest.mark.parametrize("rid", ["a", "c", "d"])
def test_one_that_is_dropped_waits_nowhere(rid: str) -> None:
    waiting = filled()
    waiting.drop(rid)
    assert sorted(waiting) == [one for one in "abcd" if one != rid]
    with pytest.raises(KeyError):
        waiting.drop(rid)


def test_another_layout_takes_what_was_paused_and_what_was_too_long() -> None:
    waiting = filled()
    assert waiting.take_after_switch() == [("c", 3, b"c"), ("a", 1, b"a"), ("b", 2, b"b")]
    assert list(waiting) == ["d"]
