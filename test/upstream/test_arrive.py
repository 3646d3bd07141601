"""Requests that are taken over get into a batch that waits for their KV; nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.laps import Laps
from sglang_adapt.upstream.handoff import arrive

STREAM = "the stream of batches"


class Rank:
    """A scheduler and what was done, in order.

    Attributes:
        everywhere: the other ranks of the engine say what this one does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.scheduler = SimpleNamespace(
            ps=SimpleNamespace(tp_size=1),
            device="cuda",
            enable_overlap=True,
            forward_stream=STREAM,
            last_batch="in flight",
            running_batch=SimpleNamespace(batch_is_full=True),
            abort_request=lambda abort: self.done.append(f"aborted {abort.rid}"),
        )
        self.everywhere = True
        monkeypatch.setattr(arrive, "true_on_all_ranks", lambda scheduler, mine: mine and self.everywhere)
        monkeypatch.setattr(arrive.early, "free", lambda scheduler, pages: self.done.append(f"freed {pages}"))
        monkeypatch.setattr(arrive, "seat", lambda scheduler, arrivals: self._note("seat", arrivals))
        monkeypatch.setattr(arrive, "join_running", self._join)

    def _note(self, what: str, arrivals: list[Any]) -> None:
        self.done.append(f"{what} {' '.join(arrival.req.rid for arrival in arrivals)}")

    def _join(self, scheduler: Any, reqs: list[Any]) -> None:
        self.done.append(f"join {' '.join(req.rid for req in reqs)}")

    def copy(self, name: str, *, by_host: bool = False) -> Any:
        return SimpleNamespace(
            by_host=by_host,
            ended=not by_host,
            fault=None,
            wait=lambda: self.done.append(f"waited for {name}"),
            hold_back=lambda stream: self.done.append(f"{stream} is after {name}"),
        )

    def comes(self, rid: str, *, due: bool, by_host: bool = False) -> Any:
        """Returns the copy of what has not come ahead."""

        def landed(rids: list[str], ran_s: float, steps_ms: dict[str, float]) -> None:
            assert ran_s > 0
            assert list(steps_ms) == ["wait for batch", "let in"]
            self.done.append(f"told of {' '.join(rids)}")

        def lost(rids: list[str], aborted: list[str], why: str | None) -> None:
            self.done.append(f"lost {rids}, given up {aborted}: {why}")

        arrivals: list[Any] = [SimpleNamespace(req=SimpleNamespace(rid=rid), pages=[5, 6])]
        copies = [self.copy(f"the part of {rid} ahead"), self.copy(rid, by_host=by_host)]
        arrive._coming.append(arrive._Coming(arrivals, copies, landed, lost, due, Laps()))
        return copies[-1]

    def batch(self) -> list[str]:
        """What is done before a batch."""
        self.done.clear()
        changed = arrive.land(self.scheduler)
        assert changed == any(done.startswith("seat") for done in self.done)
        return self.done


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    yield Rank(monkeypatch)
    arrive._coming.clear()
    arrive._let_in.clear()
    arrive._aborted.clear()


IN = ["seat a", "join a", f"{STREAM} is after the part of a ahead", f"{STREAM} is after a"]
TOLD = ["waited for the part of a ahead", "waited for a", "told of a"]


def test_the_batch_waits_for_the_copy_and_the_host_does_not(rank: Rank) -> None:
    rank.comes("a", due=True)
    assert rank.batch() == IN
    assert arrive.coming() == 0
    assert rank.batch() == TOLD
    assert rank.batch() == []


def test_what_is_long_has_a_batch_to_run_beside(rank: Rank) -> None:
    rank.comes("a", due=False)
    assert rank.batch() == []
    assert arrive.coming() == 1
    assert rank.batch() == IN


def test_an_idle_engine_waits_for_nothing_else(rank: Rank) -> None:
    rank.comes("a", due=False)
    rank.scheduler.last_batch = None
    assert rank.batch() == IN


def test_who_comes_is_let_in_before_others_are_told_of(rank: Rank) -> None:
    rank.comes("a", due=True)
    rank.batch()
    rank.comes("b", due=True)
    assert rank.batch()[-3:] == TOLD
    assert rank.done[0] == "seat b"


def test_on_a_cpu_there_is_no_stream(rank: Rank) -> None:
    rank.scheduler.device = "cpu"
    rank.comes("a", due=True)
    assert rank.batch()[-1] == "None is after a"


def test_what_processes_bring_is_let_in_when_it_is_there_on_all_ranks(rank: Rank) -> None:
    copy = rank.comes("a", due=True, by_host=True)
    assert rank.batch() == []
    copy.ended, rank.everywhere = True, False
    assert rank.batch() == []
    assert arrive.coming() == 1
    rank.everywhere = True
    assert rank.batch() == IN
    assert rank.batch() == TOLD


def test_an_idle_engine_waits_for_what_processes_bring(rank: Rank) -> None:
    copy = rank.comes("a", due=False, by_host=True)
    copy.wait = lambda: setattr(copy, "ended", True)
    rank.scheduler.last_batch = None
    assert rank.batch() == ["waited for the part of a ahead", *IN]


LOST = ["waited for the part of a ahead", "waited for a", "freed [5, 6]"]


def test_what_does_not_come_is_lost_to_this_engine_alone(rank: Rank) -> None:
    copy = rank.comes("a", due=True, by_host=True)
    rank.comes("b", due=True)
    copy.ended, copy.fault = True, "its keeper is gone"
    assert rank.batch()[:4] == [*LOST, "lost ['a'], given up []: its keeper is gone"]
    assert rank.done[4:6] == ["seat b", "join b"]
    assert arrive.coming() == 0
    # What found no room is looked at again.
    assert not rank.scheduler.running_batch.batch_is_full


def test_what_does_not_come_on_another_rank_is_lost_here_as_well(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = rank.comes("a", due=True, by_host=True)
    copy.ended = True
    answers = iter([True, False])  # ended everywhere, but not well
    monkeypatch.setattr(arrive, "true_on_all_ranks", lambda scheduler, mine: mine and next(answers))
    assert rank.batch() == [*LOST, "lost ['a'], given up []: None"]


def test_who_has_given_a_lost_request_up_is_told_with_it(rank: Rank) -> None:
    lost = rank.comes("a", due=True, by_host=True)
    rank.comes("b", due=False)
    for rid in ("a", "b"):
        arrive.abort(rid, False)
    lost.ended, lost.fault = True, "gone"
    assert rank.batch() == [*LOST, "lost ['a'], given up ['a']: gone"]
    # The other one is aborted when it runs.
    assert rank.batch()[-1] == "aborted b"


def test_who_has_given_a_request_up_that_runs_now_is_told_beside_a_lost_one(rank: Rank) -> None:
    lost = rank.comes("a", due=True, by_host=True)
    rank.comes("b", due=True)
    arrive.abort("b", False)
    lost.ended, lost.fault = True, "gone"
    assert rank.batch()[-1] == "aborted b"
    assert "lost ['a'], given up []: gone" in rank.done
    assert arrive._aborted == []
