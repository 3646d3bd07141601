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
    """A scheduler and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.scheduler = SimpleNamespace(
            ps=SimpleNamespace(tp_size=1),
            device="cuda",
            enable_overlap=True,
            forward_stream=STREAM,
            last_batch="in flight",
        )
        monkeypatch.setattr(arrive, "seat", lambda scheduler, arrivals: self._note("seat", arrivals))
        monkeypatch.setattr(arrive, "join_running", self._join)

    def _note(self, what: str, arrivals: list[Any]) -> None:
        self.done.append(f"{what} {' '.join(arrival.req.rid for arrival in arrivals)}")

    def _join(self, scheduler: Any, reqs: list[Any]) -> None:
        self.done.append(f"join {' '.join(req.rid for req in reqs)}")

    def copy(self, name: str) -> Any:
        return SimpleNamespace(
            wait=lambda: self.done.append(f"waited for {name}"),
            hold_back=lambda stream: self.done.append(f"{stream} is after {name}"),
        )

    def comes(self, rid: str, *, due: bool) -> None:
        def landed(rids: list[str], ran_s: float, steps_ms: dict[str, float]) -> None:
            assert ran_s > 0
            assert list(steps_ms) == ["wait for batch", "let in"]
            self.done.append(f"told of {' '.join(rids)}")

        arrivals: list[Any] = [SimpleNamespace(req=SimpleNamespace(rid=rid))]
        copies = [self.copy(f"the part of {rid} ahead"), self.copy(rid)]
        arrive._coming.append(arrive._Coming(arrivals, copies, landed, due, Laps()))

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
