"""Room for requests that are still being read elsewhere, at the engine that will decode them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.handoff import KvSource
from sglang_adapt.core.handover import AheadCall
from sglang_adapt.upstream.handoff import early
from sglang_adapt.upstream.handoff.adopt import AdoptError
from sglang_adapt.upstream.handoff.agree import UnderWay
from sglang_adapt.upstream.kv_lease import EngineLease

PAGE = 16


class Taker:
    """An engine of one rank with a few free pages, as far as this asks it.

    Attributes:
        free: pages.
        running: requests that decode.
        done: what was done, in order.
    """

    def __init__(self, pages: int, running: int = 0) -> None:
        self.free = list(range(1, pages + 1))
        self.done: list[tuple[str, object]] = []
        self.scheduler = SimpleNamespace(
            page_size=PAGE,
            ps=SimpleNamespace(tp_size=1),
            running_batch=SimpleNamespace(reqs=[None] * running, batch_is_full=True),
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: PAGE * len(self.free)),
            tree_cache=SimpleNamespace(evictable_size=lambda: 0),
        )

    def bring(self, number: int, first: int, end: int, tokens: int = 101, fails: bool = False) -> None:
        def start(pages: list[int], fresh: bool) -> UnderWay:
            if fails:
                raise ValueError("no such GPU")
            self.done.append(("copy", (pages, fresh)))
            return SimpleNamespace(
                by_host=False,
                ended=True,
                fault=None,
                wait=lambda: self.done.append(("waited", number)),
                hold_back=lambda stream: None,
            )

        call = AheadCall(number, f"r{number}", first, end, tokens, KvSource([0], [[]]))
        early.bring(self.scheduler, call, start, len(self.scheduler.running_batch.reqs))


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taker]:
    there = Taker(20, running=3)

    def allocate(scheduler: Any, count: int) -> list[int]:
        taken, there.free = there.free[:count], there.free[count:]
        return taken

    def free(scheduler: Any, pages: Collection[int]) -> None:
        there.free += pages
        there.done.append(("freed", len(pages)))

    monkeypatch.setattr(early, "allocate", allocate)
    monkeypatch.setattr(early, "free", free)
    monkeypatch.setattr(EngineLease, "of", lambda scheduler: SimpleNamespace(spare_pages=len(there.free)))
    yield there
    early.forget(there.scheduler, list(early._early))


def test_room_is_made_for_all_of_a_request_and_filled_part_by_part(taker: Taker) -> None:
    taker.bring(1, 0, 0)
    # The KV of its last token is not there yet: 100 tokens.
    assert (early.pages_ahead(), len(taker.free)) == (7, 13)
    assert not early.give_way(taker.scheduler)
    taker.bring(1, 0, 32)
    taker.bring(1, 32, 48)
    pages = early.of(1, "r1").pages
    assert taker.done == [("copy", (pages[:2], False)), ("copy", (pages[2:3], False))]
    assert early.of(1, "r1").tokens == 48
    assert early.of(1, "another") is early.NOTHING


def test_pages_that_were_just_taken_may_be_written_by_the_batch_in_flight(taker: Taker) -> None:
    taker.bring(1, 0, 32)
    assert taker.done == [("copy", ([1, 2], True))]
    early.give_way(taker.scheduler)
    taker.bring(1, 32, 64)
    assert taker.done[-1] == ("copy", ([3, 4], False))


def test_a_request_that_does_not_fit_gets_nothing(taker: Taker) -> None:
    taker.bring(1, 0, 0)
    # 13 pages are free, of which three requests may need one each.
    with pytest.raises(AdoptError, match="needs 11 blocks here and others 3, 13 can be had"):
        taker.bring(2, 0, 16, tokens=177)
    assert (early.requests_ahead(), len(taker.free)) == (1, 13)
    taker.bring(2, 0, 16, tokens=161)
    assert len(taker.free) == 3


def test_a_part_that_does_not_follow_is_refused(taker: Taker) -> None:
    taker.bring(1, 0, 32)
    for first, end in ((0, 16), (48, 64), (32, 40)):
        with pytest.raises(AdoptError, match=f"tokens {first} to {end} come ahead, 32 are here"):
            taker.bring(1, first, end)
    early.forget(taker.scheduler, [1])
    with pytest.raises(AdoptError, match="0 are here"):
        taker.bring(1, 32, 64)
    assert len(taker.free) == 20


def test_a_copy_that_cannot_start_leaves_nothing(taker: Taker) -> None:
    with pytest.raises(ValueError, match="no such GPU"):
        taker.bring(1, 0, 32, fails=True)
    assert (early.requests_ahead(), len(taker.free)) == (0, 20)
    taker.bring(1, 0, 32)
    with pytest.raises(ValueError, match="no such GPU"):
        taker.bring(1, 32, 64, fails=True)
    assert early.of(1, "r1").tokens == 32


def test_pages_are_free_when_nothing_is_copied_into_them(taker: Taker) -> None:
    taker.bring(1, 0, 32)
    taker.bring(1, 32, 64)
    early.forget(taker.scheduler, [1, 7])
    assert [what for what, _ in taker.done] == ["copy", "copy", "waited", "waited", "freed"]
    # What found no room is looked at again.
    assert not taker.scheduler.running_batch.batch_is_full


def test_requests_that_run_come_first(taker: Taker) -> None:
    for number in (1, 2):
        taker.bring(number, 0, 32)
    early.give_way(taker.scheduler)
    assert early.requests_ahead() == 2
    taker.free = taker.free[:3]
    early.give_way(taker.scheduler)
    # The last one is given up; that is enough.
    assert (early.of(1, "r1").tokens, early.of(2, "r2").tokens) == (32, 0)


def test_what_is_taken_over_comes_before_what_is_being_read(taker: Taker) -> None:
    for number in (1, 2):
        taker.bring(number, 0, 32)
    early.give_up(taker.scheduler, 7, keep=[2])
    assert (early.of(1, "r1").tokens, early.of(2, "r2").tokens) == (0, 32)
    early.give_up(taker.scheduler, 100, keep=[2])
    assert early.requests_ahead() == 1
    early.take([2, 5])
    assert (early.requests_ahead(), len(taker.free)) == (0, 13)
