"""Engines that have nothing to do, in the layout or not, leave the CPU alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from server import Server

pytestmark = pytest.mark.engine

WINDOW_S = 5.0


def test_idle_engines_sleep(ours: Callable[[str], Server]) -> None:
    engines = httpx.get(f"{ours('tp2').url}/adapt/engines").json()["engines"]
    ranks = [psutil.Process(pid) for engine in engines for pid in engine["pids"]]
    assert len(ranks) == 4

    def cpu_seconds() -> list[float]:
        return [sum(rank.cpu_times()[:2]) for rank in ranks]

    before = cpu_seconds()
    time.sleep(WINDOW_S)
    used = [after - start for after, start in zip(cpu_seconds(), before, strict=True)]
    assert max(used) < 0.1 * WINDOW_S, used
