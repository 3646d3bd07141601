"""The KV blocks of all GPUs under the server: the router's ledgers, and the leases that engines get of them.

Engines of the layout share out all blocks; every other engine keeps a small lease for as long as it lives, with
which it runs its warm-up request, also when it is started again while the layout's engines hold all the rest. That
costs a few blocks a GPU, which the pool has beyond what was asked for (`kv/sizing.py`), and saves taking blocks away
from an engine that is busy.

A block is free again only when every process that could write to it is gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.blocks import BlockLedger, BlockState, NoFreeBlocksError
from sglang_adapt.kv.leases import CopyTicket, EngineRanks, Leases
from sglang_adapt.kv.plan import CopyBatch, IntArray
from sglang_adapt.kv.sizing import PoolSettings
from sglang_adapt.memory import Region, RegionHandle, attach
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError

Pages = IntArray
"""Blocks of an engine, `[TP size, n]`: a row for each rank."""

Call = Callable[[str, str, dict[str, Any], int], Awaitable[list[dict[str, Any]]]]
"""`call(engine, name, payload, epoch)`: `EngineCalls.call`."""


class Pools:
    """The ledgers of all GPUs, written by this process alone, and the operations on engines' leases.

    Args:
        settings: the pool of every GPU.
        engines: all candidates.
        active: the engines of the layout.
        call: asks an engine's ranks.
        kill: kills an engine of which nobody knows what its ranks hold; it is started again.
        freed: called when a copy has ended, and with it the quarantine of blocks whose engine has died.

    Attributes:
        epoch: of the layout; every change of a ledger and every call to an engine carries it.
    """

    def __init__(
        self,
        settings: PoolSettings,
        engines: Sequence[EngineSpec],
        active: Sequence[EngineSpec],
        call: Call,
        kill: Callable[[EngineSpec, str], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.epoch = 0
        self._ranks = {
            spec: EngineRanks(number, spec.name, tuple(spec.gpus)) for number, spec in enumerate(engines, start=1)
        }
        self._active = set(active)
        self._call = call
        self.kill = kill
        self._freed = freed
        self._run_id = uuid.uuid4().hex
        self._regions: dict[int, Region] = {}
        self._ledgers: dict[int, BlockLedger] = {}
        self._leases = Leases({})
        self._deaths = dict.fromkeys(self._ranks, 0)
        self._counts: dict[EngineSpec, tuple[int, int]] = {}
        self._gone: dict[EngineSpec, asyncio.Future[None]] = {}
        self._to_end: dict[EngineSpec, list[CopyTicket]] = {}

    def open(self, handles: Mapping[int, RegionHandle]) -> None:
        """Map the keepers' ledger regions by GPU, and start an empty ledger in each that is new.

        A keeper that was started anew has lost its GPU's KV, and its engines were killed with it: its ledger begins
        again, in an epoch of its own.

        Raises:
            MemoryGoneError: a keeper has ended already.
            ForeignLedgerError: the memory holds the ledger of another run.
        """
        new = {gpu: handle for gpu, handle in handles.items() if self._handle(gpu) != handle}
        if not new:
            return
        self.epoch += 1
        for gpu, handle in new.items():
            region = attach(handle, "write")
            self._ledgers[gpu] = BlockLedger(region.tensor.numpy(), self.settings.geometry, gpu, self._run_id)
            self._regions[gpu] = region
        self._leases = Leases(self._ledgers)
        self._counts.clear()

    def first_lease(self, spec: EngineSpec) -> list[list[int]]:
        """Lease blocks to an engine that is about to be started; returns those of each rank.

        One that is started again gets the rest of its share by `fill` when it is ready: by then the layout may be one
        that it does not belong to, and an engine that is being started cannot give blocks back.

        Raises:
            NoFreeBlocksError: the blocks that are kept for it are not there.
        """
        first = spec in self._active and not self._deaths[spec]
        count = self.available(spec) if first else self.settings.standby_blocks
        pages: list[list[int]] = self._take(spec, count).tolist()
        return pages

    def can_start(self, spec: EngineSpec) -> bool:
        """Are the blocks of its first lease free? Those of one that died while they were copied are not before the
        copy has ended; `freed` is called then."""
        return self._leases.free(self._ranks[spec]) >= self.settings.standby_blocks

    @property
    def unit_tokens(self) -> int:
        """Tokens that fill whole blocks at every TP size."""
        return self.settings.geometry.tokens_per_block(max(spec.tp for spec in self._ranks))

    def available(self, spec: EngineSpec) -> int:
        """Blocks on each rank by which an engine's lease may grow: the free ones, less those that are kept for other
        engines on the same GPUs that do not have theirs now."""
        ranks = self._ranks[spec]
        return max(0, min(self._ledgers[gpu].count(BlockState.FREE) - self._kept(spec, gpu) for gpu in ranks.gpus))

    def counts(self, spec: EngineSpec) -> tuple[int, int]:
        """(leased, free) blocks on each of an engine's GPUs; free is what no engine has. (0, 0) before `open`."""
        if not self._ledgers:
            return 0, 0
        if spec not in self._counts:
            ranks = self._ranks[spec]
            self._counts[spec] = (self._leases.leased(ranks), self._leases.free(ranks))
        return self._counts[spec]

    def states(self) -> dict[int, dict[str, int]]:
        """How many blocks of each GPU are in each state, in lower case. Empty before `open`."""
        return {
            gpu: {state.name.lower(): count for state, count in ledger.counts().items()}
            for gpu, ledger in self._ledgers.items()
        }

    def lease(self, spec: EngineSpec) -> list[list[int]]:
        """The leased blocks of each rank, ascending."""
        pages: list[list[int]] = self._leases.lease(self._ranks[spec]).tolist()
        return pages

    def engine_gone(self, spec: EngineSpec) -> int:
        """All processes of an engine have ended: take its blocks back; returns how many on each GPU."""
        if not self._ledgers:
            return 0
        self._counts.clear()
        count = self._leases.engine_died(self._ranks[spec], self.epoch)
        self._deaths[spec] += 1
        for ticket in self._to_end.pop(spec, ()):
            self.end_copy(ticket)
        if (waiter := self._gone.pop(spec, None)) is not None:
            waiter.set_result(None)
        return count

    def check(self) -> None:
        """Check all ledgers. Raises LedgerError."""
        self._leases.check(list(self._ranks.values()))

    async def grow(self, spec: EngineSpec, count: int) -> Pages:
        """Give a running engine `count` more blocks on each rank; returns them.

        Raises:
            NoFreeBlocksError: fewer are `available`; nothing has changed.
            CallRefusedError: the engine refused; nothing has changed.
            CallBrokenError: the engine is being killed, its blocks come back when it is gone.
            EngineGoneError: it died; its blocks come back as well.
        """
        available = self.available(spec)
        if count > available:
            raise NoFreeBlocksError(
                f"{spec}: its lease was to grow by {count} blocks, {available} are available; others are leased, or "
                "kept for engines that are being started"
            )
        pages = self._take(spec, count)
        deaths = self._deaths[spec]
        try:
            await self.ask(spec, "kv_grow", {"pages": [pack_ids(rank) for rank in pages]})
        except CallRefusedError:
            if self._deaths[spec] == deaths:
                self._free(spec, pages)
            raise
        return pages

    async def give_back(self, spec: EngineSpec, count: int) -> Pages:
        """Take `count` blocks on each rank out of a running engine's lease; returns them. They are free then.

        Raises:
            CallRefusedError: requests hold too many; nothing has changed.
            CallBrokenError, EngineGoneError: as `grow`.
        """
        answers = await self.ask(spec, "kv_give_back", {"count": count})
        pages = np.stack([unpack_ids(answer["pages"]) for answer in answers])
        self._free(spec, pages)
        return pages

    async def fill(self, spec: EngineSpec) -> None:
        """Give a running engine of the layout all blocks that it may have. Raises as `grow`."""
        if spec in self._active and (count := self.available(spec)):
            await self.grow(spec, count)

    # A switch of layout; each step is for all ranks of an engine.

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def activate(self, active: Sequence[EngineSpec]) -> None:
        """These engines are the layout's now: they share out all blocks from here on."""
        self._active = set(active)

    def ranks(self, spec: EngineSpec) -> EngineRanks:
        return self._ranks[spec]

    def deaths(self, spec: EngineSpec) -> int:
        """How often an engine has died: what it was lent before is not what it has now."""
        return self._deaths[spec]

    async def gone(self, spec: EngineSpec, deaths: int) -> None:
        """Wait until all processes of the engine that had died `deaths` times are gone."""
        while self._deaths[spec] <= deaths:
            self._gone[spec] = self._gone.get(spec) or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._gone[spec])

    def exported(self, spec: EngineSpec, exported: Pages, given: Pages) -> None:
        """An engine has handed out requests with their blocks, and given free blocks back."""
        self._counts.clear()
        self._leases.export(self._ranks[spec], exported, self.epoch)
        self._leases.shrink(self._ranks[spec], given, self.epoch)

    def given(self, spec: EngineSpec, pages: Pages) -> None:
        """An engine has given free blocks back."""
        self._free(spec, pages)

    def restored(self, spec: EngineSpec, exported: Pages) -> None:
        """An engine has taken back what it had handed out."""
        self._counts.clear()
        self._leases.restore(self._ranks[spec], exported, self.epoch)

    def released(self, spec: EngineSpec, exported: Pages, given: Pages) -> None:
        """What an engine had handed out lives elsewhere; its blocks are free."""
        self._counts.clear()
        self._leases.release(self._ranks[spec], exported, self.epoch)
        self._leases.shrink(self._ranks[spec], given, self.epoch)

    def reserve(self, spec: EngineSpec, count: int) -> Pages:
        """Set blocks aside for requests that are to move to an engine. Raises NoFreeBlocksError."""
        self._counts.clear()
        return self._leases.reserve(self._ranks[spec], count, self.epoch)

    def lend(self, spec: EngineSpec, count: int) -> Pages:
        """Blocks that are to join an engine's lease with the next message to it. Raises NoFreeBlocksError."""
        return self._take(spec, count)

    def adopted(self, spec: EngineSpec, reserved: Pages) -> None:
        """An engine has taken up the requests for which blocks were reserved."""
        self._leases.adopt(self._ranks[spec], reserved, self.epoch)

    def refused(self, spec: EngineSpec, reserved: Pages, lent: Pages) -> None:
        """An engine has refused to take up requests: what was reserved and lent for it is free."""
        self._counts.clear()
        self._leases.cancel(self._ranks[spec], reserved, self.epoch)
        self._leases.shrink(self._ranks[spec], lent, self.epoch)

    def cancel(self, spec: EngineSpec, reserved: Pages) -> None:
        """Nothing comes for which blocks were reserved."""
        self._counts.clear()
        self._leases.cancel(self._ranks[spec], reserved, self.epoch)

    def begin_copy(self, batches: Sequence[CopyBatch]) -> CopyTicket:
        """Engines are about to copy: what they read and write is not given to anyone before `end_copy`."""
        return self._leases.begin_copy(batches, self.epoch)

    def begin_reading(self, blocks: Mapping[int, Sequence[int]]) -> CopyTicket:
        """As `begin_copy`, by GPU, where what is written is in the lease of the engine that writes it."""
        return self._leases.begin_reading(blocks, self.epoch)

    def end_copy(self, ticket: CopyTicket) -> None:
        self._counts.clear()
        self._leases.end_copy(ticket, self.epoch)
        self._freed()

    def end_copy_when_gone(self, spec: EngineSpec, deaths: int, ticket: CopyTicket) -> None:
        """Nobody knows whether an engine that had died `deaths` times, and is being killed, still copies."""
        if self._deaths[spec] > deaths:
            self.end_copy(ticket)
        else:
            self._to_end.setdefault(spec, []).append(ticket)

    async def ask(self, spec: EngineSpec, name: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Call an engine in the present epoch. It is killed if nobody knows what it did.

        Raises:
            CallRefusedError: nothing has changed.
            CallBrokenError, EngineGoneError: it is dead, or about to be.
        """
        deaths = self._deaths[spec]
        try:
            answers = await self._call(spec.name, name, payload, self.epoch)
        except CallBrokenError as error:
            self.kill(spec, str(error))
            raise
        if self._deaths[spec] != deaths:
            # It answered and died before this was read: its blocks are back, and perhaps leased anew.
            raise EngineGoneError(f"{spec}: it died right after {name}")
        return answers

    def _take(self, spec: EngineSpec, count: int) -> Pages:
        self._counts.clear()
        return self._leases.grow(self._ranks[spec], count, self.epoch)

    def _free(self, spec: EngineSpec, pages: Pages) -> None:
        self._counts.clear()
        self._leases.shrink(self._ranks[spec], pages, self.epoch)

    def _kept(self, spec: EngineSpec, gpu: int) -> int:
        """Blocks of a GPU that other engines on it still need to have a lease at all."""
        ledger, least = self._ledgers[gpu], self.settings.standby_blocks
        others = (ranks for other, ranks in self._ranks.items() if other != spec and gpu in ranks.gpus)
        return sum(max(0, least - ledger.count(BlockState.LEASED, ranks.number)) for ranks in others)

    def _handle(self, gpu: int) -> RegionHandle | None:
        return self._regions[gpu].handle if gpu in self._regions else None
