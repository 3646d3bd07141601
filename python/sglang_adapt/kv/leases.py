"""Leases and requests on the move over all GPUs of a node: what the router does to the ledgers.

Ranks of one engine always hold equally many blocks, of different ids. Every change is checked on all of an
engine's GPUs before it is made on any; a ledger checks its own part itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_adapt.kv.blocks import BlockLedger, BlockState
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.kv.plan import CopyBatch, IntArray

BlockLists = IntArray | Sequence[Sequence[int]]


class PoolTooSmallError(LedgerError):
    """A request whose KV does not fit into the pool even if it had it alone."""


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """An engine as the ledgers know it.

    Attributes:
        number: 1 to 65535, unique among the engines of a run.
        name: for error texts, e.g. `tp2@0-1`.
        gpus: the GPU of each rank.
    """

    number: int
    name: str
    gpus: tuple[int, ...]

    @property
    def tp(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True, slots=True, eq=False)
class CopyTicket:
    """A copy in flight: the blocks that it reads and writes on each GPU, each once."""

    reads: Mapping[int, IntArray]
    writes: Mapping[int, IntArray]

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(sorted({*self.reads, *self.writes}))


def require_fits(geometry: PoolGeometry, engine: EngineRanks, tokens: int) -> int:
    """Blocks on each rank that a request of `tokens` tokens needs.

    Raises:
        PoolTooSmallError: more than the pool has; names the tokens that fit at this TP size.
    """
    needed = geometry.blocks_for(tokens, engine.tp)
    if needed > geometry.blocks - 1:
        raise PoolTooSmallError(
            f"{engine.name}: a request of {tokens} tokens needs {needed} blocks, the pool has "
            f"{geometry.blocks - 1}; at TP {engine.tp} at most {geometry.capacity_tokens(engine.tp)} tokens fit"
        )
    return needed


class Leases:
    """The ledgers of a node's GPUs, changed for whole engines.

    Block lists are int32 `[TP size, n]`, a row for each rank. Methods raise, with nothing changed:
        NoFreeBlocksError: a GPU of the engine has too few free blocks.
        StaleEpochError: `epoch` is below a ledger's.
        LedgerError: a block that is not what the change needs, or an engine on a GPU without a ledger.
    """

    def __init__(self, ledgers: Mapping[int, BlockLedger]) -> None:
        self._ledgers = dict(ledgers)

    def grow(self, engine: EngineRanks, count: int, epoch: int) -> IntArray:
        """Add `count` free blocks on each rank to the engine's lease; returns them."""
        return self._take(engine, count, BlockState.LEASED, epoch)

    def shrink(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Take blocks that the engine has given up out of its lease."""
        self._move(engine, ids, BlockState.LEASED, BlockState.FREE, epoch)

    def export(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Take the blocks of requests on the move out of the source's lease; they keep their KV."""
        self._move(engine, ids, BlockState.LEASED, BlockState.EXPORTED, epoch)

    def restore(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Undo `export`: the requests stay where they were."""
        self._move(engine, ids, BlockState.EXPORTED, BlockState.LEASED, epoch)

    def release(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Free exported blocks: their requests were adopted elsewhere, or aborted."""
        self._move(engine, ids, BlockState.EXPORTED, BlockState.FREE, epoch)

    def reserve(self, engine: EngineRanks, count: int, epoch: int) -> IntArray:
        """Set `count` free blocks on each rank aside for requests that are to be copied to the engine."""
        return self._take(engine, count, BlockState.RESERVED, epoch)

    def adopt(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Add reserved blocks, filled by a copy that has ended, to the destination's lease."""
        self._move(engine, ids, BlockState.RESERVED, BlockState.LEASED, epoch)

    def cancel(self, engine: EngineRanks, ids: BlockLists, epoch: int) -> None:
        """Give reserved blocks up: the move is rolled back, or the request was aborted."""
        self._move(engine, ids, BlockState.RESERVED, BlockState.FREE, epoch)

    def engine_died(self, engine: EngineRanks, epoch: int) -> int:
        """Take back all that a dead engine has; returns the most blocks that came back on one of its GPUs.

        Blocks that a copy uses stay quarantined until `end_copy`.
        """
        ledgers = self._of(engine)
        self._require_epoch(ledgers, epoch)
        return max(ledger.return_all(engine.number, epoch) for ledger in ledgers)

    def begin_copy(self, batches: Sequence[CopyBatch], epoch: int) -> CopyTicket:
        """Note that the copy of these batches is in flight; keep the ticket for `end_copy`.

        Two requests may read one block (a shared prefix), but never write one.
        """
        reads: dict[int, list[IntArray]] = {}
        writes: dict[int, list[IntArray]] = {}
        for batch in batches:
            for request in batch.requests:
                for gpu, row in zip(batch.source, request.source_blocks, strict=True):
                    reads.setdefault(gpu, []).append(row)
                for gpu, row in zip(batch.dest, request.dest_blocks, strict=True):
                    writes.setdefault(gpu, []).append(row)
        ticket = CopyTicket(
            {gpu: np.unique(np.concatenate(rows)) for gpu, rows in reads.items()},
            {gpu: np.concatenate(rows) for gpu, rows in writes.items()},
        )
        return self._begin(ticket, epoch)

    def begin_reading(self, blocks: Mapping[int, Sequence[int]], epoch: int) -> CopyTicket:
        """Note, by GPU, what an engine reads into blocks of its own lease, which are nobody else's while a process of
        it lives. As `begin_copy` otherwise."""
        reads = {gpu: np.unique(np.asarray(mine, dtype=np.int32)) for gpu, mine in blocks.items()}
        return self._begin(CopyTicket(reads, {}), epoch)

    def _begin(self, ticket: CopyTicket, epoch: int) -> CopyTicket:
        ledgers = [self._ledger(gpu) for gpu in ticket.gpus]
        self._require_epoch(ledgers, epoch)
        if len(ledgers) > 1:
            for ledger in ledgers:
                ledger.require_copyable(*_sides(ticket, ledger.gpu))
        for ledger in ledgers:
            ledger.begin_copy(*_sides(ticket, ledger.gpu), epoch)
        return ticket

    def end_copy(self, ticket: CopyTicket, epoch: int) -> None:
        """Note that a copy has ended, in whatever way: nothing reads or writes its blocks any more.
        Quarantined blocks become free. Call it once, and only after the executors have stopped or their
        process is gone."""
        ledgers = [self._ledger(gpu) for gpu in ticket.gpus]
        self._require_epoch(ledgers, epoch)
        for ledger in ledgers:
            ledger.require_in_copy(*_sides(ticket, ledger.gpu))
        for ledger in ledgers:
            ledger.end_copy(*_sides(ticket, ledger.gpu), epoch)

    def lease(self, engine: EngineRanks) -> IntArray:
        """The engine's leased blocks, `[TP size, n]`, ascending."""
        return np.stack([ledger.ids(BlockState.LEASED, engine.number) for ledger in self._of(engine)])

    def leased(self, engine: EngineRanks) -> int:
        """How many blocks the engine has leased on each of its GPUs."""
        return self._of(engine)[0].count(BlockState.LEASED, engine.number)

    def free(self, engine: EngineRanks) -> int:
        """Blocks that the engine's lease could grow by now: the fewest free ones on any of its GPUs."""
        return min(ledger.count(BlockState.FREE) for ledger in self._of(engine))

    def check(self, engines: Sequence[EngineRanks]) -> None:
        """Check every ledger, and that the ranks of each engine hold equally many blocks.

        Raises:
            LedgerError: naming the GPU and the block, or the engine and its counts.
        """
        for ledger in self._ledgers.values():
            states = ledger.check()
            if sum(states.values()) != ledger.geometry.blocks:
                raise LedgerError(f"the ledger of GPU {ledger.gpu} does not add up: {states}")
        for engine in engines:
            for state in (BlockState.LEASED, BlockState.EXPORTED, BlockState.RESERVED):
                counts = [ledger.count(state, engine.number) for ledger in self._of(engine)]
                if len(set(counts)) > 1:
                    raise LedgerError(
                        f"the ranks of {engine.name} have {counts} blocks {state.name.lower()}; they must be equal"
                    )

    def _take(self, engine: EngineRanks, count: int, state: BlockState, epoch: int) -> IntArray:
        ledgers = self._of(engine)
        self._require_epoch(ledgers, epoch)
        free = [ledger.require_free(count) for ledger in ledgers]
        for ledger, ids in zip(ledgers, free, strict=True):
            ledger.put(ids, engine.number, state, epoch)
        return np.stack(free)

    def _move(self, engine: EngineRanks, ids: BlockLists, before: BlockState, after: BlockState, epoch: int) -> None:
        counts = [len(row) for row in ids]
        if len(counts) != engine.tp or len(set(counts)) != 1:
            raise LedgerError(
                f"{engine.name}: {counts} blocks are named for its ranks; {engine.tp} equal counts are needed"
            )
        rows = np.asarray(ids, dtype=np.int32)
        ledgers = self._of(engine)
        self._require_epoch(ledgers, epoch)
        checked = [
            ledger.require_movable(row, engine.number, before, after) for ledger, row in zip(ledgers, rows, strict=True)
        ]
        for ledger, blocks in zip(ledgers, checked, strict=True):
            ledger.put(blocks, engine.number, after, epoch)

    def _of(self, engine: EngineRanks) -> list[BlockLedger]:
        return [self._ledger(gpu) for gpu in engine.gpus]

    def _ledger(self, gpu: int) -> BlockLedger:
        if gpu not in self._ledgers:
            raise LedgerError(f"GPU {gpu} has no ledger; there are those of GPUs {sorted(self._ledgers)}")
        return self._ledgers[gpu]

    def _require_epoch(self, ledgers: Sequence[BlockLedger], epoch: int) -> None:
        for ledger in ledgers:
            ledger.require_epoch(epoch)


_NO_BLOCKS: IntArray = np.zeros(0, dtype=np.int32)


def _sides(ticket: CopyTicket, gpu: int) -> tuple[IntArray, IntArray]:
    return ticket.reads.get(gpu, _NO_BLOCKS), ticket.writes.get(gpu, _NO_BLOCKS)
