"""Keeps stock's shared-memory files from outliving the server, however it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang_adapt.upstream.patch import Patch, PatchError


@dataclass(frozen=True)
class LoadSlots:
    """Where stock's load snapshots (`/v1/loads`) of one deployment are.

    Attributes:
        folder: the run's folder.
        count: engines that are kept warm; each has a slot, in place of stock's data-parallel rank.
        slot: this engine's slot, or None in the front, which reads all.
    """

    folder: str
    count: int
    slot: int | None


class _LoadSnapshotPatch(Patch):
    """What the two patches of the load snapshots share: the slots of this process, set once at its start."""

    slots: ClassVar[LoadSlots | None] = None

    @classmethod
    def known(cls) -> tuple[LoadSlots, str]:
        slots = _LoadSnapshotPatch.slots
        if slots is None:
            raise PatchError("load snapshots are used before use_load_slots() was called in this process")
        return slots, str(Path(slots.folder) / "loads.shm")


def use_load_slots(slots: LoadSlots) -> None:
    """Say where this process's load snapshots are; to be called before stock opens them."""
    _LoadSnapshotPatch.slots = slots


class WriteLoadsToSlot(_LoadSnapshotPatch):
    """Writes a scheduler's load to its engine's slot of a file in the run's folder.

    Stock writes to slot 0 of a file in /dev/shm: all engines would overwrite one another, and the file stays.
    """

    target = "sglang.srt.managers.load_snapshot.create_load_snapshot_writer"
    kind = "replace"

    @staticmethod
    def hook(server_args: Any, port_args: Any, dp_size: int, dp_rank: int, publish_interval: int = 1) -> Any:
        from sglang.srt.managers.load_snapshot import ShmLoadSnapshotWriter

        slots, path = _LoadSnapshotPatch.known()
        if slots.slot is None:
            raise PatchError("a process without an engine's slot writes load snapshots")

        class SlotWriter(ShmLoadSnapshotWriter):
            def write(self, snapshot: Any) -> None:
                snapshot.dp_rank = self.dp_rank
                super().write(snapshot)

        return SlotWriter(path, slots.count, slots.slot, publish_interval)


class ReadLoadsOfAllSlots(_LoadSnapshotPatch):
    """Reads the loads of all engines, where stock reads those of its data-parallel ranks."""

    target = "sglang.srt.managers.load_snapshot.create_load_snapshot_reader"
    kind = "replace"

    @staticmethod
    def hook(server_args: Any, port_args: Any, caller: str) -> Any:
        from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader

        slots, path = _LoadSnapshotPatch.known()
        return ShmLoadSnapshotReader(path, slots.count)


class UnlinkMessageQueue(Patch):
    """Removes the name of a rank group's shared-memory queue as soon as all ranks have mapped it.

    Stock removes it when the object is deleted, which a killed process never does; the memory itself lives until
    the last rank has ended.
    """

    target = "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue.create_from_process_group"
    kind = "after"

    @staticmethod
    def hook(queue: Any, *args: Any, **kwargs: Any) -> None:
        ring = getattr(queue, "buffer", None)
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False
