"""When an idle engine sleeps, and when it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.upstream import awake
from sglang_adapt.upstream.handoff import arrive


def sleeps(scheduler: Any) -> bool:
    slept: list[Any] = []
    awake.StaysAwake.hook(slept.append, scheduler)
    return bool(slept)


def test_an_engine_on_a_cpu_sleeps_unless_kv_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(device="cpu", idle_sleeper=object())
    awake.stay_awake(scheduler)
    assert sleeps(scheduler)
    monkeypatch.setattr(arrive, "_coming", ["a request"])
    assert not sleeps(scheduler)
