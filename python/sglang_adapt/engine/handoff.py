"""The entry of requests on the move into one engine rank: what a control channel calls with the messages of
`core.handoff`.

The protocol, driven by a router: (1) `ExportCall` to all ranks of a source; (2) the KV is copied into blocks that the
router has chosen, and `AdoptCall` goes to all ranks of the destination; (3) `ReleaseCall` to the source, or, after any
failure, `RestoreCall`, after which the source goes on as if nothing had been. Before these, while all requests run,
`SnapshotCall` and `PrecopyCall` may bring over what does not change any more. Every call reaches all ranks of an
engine in the same iteration, inside stock's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sglang_adapt.core import handoff as messages
from sglang_adapt.core.block_ids import BlockIds, pack_ids, unpack_ids
from sglang_adapt.core.laps import Laps
from sglang_adapt.upstream.awake import stay_awake
from sglang_adapt.upstream.handoff import adopt as adopting
from sglang_adapt.upstream.handoff import export as exporting
from sglang_adapt.upstream.handoff.ahead import Ahead
from sglang_adapt.upstream.handoff.held import Held, held
from sglang_adapt.upstream.handoff.patches import HANDOFF_PATCHES
from sglang_adapt.upstream.handoff.refusals import check_engine
from sglang_adapt.upstream.handoff.snapshot import Snapshots
from sglang_adapt.upstream.handoff.soon import expect_export, expect_nothing
from sglang_adapt.upstream.handoff.state import check_req_attributes
from sglang_adapt.upstream.kv_lease import EngineLease
from sglang_adapt.upstream.patch import PATCHES


class StaleHandoffError(RuntimeError):
    """A message of an epoch that is over, or that does not fit what the rank is doing; it has changed nothing."""


class EngineHandoff:
    """One rank's part in moves of requests.

    Args:
        scheduler: stock's, built after `kv_pool.use_pool` in a process that has HANDOFF_PATCHES.
        start_copy: begins to bring the KV of an AdoptCall or PrecopyCall here; what it returns waits for the end. None
            if the router has KV copied before it sends AdoptCall.

    Raises:
        HandoffUnsupportedError: this engine's requests cannot be moved.
        UnknownReqStateError: this sglang's requests are not those that the code knows.
        PatchError: a patch is not in place.
    """

    def __init__(
        self,
        scheduler: Any,
        start_copy: Callable[[messages.AdoptCall | messages.PrecopyCall], Callable[[], None]] | None = None,
    ) -> None:
        PATCHES.verify(*HANDOFF_PATCHES)
        check_engine(scheduler)
        check_req_attributes()
        self._scheduler = scheduler
        self._start_copy = start_copy
        self._epoch = 0
        self._told = Snapshots()
        self._ahead = Ahead()

    def call(self, message: bytes) -> bytes:
        """Carry out one encoded `core.handoff.HandoffCall`; returns the encoded answer of this rank.

        Raises:
            msgspec.ValidationError: not such a message.
            Exception: as the method of the message does; the engine is as before.
        """
        return messages.encode(self.answer(messages.decode_call(message)))

    def answer(self, call: messages.HandoffCall) -> messages.HandoffAnswer:
        """Carry out one message. Raises as its method does."""
        match call:
            case messages.SnapshotCall():
                return self.snapshot(call)
            case messages.PrecopyCall():
                return self.precopy(call)
            case messages.ExportCall():
                return self.export(call)
            case messages.AdoptCall():
                return self.adopt(call)
            case messages.ReleaseCall():
                return self.release(call)
            case messages.RestoreCall():
                return self.restore(call)
            case messages.AbortHeldCall():
                return self.abort_held(call)
            case messages.UnexportableCall():
                return self.unexportable()
        raise TypeError(f"{type(call).__name__} is no message to an engine's rank")

    def unexportable(self) -> messages.UnexportableAnswer:
        """Which requests could not be carried; if all can be, an export is expected."""
        reasons = exporting.unexportable(self._scheduler)
        if not reasons:
            expect_export(self._scheduler)
        return messages.UnexportableAnswer(reasons)

    def snapshot(self, call: messages.SnapshotCall) -> messages.SnapshotAnswer:
        """Say what the requests that decode consist of, and give free blocks back; they run on, and an export is
        expected.

        Raises:
            StaleHandoffError: the epoch is not newer than the last.
            ExportError, OtherRankFailedError: nothing has changed.
        """
        self._require_new(call.epoch, "a snapshot")
        laps = Laps()
        self._told, requests = exporting.snapshot(self._scheduler, call.epoch, call.unit, laps)
        lease = EngineLease.of(self._scheduler)
        count = lease.spare_pages - call.leave - exporting.pages_of_prompt(self._scheduler)
        given = pack_ids(np.sort(lease.give_back(count))) if count > 0 else b""
        laps.lap("give back")
        expect_export(self._scheduler)
        return messages.SnapshotAnswer(call.epoch, requests, self._told.all_pages(), given, laps.ms)

    def precopy(self, call: messages.PrecopyCall) -> messages.PrecopyAnswer:
        """Make requests from their snapshots and bring their KV here, for an `adopt` of the same epoch.

        Raises:
            StaleHandoffError: an older epoch than the last.
            Exception: see `upstream.handoff.ahead.Ahead.bring`.
        """
        if call.epoch < self._epoch:
            raise StaleHandoffError(f"a copy ahead of epoch {call.epoch} came after epoch {self._epoch}")
        stay_awake(self._scheduler)
        laps = Laps()
        self._ahead = Ahead.bring(
            self._scheduler,
            call.epoch,
            call.requests,
            self._of_rank(call, call.blocks),
            laps,
            None if self._start_copy is None else partial(self._start_copy, call),
        )
        return messages.PrecopyAnswer(call.epoch, laps.ms)

    def export(self, call: messages.ExportCall) -> messages.ExportAnswer:
        """Stop after the batch in flight, take all requests out and hold them.

        Raises:
            StaleHandoffError: the epoch is not newer than the last, or requests are held already.
            ExportError, OtherRankFailedError: nothing was taken out.
        """
        self._require_new(call.epoch, "an export")
        if (other := held()) is not None:
            raise StaleHandoffError(
                f"requests of epoch {other.epoch} are held; release or restore them before exporting epoch {call.epoch}"
            )
        laps = Laps()
        expect_nothing()
        told, self._told = self._told, Snapshots()
        export = exporting.export(self._scheduler, call.epoch, laps, told if told.epoch == call.epoch else None)
        self._epoch = call.epoch
        given = self._shrink_to(call.keep)
        laps.lap("give back")
        return messages.ExportAnswer(
            call.epoch, export.requests, export.blocks, pack_ids(export.pages), export.staying, given, laps.ms
        )

    def adopt(self, call: messages.AdoptCall) -> messages.AdoptAnswer:
        """Take requests up; they run, or wait, from the next batch on. An epoch may have several of these calls.

        Raises:
            StaleHandoffError: an older epoch than the last.
            Exception: see `upstream.handoff.adopt.adopt`; nothing was taken up.
        """
        if call.epoch < self._epoch:
            raise StaleHandoffError(f"an adopt of epoch {call.epoch} came after epoch {self._epoch}")
        given = self._of_rank(call, call.blocks)
        laps = Laps()
        pairs = [
            (request, blocks)
            for request, blocks in zip(call.requests, given, strict=True)
            if request.rid not in call.aborted
        ]
        start_copy = None if self._start_copy is None or not call.sources else partial(self._start_copy, call)
        requests, blocks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        adoption = adopting.adopt(
            self._scheduler, requests, blocks, laps, start_copy, epoch=call.epoch, ahead=self._ahead
        )
        self._epoch = call.epoch
        if call.grow:
            EngineLease.of(self._scheduler).grow(unpack_ids(call.grow[self._scheduler.ps.tp_rank]))
        laps.lap("grow")
        return messages.AdoptAnswer(call.epoch, adoption.adopted, adoption.spilled, laps.ms)

    def release(self, call: messages.ReleaseCall) -> messages.ReleaseAnswer:
        """Forget the held requests, which live elsewhere. Those that were given up and not taken are answered here.

        Raises:
            StaleHandoffError: no requests of this epoch are held.
            ExportError: one was neither taken nor given up.
        """
        held = self._held(call.epoch)
        laps = Laps()
        aborted = exporting.release(self._scheduler, held, set(call.taken))
        laps.lap("forget")
        given = self._shrink_to(call.keep)
        laps.lap("give back")
        return messages.ReleaseAnswer(call.epoch, pack_ids(held.pages), aborted, given, laps.ms)

    def restore(self, call: messages.RestoreCall) -> messages.RestoreAnswer:
        """Put the held requests back as they were.

        Raises:
            StaleHandoffError: no requests of this epoch are held.
            LeaseError, NoRoomError, OtherRankFailedError: see `upstream.handoff.export.restore`.
        """
        held = self._held(call.epoch)
        laps = Laps()
        if call.grow:
            EngineLease.of(self._scheduler).grow(unpack_ids(call.grow[self._scheduler.ps.tp_rank]))
        laps.lap("grow")
        restored = exporting.restore(self._scheduler, held)
        laps.lap("put back")
        return messages.RestoreAnswer(call.epoch, restored, pack_ids(held.pages), laps.ms)

    def abort_held(self, call: messages.AbortHeldCall) -> messages.AbortHeldAnswer:
        """Mark held requests as given up by their clients; none is no error. Stock's AbortReq does the same.

        Raises:
            StaleHandoffError: no requests of this epoch are held.
        """
        return messages.AbortHeldAnswer(call.epoch, self._held(call.epoch).abort(call.rid, call.abort_all))

    def _shrink_to(self, keep: int | None) -> BlockIds:
        """Give back what is free or evictable of the lease beyond `keep` blocks; returns it, ascending."""
        if keep is None:
            return b""
        lease = EngineLease.of(self._scheduler)
        count = min(lease.spare_pages, len(lease.pages) - keep)
        return pack_ids(np.sort(lease.give_back(count))) if count > 0 else b""

    def _of_rank(
        self, call: messages.AdoptCall | messages.PrecopyCall, blocks: list[list[list[int]]]
    ) -> list[list[int]]:
        """This rank's blocks for each request. Raises AdoptError if there are not as many lists as there should be."""
        ranks = self._scheduler.ps.tp_size
        if len(blocks) != ranks or any(len(mine) != len(call.requests) for mine in blocks):
            raise adopting.AdoptError(
                f"epoch {call.epoch}: {ranks} ranks take {len(call.requests)} requests up, but blocks are given as "
                f"{[len(mine) for mine in blocks]}"
            )
        return blocks[self._scheduler.ps.tp_rank]

    def _require_new(self, epoch: int, what: str) -> None:
        if epoch <= self._epoch:
            raise StaleHandoffError(f"{what} of epoch {epoch} came after one of epoch {self._epoch}")

    def _held(self, epoch: int) -> Held:
        there = held()
        if there is None or there.epoch != epoch:
            what = "nothing" if there is None else f"epoch {there.epoch}"
            raise StaleHandoffError(f"a message of epoch {epoch} came while {what} is held")
        return there
