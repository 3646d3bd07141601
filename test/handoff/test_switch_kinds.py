"""The same moves between TP 1 and TP 4, without overlap scheduling, and without a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import handoff_cases as cases
import pytest
from handoff_node import NodeProcess
from test_switch import ARGS, ENGINES, GEOMETRY, ONES, TWO
from weights_engines import forkserver

from sglang_adapt.kv.leases import EngineRanks

pytestmark = [pytest.mark.engine, pytest.mark.full]

FOUR = (EngineRanks(1, "tp1@0", (0,)), EngineRanks(2, "tp4@0-3", (0, 1, 2, 3)))
KINDS: dict[str, tuple[Any, ...]] = {
    "one and four": (replace(GEOMETRY, finest_tp=4), FOUR, ARGS),
    "no overlap": (GEOMETRY, ENGINES, {**ARGS, "disable_overlap_schedule": True}),
    "no prefix cache": (GEOMETRY, ENGINES, {**ARGS, "disable_radix_cache": True}),
    "priorities": (GEOMETRY, ENGINES, {**ARGS, "enable_priority_scheduling": True}),
}


@pytest.fixture(params=KINDS)
def node(request: pytest.FixtureRequest) -> Iterator[tuple[NodeProcess, list[str], list[str]]]:
    process = NodeProcess(forkserver(), *KINDS[request.param])
    layouts = (["tp1@0"], ["tp4@0-3"]) if request.param == "one and four" else (ONES, TWO)
    yield process, *layouts
    process.close()


def test_all_moves(node: tuple[NodeProcess, list[str], list[str]]) -> None:
    process, finer, coarser = node
    expected = process.call(cases.unswitched, "tp1@0")
    for sources, dests in ((finer, coarser), (coarser, finer)):
        done, kinds = process.call(cases.there_and_back, sources, dests, 6)
        assert set(kinds.values()) == {"running", "prefilling", "waiting"}
        assert cases.differences(done, expected) == {}
    done, _ = process.call(cases.exported_and_restored, finer[0], 6)
    assert cases.differences(done, expected) == {}
    done, spilled = process.call(cases.few_slots, coarser[0], finer[0], 2)
    assert len(spilled) == 7
    assert cases.differences(done, expected) == {}
