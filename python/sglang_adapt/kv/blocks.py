"""Who has each KV block of one GPU: the ledger that the router writes and every process may read.

A block is free, leased to an engine, taken out of a lease for a request on the move (exported at its source,
reserved at its destination), or quarantined. One rule keeps copies safe: a block that a copy in flight reads
or writes never becomes free. Whatever would free it (a release, an abort, the death of its engine)
quarantines it, and the end of the last copy frees it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_adapt.core.block_ids import ascending, named_twice
from sglang_adapt.kv.geometry import DUMMY_BLOCK, PoolGeometry
from sglang_adapt.kv.ledger_format import (
    MAX_ENGINE,
    LedgerError,
    format_ledger,
    publish,
)
from sglang_adapt.kv.plan import IntArray

NO_ENGINE = 0


class BlockState(IntEnum):
    """What a block is to its owner."""

    FREE = 0
    DUMMY = 1
    LEASED = 2
    EXPORTED = 3
    RESERVED = 4
    QUARANTINED = 5


OWNED = (BlockState.LEASED, BlockState.EXPORTED, BlockState.RESERVED)

_MOVES = {
    (BlockState.LEASED, BlockState.FREE),
    (BlockState.LEASED, BlockState.EXPORTED),
    (BlockState.EXPORTED, BlockState.LEASED),
    (BlockState.EXPORTED, BlockState.FREE),
    (BlockState.RESERVED, BlockState.LEASED),
    (BlockState.RESERVED, BlockState.FREE),
}


class NoFreeBlocksError(LedgerError):
    """Fewer blocks are free than asked for now; more may be after a request ends or a lease shrinks."""


class StaleEpochError(LedgerError):
    """A change stamped with an epoch before the ledger's: it belongs to a layout that is gone."""


class BlockLedger:
    """The writer's side of one GPU's ledger. Exactly one process, the router, has one.

    Every change names its epoch, which may not be lower than that of an earlier change, and happens as a
    whole or not at all.
    """

    def __init__(self, buffer: Any, geometry: PoolGeometry, gpu: int, run_id: str, *, overwrite: bool = False) -> None:
        """Start an empty ledger: all blocks free but the dummy.

        Args:
            buffer: writable shared memory of at least `ledger_bytes(geometry)`.
            geometry: the pool's.
            gpu: the GPU whose blocks these are.
            run_id: 1 to 32 ASCII characters, unique to this run of the server.
            overwrite: replace a ledger that is there. Only for a caller that knows its run has ended.

        Raises:
            ForeignLedgerError: another run's ledger is in the buffer and `overwrite` is False.
            LedgerError: the buffer is too small or read-only, or the run id cannot be stored.
        """
        self.geometry = geometry
        self.gpu = gpu
        self._memory = format_ledger(buffer, geometry, gpu, run_id, os.getpid(), overwrite=overwrite)
        self._memory.state[DUMMY_BLOCK] = BlockState.DUMMY
        self._counted: dict[tuple[BlockState, int | None], int] = {}
        publish(self._memory)

    @property
    def epoch(self) -> int:
        return self._memory.get("epoch")

    def ids(self, state: BlockState, engine: int | None = None) -> IntArray:
        """Blocks in a state, ascending; those of one engine if it is given."""
        return ids_of(self._memory.state, self._memory.owner, state, engine)

    def count(self, state: BlockState, engine: int | None = None) -> int:
        """How many blocks are in a state; those of one engine if it is given. Counted anew after a change only."""
        if (state, engine) not in self._counted:
            chosen = _chosen(self._memory.state, self._memory.owner, state, engine)
            self._counted[state, engine] = int(np.count_nonzero(chosen))
        return self._counted[state, engine]

    def counts(self) -> dict[BlockState, int]:
        """How many blocks are in each state."""
        counted = np.bincount(self._memory.state, minlength=len(BlockState)).tolist()
        return {state: counted[state] for state in BlockState}

    def require_free(self, count: int) -> IntArray:
        """The `count` lowest free blocks.

        Raises:
            NoFreeBlocksError: naming the GPU, what was asked for and what is free.
        """
        free = self.count(BlockState.FREE)
        if count < 0 or count > free:
            raise NoFreeBlocksError(
                f"GPU {self.gpu}: {count} blocks were asked for, {free} of {self.geometry.blocks} are free"
            )
        return self.ids(BlockState.FREE)[:count] if count else _NO_BLOCKS

    def take(self, count: int, engine: int, state: BlockState, epoch: int) -> IntArray:
        """Give `count` free blocks to an engine as LEASED (its lease grows) or RESERVED (for a request on its
        way); returns them, ascending.

        Raises:
            NoFreeBlocksError: fewer are free; nothing has changed.
            StaleEpochError: `epoch` is below the ledger's.
            LedgerError: another state, or an engine number that cannot be.
        """
        if state not in (BlockState.LEASED, BlockState.RESERVED):
            raise LedgerError(f"GPU {self.gpu}: free blocks become leased or reserved, not {state.name.lower()}")
        self._check_engine(engine)
        ids = self.require_free(count)
        self.put(ids, engine, state, epoch)
        return ids

    def require(self, ids: npt.ArrayLike, engine: int, state: BlockState, *, idle: bool = False) -> IntArray:
        """Check that all blocks are in `state` with `engine`, each named once; returns them as int32.

        Args:
            idle: also demand that no copy reads or writes them.

        Raises:
            LedgerError: naming the GPU and the first block that is not, and what it is.
        """
        blocks = np.asarray(ids, dtype=np.int32)
        if blocks.ndim != 1:
            raise LedgerError(f"GPU {self.gpu}: a list of blocks is one-dimensional, not {blocks.shape}")
        if not len(blocks):
            return blocks
        outside = blocks[(blocks < 0) | (blocks >= self.geometry.blocks)]
        if len(outside):
            raise LedgerError(f"GPU {self.gpu}: block {outside[0]} does not exist ({self.geometry.blocks} blocks)")
        if (twice := named_twice(blocks)) is not None:
            raise LedgerError(f"GPU {self.gpu}: block {twice} is named twice")
        memory, at = self._memory, _at(blocks)
        wrong = (memory.state[at] != state) | (memory.owner[at] != engine)
        if wrong.any():
            first = blocks[wrong][0]
            raise LedgerError(
                f"GPU {self.gpu}: block {first} is {self._say(first)}, not {state.name.lower()} with engine {engine}"
            )
        if idle and (busy := memory.copies[at] > 0).any():
            raise LedgerError(f"GPU {self.gpu}: block {blocks[busy][0]} is being copied; wait for the copy to end")
        return blocks

    def require_movable(self, ids: npt.ArrayLike, engine: int, before: BlockState, after: BlockState) -> IntArray:
        """Check that `move` would succeed; returns the blocks as int32.

        Raises:
            LedgerError: as `move` does.
        """
        if (before, after) not in _MOVES:
            raise LedgerError(
                f"GPU {self.gpu}: a {before.name.lower()} block cannot become {after.name.lower()} this way"
            )
        adopted = (before, after) == (BlockState.RESERVED, BlockState.LEASED)
        return self.require(ids, engine, before, idle=adopted)

    def move(self, ids: npt.ArrayLike, engine: int, before: BlockState, after: BlockState, epoch: int) -> None:
        """Change the state of an engine's blocks. FREE becomes QUARANTINED where a copy is in flight.

        Raises:
            LedgerError: a block is not in `before` with this engine; the change is not one that blocks make;
                or blocks that are being written are to be leased. Nothing has changed.
            StaleEpochError: `epoch` is below the ledger's.
        """
        self.put(self.require_movable(ids, engine, before, after), engine, after, epoch)

    def put(self, blocks: IntArray, engine: int, state: BlockState, epoch: int) -> None:
        """Change the state of blocks of which `require_free` or `require_movable` has just said that it may be. FREE
        becomes QUARANTINED where a copy is in flight.

        Raises:
            StaleEpochError: `epoch` is below the ledger's.
        """
        with self._change(epoch):
            if state is BlockState.FREE:
                self._free(blocks, epoch)
            else:
                self._set(blocks, state, engine, epoch)

    def return_all(self, engine: int, epoch: int) -> int:
        """Take back every block of an engine that has died; returns how many. Those in a copy are
        quarantined.

        Raises:
            StaleEpochError: `epoch` is below the ledger's.
        """
        self._check_engine(engine)
        blocks = np.flatnonzero(self._memory.owner == engine).astype(np.int32)
        with self._change(epoch):
            self._free(blocks, epoch)
        return len(blocks)

    def require_copyable(self, reads: IntArray, writes: IntArray) -> None:
        """Check that a copy may read and write these blocks.

        Raises:
            LedgerError: a block to read is neither leased nor exported; a block to write is not reserved, is
                in another copy, or is to be written twice.
        """
        memory = self._memory
        state = memory.state[reads]
        for block in reads[(state != BlockState.LEASED) & (state != BlockState.EXPORTED)]:
            raise LedgerError(f"GPU {self.gpu}: block {block} is {self._say(block)}; it has nothing to copy")
        if not len(writes):
            return
        values, times = np.unique(writes, return_counts=True)
        for block in values[times > 1]:
            raise LedgerError(f"GPU {self.gpu}: block {block} would be written for two requests at once")
        for block in writes[memory.state[writes] != BlockState.RESERVED]:
            raise LedgerError(f"GPU {self.gpu}: block {block} is {self._say(block)}; copies write reserved blocks")
        for block in writes[memory.copies[writes] > 0]:
            raise LedgerError(f"GPU {self.gpu}: block {block} is in another copy already")

    def require_in_copy(self, reads: IntArray, writes: IntArray) -> None:
        """Check that a copy that reads and writes these blocks can end.

        Raises:
            LedgerError: one of the blocks is in no copy.
        """
        for blocks in (reads, writes):
            for block in blocks[self._memory.copies[blocks] == 0]:
                raise LedgerError(f"GPU {self.gpu}: block {block} is in no copy that could end")

    def begin_copy(self, reads: IntArray, writes: IntArray, epoch: int) -> None:
        """Note that a copy in flight reads and writes these blocks, each named once in either list.

        Raises:
            LedgerError: see `require_copyable`.
            StaleEpochError: `epoch` is below the ledger's.
        """
        self.require_copyable(reads, writes)
        with self._change(epoch):
            self._memory.copies[reads] += 1
            self._memory.copies[writes] += 1

    def end_copy(self, reads: IntArray, writes: IntArray, epoch: int) -> int:
        """Note that a copy has ended, by success, failure, or the death of the process that ran it; returns
        how many quarantined blocks became free.

        Raises:
            LedgerError: one of the blocks is in no copy.
            StaleEpochError: `epoch` is below the ledger's.
        """
        self.require_in_copy(reads, writes)
        memory = self._memory
        with self._change(epoch):
            memory.copies[reads] -= 1
            memory.copies[writes] -= 1
            both = np.concatenate([reads, writes])
            done = both[(memory.state[both] == BlockState.QUARANTINED) & (memory.copies[both] == 0)]
            self._set(done, BlockState.FREE, NO_ENGINE, epoch)
        return len(done)

    def require_epoch(self, epoch: int) -> None:
        """Raise StaleEpochError if a change of this epoch would be refused."""
        if epoch < self.epoch:
            raise StaleEpochError(
                f"GPU {self.gpu}: a change of epoch {epoch} came after one of epoch {self.epoch}; it is refused"
            )

    def check(self) -> dict[BlockState, int]:
        """Check what must always hold and return the blocks in each state, whose sum is the pool's blocks.

        Raises:
            LedgerError: naming the GPU and the block: an unknown state, an owner where there can be none or
                none where there must be one, a free block in a copy, a quarantined one in none, another
                dummy.
        """
        memory = self._memory
        state = memory.state

        def fail(bad: npt.NDArray[Any], what: str) -> None:
            blocks = np.flatnonzero(bad)
            if len(blocks):
                raise LedgerError(f"the ledger of GPU {self.gpu} is wrong: block {blocks[0]} {what}")

        fail(state > max(BlockState), "has an unknown state")
        fail(
            (state == BlockState.DUMMY) != (np.arange(len(state)) == DUMMY_BLOCK),
            "is not the dummy or should be",
        )
        owned = np.isin(state, OWNED)
        fail(owned & (memory.owner == NO_ENGINE), "is owned, but by no engine")
        fail(~owned & (memory.owner != NO_ENGINE), "has an owner, but belongs to no one")
        fail((state == BlockState.FREE) & (memory.copies > 0), "is free while a copy uses it")
        fail((state == BlockState.QUARANTINED) & (memory.copies == 0), "is quarantined without a copy")
        fail(memory.stamp > self.epoch, "was changed in an epoch to come")
        if memory.get("sequence") % 2:
            raise LedgerError(f"the ledger of GPU {self.gpu} is in the middle of a change")
        counted = np.bincount(state, minlength=len(BlockState))
        return {kind: int(counted[kind]) for kind in BlockState}

    @contextmanager
    def _change(self, epoch: int) -> Iterator[None]:
        self.require_epoch(epoch)
        memory = self._memory
        memory.put("sequence", memory.get("sequence") + 1)
        try:
            memory.put("epoch", epoch)
            yield
        finally:
            self._counted.clear()
            memory.put("sequence", memory.get("sequence") + 1)

    def _set(self, blocks: IntArray, state: BlockState, engine: int, epoch: int) -> None:
        at = _at(blocks)
        self._memory.state[at] = state
        self._memory.owner[at] = engine
        self._memory.stamp[at] = epoch

    def _free(self, blocks: IntArray, epoch: int) -> None:
        copied = self._memory.copies[_at(blocks)] > 0
        if not copied.any():
            self._set(blocks, BlockState.FREE, NO_ENGINE, epoch)
            return
        self._set(blocks[~copied], BlockState.FREE, NO_ENGINE, epoch)
        self._set(blocks[copied], BlockState.QUARANTINED, NO_ENGINE, epoch)

    def _check_engine(self, engine: int) -> None:
        if not NO_ENGINE < engine <= MAX_ENGINE:
            raise LedgerError(f"engine number {engine} is not within 1 to {MAX_ENGINE}")

    def _say(self, block: int) -> str:
        state = BlockState(int(self._memory.state[block])).name.lower()
        owner = int(self._memory.owner[block])
        return f"{state} with engine {owner}" if owner != NO_ENGINE else state


def ids_of(
    states: npt.NDArray[np.uint8], owners: npt.NDArray[np.uint16], state: BlockState, engine: int | None
) -> IntArray:
    """Blocks in a state, ascending; those of one engine if it is given."""
    return np.flatnonzero(_chosen(states, owners, state, engine)).astype(np.int32)


_NO_BLOCKS: IntArray = np.zeros(0, dtype=np.int32)


def _at(blocks: IntArray) -> IntArray | npt.NDArray[np.int64] | slice:
    """Where blocks are in the ledger's columns: a slice if they follow one another, which is ten times as fast."""
    if len(blocks) and blocks[-1] - blocks[0] == len(blocks) - 1 and ascending(blocks):
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return blocks.astype(np.int64)


def _chosen(
    states: npt.NDArray[np.uint8], owners: npt.NDArray[np.uint16], state: BlockState, engine: int | None
) -> npt.NDArray[np.bool_]:
    chosen: npt.NDArray[np.bool_] = states == state
    return chosen if engine is None else chosen & (owners == engine)
