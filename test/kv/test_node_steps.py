"""Thousands of random steps of a node: requests run, move between TP sizes, are aborted in the middle of a
copy; engines grow, shrink and die. After each step the ledgers add up and every request still reads its own
KV."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_adapt.kv.adaptor import CannotShrinkError, LeasePages, layer_views
from sglang_adapt.kv.blocks import BlockLedger, BlockState, NoFreeBlocksError
from sglang_adapt.kv.copiers import CpuCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.leases import CopyTicket, EngineRanks, Leases
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.kv.ledger_reader import LedgerReader
from sglang_adapt.kv.plan import CopyBatch, RequestCopy
from sglang_adapt.kv.plan_build import build_plans

GEOMETRY = PoolGeometry(layers=1, kv_heads=2, head_dim=8, itemsize=2, finest_tp=4, block_bytes=2 * 2 * 16, blocks=13)
GPUS = range(4)
ENGINES = [
    EngineRanks(number, name, gpus)
    for number, (name, gpus) in enumerate(
        [
            ("tp1@0", (0,)),
            ("tp1@1", (1,)),
            ("tp1@2", (2,)),
            ("tp2@0-1", (0, 1)),
            ("tp2@2-3", (2, 3)),
            ("tp4@0-3", (0, 1, 2, 3)),
        ],
        start=1,
    )
]


@dataclass(eq=False, repr=False)
class Engine:
    """An engine's own side: for each rank its lease and its allocator's free list."""

    ranks: EngineRanks
    pages: list[LeasePages] = field(init=False)
    free: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = [LeasePages(self.ranks.name, GEOMETRY) for _ in self.ranks.gpus]
        self.free = [[] for _ in self.ranks.gpus]


@dataclass(eq=False, repr=False)
class Request:
    engine: Engine
    kv: torch.Tensor
    blocks: np.ndarray
    moving: bool = False

    @property
    def tokens(self) -> int:
        return self.kv.shape[1]


@dataclass(eq=False, repr=False)
class Move:
    """A request's copy in flight. What is over has no request any more, but its copy runs on."""

    request: Request
    dest: Engine
    dest_blocks: np.ndarray
    batch: CopyBatch
    ticket: CopyTicket
    over: bool = False


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory = {gpu: bytearray(ledger_bytes(GEOMETRY)) for gpu in GPUS}
        self.ledgers = {gpu: BlockLedger(self.memory[gpu], GEOMETRY, gpu, "run") for gpu in GPUS}
        self.readers = {gpu: LedgerReader(self.memory[gpu], GEOMETRY, gpu, "run") for gpu in GPUS}
        self.leases = Leases(self.ledgers)
        self.engines = [Engine(ranks) for ranks in ENGINES]
        self.requests: list[Request] = []
        self.moves: list[Move] = []
        self.epoch = 0
        self.rng = torch.Generator().manual_seed(0)
        self.regions = {gpu: self.random(GEOMETRY.region_shape) for gpu in GPUS}
        self.steps_since_death = 0
        for which in range(len(ENGINES)):
            self.grow(which, 2)

    def random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=self.rng)

    def heads(self, engine: Engine, rank: int) -> slice:
        heads = GEOMETRY.head_range(engine.ranks.tp, rank)
        return slice(heads.start, heads.stop)

    def slots(self, engine: Engine, blocks: np.ndarray, tokens: int) -> np.ndarray:
        size = GEOMETRY.tokens_per_block(engine.ranks.tp)
        return (blocks[:, None] * size + np.arange(size)).ravel()[:tokens]

    def lose(self, engine: Engine, blocks: np.ndarray) -> None:
        for pages, row in zip(engine.pages, blocks, strict=True):
            pages.remove(row)

    def gain(self, engine: Engine, blocks: np.ndarray) -> None:
        for pages, row in zip(engine.pages, blocks, strict=True):
            pages.add(row)

    # -- an engine's own life

    @rule(which=st.sampled_from(range(len(ENGINES))), count=st.integers(0, 4))
    def grow(self, which: int, count: int) -> None:
        engine = self.engines[which]
        if self.leases.free(engine.ranks) < count:
            with pytest.raises(NoFreeBlocksError):
                self.leases.grow(engine.ranks, count, self.epoch)
            return
        blocks = self.leases.grow(engine.ranks, count, self.epoch)
        self.gain(engine, blocks)
        for free, row in zip(engine.free, blocks, strict=True):
            free.extend(row.tolist())

    @rule(which=st.sampled_from(range(len(ENGINES))), count=st.integers(1, 3))
    def shrink(self, which: int, count: int) -> None:
        engine = self.engines[which]
        if len(engine.free[0]) < count:
            with pytest.raises(CannotShrinkError):
                engine.pages[0].choose(engine.free[0], count)
            return
        given = []
        for rank, pages in enumerate(engine.pages):
            back, kept = pages.choose(engine.free[rank], count)
            given.append(pages.remove(back))
            engine.free[rank] = kept.tolist()
        self.leases.shrink(engine.ranks, given, self.epoch)

    @precondition(lambda self: any(engine.free[0] for engine in self.engines))
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def start(self, data: st.DataObject, tokens: int) -> None:
        engine = data.draw(st.sampled_from([engine for engine in self.engines if engine.free[0]]))
        room = len(engine.free[0]) * GEOMETRY.tokens_per_block(engine.ranks.tp)
        tokens = min(tokens, room)
        count = GEOMETRY.blocks_for(tokens, engine.ranks.tp)
        blocks = np.array([free[:count] for free in engine.free], dtype=np.int32)
        engine.free = [free[count:] for free in engine.free]
        kv = self.random((2, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim))
        for rank, gpu in enumerate(engine.ranks.gpus):
            for kind, views in enumerate(layer_views(self.regions[gpu], GEOMETRY, engine.ranks.tp)):
                views[0][self.slots(engine, blocks[rank], tokens)] = kv[kind, :, self.heads(engine, rank)]
        self.requests.append(Request(engine, kv, blocks))

    @precondition(lambda self: any(not request.moving for request in self.requests))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.moving]))
        self.requests.remove(request)
        for free, row in zip(request.engine.free, request.blocks, strict=True):
            free.extend(row.tolist())

    # -- moves

    @precondition(lambda self: any(not request.moving for request in self.requests))
    @rule(data=st.data(), which=st.sampled_from(range(len(ENGINES))))
    def begin_move(self, data: st.DataObject, which: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.moving]))
        dest = self.engines[which]
        if dest is request.engine:
            return
        self.epoch += 1
        self.leases.export(request.engine.ranks, request.blocks, self.epoch)
        count = GEOMETRY.blocks_for(request.tokens, dest.ranks.tp)
        if self.leases.free(dest.ranks) < count:
            with pytest.raises(NoFreeBlocksError):
                self.leases.reserve(dest.ranks, count, self.epoch)
            self.leases.restore(request.engine.ranks, request.blocks, self.epoch)
            return
        blocks = self.leases.reserve(dest.ranks, count, self.epoch)
        copy = RequestCopy("r", request.tokens, request.blocks, blocks)
        batch = CopyBatch(request.engine.ranks.gpus, dest.ranks.gpus, (copy,))
        ticket = self.leases.begin_copy([batch], self.epoch)
        self.lose(request.engine, request.blocks)
        request.moving = True
        self.moves.append(Move(request, dest, blocks, batch, ticket))

    def end_copy(self, move: Move, run: bool) -> None:
        if run:
            for plan in build_plans(GEOMETRY, [move.batch]):
                DirectExecutor.on(GEOMETRY, plan.gpu, self.regions, CpuCopier()).start(plan).wait()
        self.leases.end_copy(move.ticket, self.epoch)
        self.moves.remove(move)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_move(self, data: st.DataObject, succeeds: bool) -> None:
        """The copy ends: adopted, or rolled back; of a move that is over only the copy is left."""
        move = data.draw(st.sampled_from(self.moves))
        self.end_copy(move, run=succeeds)
        if move.over:
            return
        request = move.request
        request.moving = False
        if succeeds:
            self.leases.adopt(move.dest.ranks, move.dest_blocks, self.epoch)
            self.leases.release(request.engine.ranks, request.blocks, self.epoch)
            request.engine, request.blocks = move.dest, move.dest_blocks
        else:
            self.leases.cancel(move.dest.ranks, move.dest_blocks, self.epoch)
            self.leases.restore(request.engine.ranks, request.blocks, self.epoch)
        self.gain(request.engine, request.blocks)

    @precondition(lambda self: any(not move.over for move in self.moves))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """The client goes away in the middle of the copy, which nevertheless runs on."""
        move = data.draw(st.sampled_from([m for m in self.moves if not m.over]))
        self.leases.release(move.request.engine.ranks, move.request.blocks, self.epoch)
        self.leases.cancel(move.dest.ranks, move.dest_blocks, self.epoch)
        self.requests.remove(move.request)
        move.over = True

    @precondition(lambda self: self.steps_since_death > 15)
    @rule(which=st.sampled_from(range(len(ENGINES))))
    def die(self, which: int) -> None:
        """An engine dies. A move away from it is lost, one towards it goes back; their copies may run on."""
        self.steps_since_death = 0
        dead = self.engines[which]
        self.epoch += 1
        self.leases.engine_died(dead.ranks, self.epoch)
        for move in self.moves:
            if move.over or dead not in (move.dest, move.request.engine):
                continue
            move.over = True
            if dead is move.dest:
                self.leases.restore(move.request.engine.ranks, move.request.blocks, self.epoch)
                self.gain(move.request.engine, move.request.blocks)
                move.request.moving = False
            else:
                self.leases.cancel(move.dest.ranks, move.dest_blocks, self.epoch)
        self.requests = [request for request in self.requests if request.engine is not dead]
        self.engines[which] = Engine(dead.ranks)

    # -- what must always hold

    @invariant()
    def ledgers_add_up(self) -> None:
        self.steps_since_death += 1
        self.leases.check(ENGINES)
        for reader in self.readers.values():
            assert sum(reader.snapshot().counts().values()) == GEOMETRY.blocks

    @invariant()
    def engines_have_what_the_ledgers_say(self) -> None:
        for engine in self.engines:
            held = [request.blocks for request in self.requests if request.engine is engine and not request.moving]
            for rank, gpu in enumerate(engine.ranks.gpus):
                leased = self.ledgers[gpu].ids(BlockState.LEASED, engine.ranks.number).tolist()
                assert engine.pages[rank].ids().tolist() == leased
                engine.pages[rank].check(engine.free[rank])
                in_use = [block for blocks in held for block in blocks[rank].tolist()]
                assert sorted(engine.free[rank] + in_use) == leased

    @invariant()
    def requests_read_their_own_kv(self) -> None:
        for request in self.requests:
            engine = request.engine
            for rank, gpu in enumerate(engine.ranks.gpus):
                for kind, views in enumerate(layer_views(self.regions[gpu], GEOMETRY, engine.ranks.tp)):
                    seen = views[0][self.slots(engine, request.blocks[rank], request.tokens)]
                    assert torch.equal(seen, request.kv[kind, :, self.heads(engine, rank)])


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
