"""Requests in every state move between real engines of several TP sizes on one pool, with overlap scheduling and
stock's strict memory checks on: their answers are those of an engine that is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import handoff_cases as cases
import pytest
from handoff_node import NodeProcess, Stream
from weights_engines import forkserver

from sglang_adapt.demo import demo_model_path
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.leases import EngineRanks

pytestmark = pytest.mark.engine

GEOMETRY = PoolGeometry(
    layers=3, kv_heads=8, head_dim=32, itemsize=4, finest_tp=2, block_bytes=4 * 8 * 32 * 4, blocks=1000
)
ENGINES = (EngineRanks(1, "tp1@0", (0,)), EngineRanks(2, "tp1@1", (1,)), EngineRanks(3, "tp2@0-1", (0, 1)))
ARGS = {
    "model_path": str(demo_model_path()),
    "device": "cpu",
    "dtype": "float32",
    "max_running_requests": 16,
    "sleep_on_idle": True,
    "log_level": "warning",
    "chunked_prefill_size": 32,
}
ONES = ["tp1@0", "tp1@1"]
TWO = ["tp2@0-1"]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    process = NodeProcess(forkserver(), GEOMETRY, ENGINES, ARGS)
    yield process
    process.close()


@pytest.fixture(scope="module")
def expected(node: NodeProcess) -> dict[str, Stream]:
    return node.call(cases.unswitched, "tp1@0")


@pytest.mark.parametrize("tokens", [pytest.param(3, marks=pytest.mark.full), 17])
def test_two_engines_become_one_and_two_again(node: NodeProcess, expected: dict[str, Stream], tokens: int) -> None:
    done, kinds = node.call(cases.there_and_back, ONES, TWO, tokens)
    assert set(kinds.values()) == {"running", "prefilling", "waiting"}
    assert cases.differences(done, expected) == {}


def test_one_engine_becomes_two_and_one_again(node: NodeProcess, expected: dict[str, Stream]) -> None:
    done, kinds = node.call(cases.there_and_back, TWO, ONES, 9)
    assert set(kinds.values()) == {"running", "prefilling", "waiting"}
    assert cases.differences(done, expected) == {}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["tp1@0", "tp2@0-1"])
def test_an_export_that_is_undone_leaves_no_trace(node: NodeProcess, expected: dict[str, Stream], engine: str) -> None:
    done, flushed = node.call(cases.exported_and_restored, engine, 7)
    assert cases.differences(done, expected) == {}
    assert not any(flushed), "the cache was flushed under held requests"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_adopt_that_fails_on_one_rank_takes_nothing_on_any(
    node: NodeProcess, expected: dict[str, Stream], rank: int
) -> None:
    done, said, unchanged = node.call(cases.adopt_fails, "tp1@0", "tp2@0-1", rank)
    assert any("made to fail" in line for line in said)
    assert any("OtherRankFailedError: another rank of this engine failed to adopt" in line for line in said)
    assert unchanged
    assert cases.differences(done, expected) == {}


def test_requests_without_a_slot_wait_with_their_kv_cached(node: NodeProcess, expected: dict[str, Stream]) -> None:
    done, spilled = node.call(cases.few_slots, "tp2@0-1", "tp1@0", 3)
    assert len(spilled) == 6
    assert cases.differences(done, expected) == {}


def test_aborts_while_requests_are_held_end_each_once(node: NodeProcess, expected: dict[str, Stream]) -> None:
    done, adopted, given_up = node.call(cases.aborted_while_held, "tp1@0", "tp2@0-1")
    assert given_up == ["greedy"]
    assert not {"stop", "waits.json"} & set(adopted)
    for rid in ("stop", "waits.json", "greedy"):
        assert done[rid].finished["type"] == "abort"
    rest = {rid: stream for rid, stream in expected.items() if rid not in ("stop", "waits.json", "greedy")}
    assert cases.differences(done, rest) == {}


def test_aborts_of_held_requests_take_effect_when_they_come_back(
    node: NodeProcess, expected: dict[str, Stream]
) -> None:
    done = node.call(cases.aborted_and_restored, "tp2@0-1")
    gone = ("stop", "long", "waits.json")
    for rid in gone:
        assert done[rid].finished["type"] == "abort"
    assert cases.differences(done, {rid: want for rid, want in expected.items() if rid not in gone}) == {}


@pytest.mark.full
@pytest.mark.parametrize(("source", "dest"), [("tp1@0", "tp2@0-1"), ("tp2@0-1", "tp1@1")])
def test_requests_join_an_engine_that_is_busy(
    node: NodeProcess, expected: dict[str, Stream], source: str, dest: str
) -> None:
    done = node.call(cases.into_a_busy_engine, source, dest)
    assert cases.differences(done, expected) == {}


@pytest.mark.parametrize("back", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_cannot_be_carried_stays_and_says_why(node: NodeProcess, expected: dict[str, Stream], back: bool) -> None:
    done, reasons = node.call(cases.some_stay, "tp1@0", "tp2@0-1", back)
    assert reasons == [{"penalised": "it is in hierarchical sparse attention"}] * 2
    assert cases.differences(done, expected) == {}


def test_stale_and_wrong_messages_change_nothing(node: NodeProcess, expected: dict[str, Stream]) -> None:
    done, said = node.call(cases.wrong_messages, "tp1@0", "tp2@0-1")
    assert {name: text.split(":")[0] for name, text in said.items()} == {
        "export again": "StaleHandoffError",
        "export of an old epoch": "StaleHandoffError",
        "restore of another epoch": "StaleHandoffError",
        "release of another epoch": "StaleHandoffError",
        "release that loses": "ExportError",
        "blocks for fewer requests": "AdoptError",
        "too few blocks": "AdoptError",
        "adopt again": "AdoptError",
        "adopt of an old epoch": "StaleHandoffError",
        "release again": "StaleHandoffError",
    }
    assert cases.differences(done, expected) == {}


@pytest.mark.full
def test_many_switches_at_random_times(node: NodeProcess) -> None:
    wrong, tokens = node.call(cases.many_switches, [ONES, TWO], 6, 1)
    assert wrong == [{}] * 6
    assert tokens > 1500
