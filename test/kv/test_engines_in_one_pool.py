"""Engines of two TP sizes alive in one pool, serving at once from disjoint leases; leases that move between
them."""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kv_engines import KvCase, KvEngine, give_back, grow, lease_state, region_view
from weights_engines import EngineCase, EngineProcess, Output, forkserver, server_args_of
from weights_models import write_model

from sglang_adapt.kv.blocks import BlockLedger, BlockState
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.leases import EngineRanks, Leases
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.memory import Region, allocate

pytestmark = pytest.mark.engine

GEOMETRY = PoolGeometry(
    layers=2, kv_heads=4, head_dim=32, itemsize=4, finest_tp=2, block_bytes=4 * 4 * 32 * 4, blocks=200
)
ONE = EngineRanks(1, "tp1@0", (0,))
TWO = EngineRanks(2, "tp2@0-1", (0, 1))
NEW_TOKENS = 12
MANY_TOKENS = 150


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(rng.randrange(5, 40))] for _ in range(count)]


class Node:
    """Two virtual GPUs with a region and a ledger each, and engines on them. The test is their router."""

    def __init__(self, model: Path) -> None:
        self.context = forkserver()
        self.regions = {gpu: allocate(GEOMETRY.region_bytes, "cpu") for gpu in (0, 1)}
        ledgers = {gpu: BlockLedger(bytearray(ledger_bytes(GEOMETRY)), GEOMETRY, gpu, "test") for gpu in (0, 1)}
        self.ledgers, self.leases = ledgers, Leases(ledgers)
        ledgers[1].take(17, 99, BlockState.LEASED, 0)  # so that the ranks of TWO get different pages
        self.args = {**server_args_of(model), "disable_radix_cache": False}
        self.args.pop("max_total_tokens")
        self.engines = {
            ranks.name: KvEngine.launch(self.context, self.case(ranks, count))
            for ranks, count in ((ONE, 80), (TWO, 70))
        }
        stock = {**self.args, "page_size": 4, "max_total_tokens": GEOMETRY.capacity_tokens(1)}
        self.stock = EngineProcess.start(self.context, EngineCase(stock))

    def case(self, ranks: EngineRanks, pages: int) -> KvCase:
        lease = self.leases.grow(ranks, pages, 0)
        handles = tuple(self.regions[gpu].handle for gpu in ranks.gpus)
        return KvCase(ranks.name, self.args, GEOMETRY, handles, tuple(tuple(row) for row in lease.tolist()))

    def generate(self, requests: dict[str, list[list[int]]]) -> dict[str, list[Output]]:
        """All engines at once."""
        with ThreadPoolExecutor() as pool:
            running = {
                name: pool.submit(self.engines[name].generate, asked, NEW_TOKENS) for name, asked in requests.items()
            }
            return {name: future.result() for name, future in running.items()}

    def written(self, gpu: int, pages: Sequence[int]) -> bool:
        view = region_view(self.regions[gpu].tensor, GEOMETRY)
        return bool(view[:, :, torch.tensor(list(pages))].any())

    def check(self) -> None:
        """The ledgers add up, and every engine's rank has the lease that they say."""
        self.leases.check([ONE, TWO])
        for ranks in (ONE, TWO):
            if ranks.name in self.engines:
                states = self.engines[ranks.name].on_ranks(lease_state)
                assert [state.leased for state in states] == self.leases.lease(ranks).tolist()

    def close(self) -> None:
        for engine in (*self.engines.values(), self.stock):
            engine.close()
        for region in self.regions.values():
            assert isinstance(region, Region)
            region.close()


def kill_and_wait(pid: int) -> None:
    """Kill a process that need not be our child, and wait until nothing of it runs any more."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], 20)
        assert ended, f"process {pid} did not end"
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(write_model("llama", tmp_path_factory.mktemp("models")))
    yield node
    node.close()


def test_both_serve_at_once_as_stock_does(node: Node) -> None:
    for_one, for_two = prompts(4, 1), prompts(6, 2)
    outputs = node.generate({"tp1@0": for_one, "tp2@0-1": for_two})
    expected = node.stock.generate(for_one + for_two, NEW_TOKENS)
    got = outputs["tp1@0"] + outputs["tp2@0-1"]
    assert [output.ids for output in got] == [output.ids for output in expected]
    for output, want in zip(got, expected, strict=True):
        assert output.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    node.check()


def test_what_is_not_leased_is_not_written(node: Node) -> None:
    node.generate({"tp1@0": prompts(4, 3), "tp2@0-1": prompts(6, 4)})
    for gpu in (0, 1):
        leased = [
            ids for ranks in (ONE, TWO) for g, ids in zip(ranks.gpus, node.leases.lease(ranks), strict=True) if g == gpu
        ]
        assert all(node.written(gpu, ids) for ids in leased)
        others = set(range(1, GEOMETRY.blocks)) - {page for ids in leased for page in ids.tolist()}
        assert others
        assert not node.written(gpu, sorted(others))


@pytest.mark.parametrize(("name", "ranks"), [("tp1@0", ONE), ("tp2@0-1", TWO)])
def test_the_pool_has_the_regions_size_and_usage_counts_the_lease(node: Node, name: str, ranks: EngineRanks) -> None:
    node.generate({name: prompts(3, 5)})
    states = node.engines[name].on_ranks(lease_state)
    assert len(states) == ranks.tp
    for state in states:
        assert state.capacity == GEOMETRY.capacity_tokens(ranks.tp)
        assert state.used_tokens == 0
        assert state.usage == 0
        assert state.cached_tokens > 0
        size = GEOMETRY.tokens_per_block(ranks.tp)
        assert state.free + state.cached_tokens // size == len(state.leased)


@pytest.mark.parametrize(("name", "ranks"), [("tp1@0", ONE), ("tp2@0-1", TWO)])
def test_a_request_that_waits_for_room_goes_on_when_the_lease_grows(node: Node, name: str, ranks: EngineRanks) -> None:
    """Nothing runs meanwhile, which stock has never: its pool does not shrink."""
    engine, (prompt,) = node.engines[name], prompts(1, 8)
    (expected,) = node.stock.generate([prompt], NEW_TOKENS)
    count = len(node.leases.lease(ranks)[0]) - 3
    given = engine.on_ranks(give_back, [count] * ranks.tp)
    node.leases.shrink(ranks, given, 1)
    output = engine.generate_when_there_is_room(prompt, NEW_TOKENS, node.leases.grow(ranks, count, 1).tolist())
    assert output.ids == expected.ids
    node.check()


@pytest.mark.parametrize("name", ["tp1@0", "tp2@0-1"])
def test_a_request_that_outgrows_its_lease_goes_on_when_it_grows(node: Node, name: str) -> None:
    """Stock would end it with a 500."""
    (prompt,) = prompts(1, 9)
    (expected,) = node.stock.generate([prompt], MANY_TOKENS)
    output, taken = node.engines[name].generate_while_pages_go(prompt, MANY_TOKENS)
    assert taken > 40
    assert output.ids == expected.ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    node.check()


def test_a_lease_moves_from_one_engine_to_the_other(node: Node) -> None:
    """TP 1 gives up free pages, then pages of cached prefixes; TP 2 takes them and serves on."""
    one, two = node.engines["tp1@0"], node.engines["tp2@0-1"]
    asked = prompts(5, 6)
    expected = [output.ids for output in node.stock.generate(asked, NEW_TOKENS)]
    assert [output.ids for output in one.generate(asked, NEW_TOKENS)] == expected
    (before,) = one.on_ranks(lease_state)
    assert 0 < before.free < 75
    (given,) = one.on_ranks(give_back, [75])
    assert len(given) == 75
    assert set(given) < set(before.leased)
    node.leases.shrink(ONE, [given], 1)
    node.check()
    count = node.leases.free(TWO)
    two.on_ranks(grow, node.leases.grow(TWO, count, 1).tolist())
    node.check()
    assert set(given) <= set(node.leases.lease(TWO)[0].tolist())
    assert [output.ids for output in two.generate(asked, NEW_TOKENS)] == expected
    assert [output.ids for output in one.generate(asked[:1], 2)] == [expected[0][:2]], "five pages are enough for one"


def test_a_lease_that_cannot_shrink_says_so_and_stays(node: Node) -> None:
    two = node.engines["tp2@0-1"]
    before = two.on_ranks(lease_state)
    with pytest.raises(RuntimeError, match=r"CannotShrinkError: tp2@0-1: the lease of \d+ pages is to give 1000 back"):
        two.on_ranks(give_back, [1000, 1000])
    assert two.on_ranks(lease_state) == before, "nothing was evicted either"


def test_the_pages_of_an_engine_that_dies_serve_another(node: Node) -> None:
    two, one = node.engines.pop("tp2@0-1"), node.engines["tp1@0"]
    pids = two.pids()
    assert len(pids) == 2
    for pid in pids:
        kill_and_wait(pid)
    two.process.kill()
    assert node.leases.engine_died(TWO, 2) > 100
    room = node.leases.free(ONE)
    one.on_ranks(grow, node.leases.grow(ONE, room, 2).tolist())
    node.check()
    asked = prompts(12, 7)
    expected = [output.ids for output in node.stock.generate(asked, NEW_TOKENS)]
    assert [output.ids for output in one.generate(asked, NEW_TOKENS)] == expected
