"""The router's leases: who gets what at the start, what comes back from the dead, and what a failed call changes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.layout import EngineSpec, candidate_engines
from sglang_adapt.kv.blocks import NoFreeBlocksError
from sglang_adapt.kv.ledger_format import ForeignLedgerError, ledger_bytes
from sglang_adapt.kv.plan import CopyBatch, RequestCopy
from sglang_adapt.kv.sizing import KvShape, size_pool
from sglang_adapt.memory import Region, allocate
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError
from sglang_adapt.router.pools import Pools

SETTINGS = size_pool(KvShape(2, 4, 32, 2), (1, 2), 16, 1600, (4, 2))
ASKED, STANDBY = 100, SETTINGS.standby_blocks
ENGINES = candidate_engines((1, 2), 2)
ONE, OTHER, BOTH = ENGINES
assert [spec.name for spec in ENGINES] == ["tp1@0", "tp1@1", "tp2@0-1"]


class Ranks:
    """Engines' ranks as they would answer: they hold pages, and give the last ones back."""

    def __init__(self) -> None:
        self.held: dict[str, list[list[int]]] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.error: Exception | None = None
        self.during: Any = lambda: None

    async def __call__(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> list[dict[str, Any]]:
        self.calls.append((engine, name, epoch))
        self.during()
        if self.error is not None:
            raise self.error
        if name == "kv_grow":
            for rank, pages in enumerate(payload["pages"]):
                self.held[engine][rank] += unpack_ids(pages).tolist()
            return [{} for _ in payload["pages"]]
        answers = []
        for pages in self.held[engine]:
            given = [pages.pop() for _ in range(payload["count"])]
            answers.append({"pages": pack_ids(sorted(given))})
        return answers


class Node:
    """Two GPUs' ledgers and three engines."""

    def __init__(self, active: tuple[EngineSpec, ...] = (ONE, OTHER)) -> None:
        self.ranks = Ranks()
        self.killed: list[tuple[str, str]] = []
        self.regions: dict[int, Region] = {}
        self.freed = 0
        self.pools = Pools(
            SETTINGS,
            ENGINES,
            active,
            self.ranks,
            lambda spec, why: self.killed.append((spec.name, why)),
            freed=self._on_freed,
        )
        self.keeper(0, 1)

    def _on_freed(self) -> None:
        self.freed += 1

    def keeper(self, *gpus: int) -> None:
        """A keeper of these GPUs is ready."""
        for gpu in gpus:
            self.regions[gpu] = allocate(ledger_bytes(SETTINGS.geometry), "cpu")
        self.pools.open({gpu: region.handle for gpu, region in self.regions.items()})

    def start(self, *specs: EngineSpec) -> Node:
        for spec in specs or ENGINES:
            self.ranks.held[spec.name] = self.pools.first_lease(spec)
        self.check()
        return self

    def gone(self, *specs: EngineSpec) -> None:
        for spec in specs:
            had, _ = self.pools.counts(spec)
            assert self.pools.engine_gone(spec) == had
            del self.ranks.held[spec.name]
        self.check()

    def counts(self) -> dict[str, int]:
        return {spec.name: self.pools.counts(spec)[0] for spec in ENGINES}

    def check(self) -> None:
        self.pools.check()
        for spec in ENGINES:
            held = self.ranks.held.get(spec.name)
            if held is not None:
                assert [sorted(pages) for pages in held] == self.pools.lease(spec)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.mark.parametrize("order", [ENGINES, ENGINES[::-1]])
def test_the_layout_gets_all_that_was_asked_for_in_whatever_order_engines_start(order: tuple[EngineSpec, ...]) -> None:
    assert Node().start(*order).counts() == {"tp1@0": ASKED, "tp1@1": ASKED, "tp2@0-1": STANDBY}
    assert Node((BOTH,)).start(*order).counts() == {"tp1@0": STANDBY, "tp1@1": STANDBY, "tp2@0-1": ASKED}


def test_nobody_has_the_dummy_block_or_anothers() -> None:
    node = Node().start()
    for gpu in (0, 1):
        pages = [page for spec in ENGINES if gpu in spec.gpus for page in node.pools.lease(spec)[gpu - spec.first_gpu]]
        assert sorted(pages) == list(range(1, SETTINGS.geometry.blocks))


@pytest.mark.parametrize("spec", ENGINES)
def test_what_a_dead_engine_had_is_leased_to_it_again(spec: EngineSpec) -> None:
    node = Node().start()
    before = node.counts()
    node.gone(spec)
    assert node.pools.counts(spec) == (0, before[spec.name])
    assert node.start(spec).counts()[spec.name] == STANDBY
    run(node.pools.fill(spec))
    assert node.counts() == before


def test_an_engine_whose_blocks_are_being_copied_can_be_started_when_the_copy_has_ended() -> None:
    node = Node(active=(BOTH,))
    pools = node.pools
    lease = pools.first_lease(ONE)
    pools.first_lease(OTHER)
    reserved = pools.reserve(BOTH, 1)
    pools.lend(BOTH, pools.available(BOTH))
    copy = RequestCopy("a", 8, np.array(lease, dtype=np.int32), np.array(reserved, dtype=np.int32))
    ticket = pools.begin_copy([CopyBatch(tuple(ONE.gpus), tuple(BOTH.gpus), (copy,))])
    pools.engine_gone(ONE)
    assert not pools.can_start(ONE)
    with pytest.raises(NoFreeBlocksError):
        pools.first_lease(ONE)
    assert node.freed == 0
    pools.end_copy(ticket)
    assert node.freed == 1
    assert pools.can_start(ONE)
    # They stay its own until then.
    assert pools.available(BOTH) == 0
    assert pools.first_lease(ONE) == lease


def test_a_dead_engine_of_the_layout_leaves_idle_ones_their_part() -> None:
    node = Node().start()
    node.gone(BOTH, ONE)
    node.start(ONE)
    node.start(BOTH)
    run(node.pools.fill(ONE))
    assert node.counts() == {"tp1@0": ASKED, "tp1@1": ASKED, "tp2@0-1": STANDBY}


def test_blocks_move_between_engines() -> None:
    """As a change of layout will do."""
    node = Node().start()
    given = [run(node.pools.give_back(spec, ASKED - STANDBY)) for spec in (ONE, OTHER)]
    assert node.pools.counts(BOTH) == (STANDBY, ASKED - STANDBY)
    got = run(node.pools.grow(BOTH, node.pools.available(BOTH)))
    assert [sorted(pages) for pages in got] == [sorted(given[0][0]), sorted(given[1][0])]
    assert node.counts() == {"tp1@0": STANDBY, "tp1@1": STANDBY, "tp2@0-1": ASKED}
    node.check()
    assert {epoch for _, _, epoch in node.ranks.calls} == {node.pools.epoch}


def test_more_than_is_free_is_refused_before_anyone_is_asked() -> None:
    node = Node().start()
    with pytest.raises(NoFreeBlocksError, match="tp1@0: its lease was to grow by 1 blocks, 0 are available"):
        run(node.pools.grow(ONE, 1))
    assert node.ranks.calls == []


def test_what_is_kept_for_an_engine_that_is_being_started_is_not_given_away() -> None:
    node = Node().start()
    node.gone(BOTH)
    assert node.pools.counts(ONE) == (ASKED, STANDBY)
    with pytest.raises(NoFreeBlocksError, match="0 are available"):
        run(node.pools.grow(ONE, 1))
    node.start(BOTH)


def test_a_refused_call_changes_nothing() -> None:
    node = Node().start()
    run(node.pools.give_back(ONE, 10))
    before = node.counts()
    node.ranks.error = CallRefusedError("tp1@0: no")
    with pytest.raises(CallRefusedError):
        run(node.pools.grow(ONE, 5))
    with pytest.raises(CallRefusedError):
        run(node.pools.give_back(ONE, 5))
    assert node.counts() == before
    assert node.killed == []
    node.check()


@pytest.mark.parametrize("operation", ["grow", "give_back"])
def test_after_a_broken_call_the_engine_is_killed_and_its_blocks_come_back_when_it_is_gone(operation: str) -> None:
    node = Node().start()
    run(node.pools.give_back(ONE, 10))
    node.ranks.error = CallBrokenError("tp1@0: only some ranks did it")
    with pytest.raises(CallBrokenError):
        run(getattr(node.pools, operation)(ONE, 5))
    assert node.killed == [("tp1@0", "tp1@0: only some ranks did it")]
    leased, free = node.pools.counts(ONE)
    assert leased + free == ASKED, "what the ranks may still write to is not free"
    assert leased >= ASKED - 10
    node.pools.engine_gone(ONE)
    assert node.pools.counts(ONE) == (0, ASKED)


@pytest.mark.parametrize("operation", ["grow", "give_back"])
@pytest.mark.parametrize("refused", [False, True])
def test_an_engine_that_dies_and_is_back_before_its_answer_is_read(operation: str, refused: bool) -> None:
    node = Node().start()
    run(node.pools.give_back(ONE, 10))

    def dies() -> None:
        node.pools.engine_gone(ONE)
        node.pools.first_lease(ONE)

    node.ranks.during = dies
    node.ranks.error = CallRefusedError("no") if refused else None
    with pytest.raises(CallRefusedError if refused else EngineGoneError):
        run(getattr(node.pools, operation)(ONE, 5))
    assert node.pools.counts(ONE) == (STANDBY, ASKED - STANDBY), "its new lease is untouched"
    node.pools.check()


def test_a_keeper_that_is_started_anew_begins_a_ledger_and_an_epoch() -> None:
    node = Node().start()
    epoch = node.pools.epoch
    node.gone(ONE, BOTH)
    node.keeper(0)
    assert node.pools.epoch == epoch + 1
    assert node.counts() == {"tp1@0": 0, "tp1@1": ASKED, "tp2@0-1": 0}
    node.start(ONE, BOTH)
    run(node.pools.fill(ONE))
    assert node.counts() == {"tp1@0": ASKED, "tp1@1": ASKED, "tp2@0-1": STANDBY}


def test_a_keeper_that_is_still_there_keeps_its_ledger() -> None:
    node = Node().start()
    epoch, before = node.pools.epoch, node.counts()
    node.pools.open({gpu: region.handle for gpu, region in node.regions.items()})
    assert (node.pools.epoch, node.counts()) == (epoch, before)


def test_the_ledger_of_another_run_is_not_taken_over() -> None:
    node = Node().start()
    handles = {gpu: region.handle for gpu, region in node.regions.items()}
    other = Pools(SETTINGS, ENGINES, (ONE, OTHER), node.ranks, lambda spec, why: None)
    with pytest.raises(ForeignLedgerError, match="holds the ledger of run"):
        other.open(handles)
    node.check()


def test_before_a_keeper_is_ready_there_are_no_blocks() -> None:
    pools = Pools(SETTINGS, ENGINES, (ONE, OTHER), Ranks(), lambda spec, why: None)
    assert pools.counts(ONE) == (0, 0)
    assert pools.engine_gone(ONE) == 0
