"""An engine that expects to be asked for its requests looks for messages between batches."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.handover import LeaveCall
from sglang_adapt.engine.handover import EngineHandover
from sglang_adapt.upstream.handoff import leave, soon


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    ended: list[Any] = []

    def drain(scheduler: Any) -> None:
        ended.append(scheduler.last_batch)
        scheduler.last_batch = None

    monkeypatch.setattr(soon, "drain", drain)
    yield ended
    soon.expect_nothing()


def look(scheduler: Any, batch: str | None) -> None:
    """Messages are looked for while a batch is in flight."""
    scheduler.last_batch = batch
    soon.LooksBetweenBatches.hook(object())


def test_the_batch_in_flight_ends_first_while_an_export_is_expected(drained: list[Any]) -> None:
    scheduler = SimpleNamespace(enable_overlap=True)
    look(scheduler, "a")
    assert drained == []
    soon.expect_export(scheduler)
    look(scheduler, "b")
    look(scheduler, None)
    look(scheduler, "c")
    assert drained == ["b", "c"]
    soon.expect_nothing()
    look(scheduler, "d")
    assert drained == ["b", "c"]


def test_it_is_not_waited_for_for_ever(drained: list[Any]) -> None:
    scheduler = SimpleNamespace(enable_overlap=True)
    soon.expect_export(scheduler)
    for _ in range(soon.MOST_BATCHES + 5):
        look(scheduler, "a")
    assert len(drained) == soon.MOST_BATCHES


def test_without_overlap_nothing_is_in_flight_then(drained: list[Any]) -> None:
    scheduler = SimpleNamespace(enable_overlap=False)
    soon.expect_export(scheduler)
    look(scheduler, "a")
    assert drained == []


def test_who_hands_over_expects_no_export(drained: list[Any]) -> None:
    """What has been read to its end is found in the batch in flight."""
    scheduler = SimpleNamespace(enable_overlap=True)
    soon.expect_export(scheduler)
    try:
        EngineHandover(scheduler, copies=None).answer(LeaveCall(on=True))  # type: ignore[arg-type]
        look(scheduler, "a")
    finally:
        leave.hand_over(None)
    assert drained == []
