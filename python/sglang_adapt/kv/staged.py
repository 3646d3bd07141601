"""Copying through staging buffers, two of them in turn: for GPUs without peer access, and beside running
work.

The sender gathers the units of a chunk into a contiguous buffer of its own and moves that with the copy
engine to the link buffer: memory of the receiver's GPU that is mapped here, or pinned host memory that both
have. The receiver scatters it into its blocks. While one chunk is scattered the next one is on the link, so
the link never waits. The double buffering is that of Nitsum, 3.2.2.

Both sides hold the same plan, which goes from one source GPU to one destination GPU, and so cut the same
chunks. They talk over a channel; every wait is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_adapt.kv.checksums import compare, dest_checksums, source_checksums
from sglang_adapt.kv.copiers import UnitCopier
from sglang_adapt.kv.copy import CopyError, check_plan
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import NOW, Lane, Mark
from sglang_adapt.kv.plan import SourcePlan
from sglang_adapt.kv.staging import cut_chunks, fit, from_buffer, to_buffer, unit_shape, upload
from sglang_adapt.kv.transfer import push

BUFFERS = 2


class Channel(Protocol):
    """What two ends of a copy talk over; a `multiprocessing.connection.Connection` is one."""

    def send(self, message: Any) -> None: ...

    def poll(self, timeout: float) -> bool: ...

    def recv(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Filled:
    """Sender to receiver: chunk `chunk` is in its link buffer. `checksums` is a list of its source's
    checksums `[planes][units]` in debug mode."""

    chunk: int
    checksums: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """Receiver to sender: the link buffer of chunk `chunk` may be filled again."""

    chunk: int


@dataclass(slots=True)
class StagedSender:
    """The source's end.

    Attributes:
        geometry, gpu: the pool and the source GPU.
        region: the source GPU's region.
        buffers: two uint8 tensors on the source GPU.
        link: the two link buffers, uint8, each as large as those.
        copier: gathers; few programs keep it gentle.
        channel: to the receiver.
        timeout_s: the longest wait for the receiver to drain a chunk.
        checked: debug mode, the receiver compares checksums.
    """

    geometry: PoolGeometry
    gpu: int
    region: torch.Tensor
    buffers: Sequence[torch.Tensor]
    link: Sequence[torch.Tensor]
    copier: UnitCopier
    channel: Channel
    timeout_s: float
    checked: bool = False

    def run(self, plan: SourcePlan) -> None:
        """Send all of a plan; on return the receiver has it in its blocks. Blocks the calling
        thread, whose current device must be the region's.

        Raises:
            CopyError: a plan with several destinations, buffers too small for one unit, or a receiver that is
                gone or late; the text says at which chunk.
        """
        check_plan(self.geometry, self.gpu, plan, None)
        chunks = cut_chunks(self.geometry, plan, self.link[0].nbytes)
        gathering, linking = Lane(self.region.device), Lane(self.region.device)
        gathering.after_current()
        with gathering.use():
            tables = upload(self.copier, [to_buffer(chunk) for chunk in chunks], self.region.device)
        try:
            self._send(chunks, tables, gathering, linking)
        finally:
            # The buffers are the next copy's then.
            linking.mark().wait()

    def _send(
        self, chunks: Sequence[SourcePlan], tables: Sequence[torch.Tensor], gathering: Lane, linking: Lane
    ) -> None:
        on_link: list[Mark] = []
        for index, chunk in enumerate(chunks):
            if index >= BUFFERS:
                self._await_drained(index - BUFFERS)
            shape = unit_shape(self.geometry, chunk)
            buffer = fit(self.geometry, chunk, self.buffers[index % BUFFERS])
            with gathering.use():
                self.copier.copy(self.region, [buffer], tables[index], shape)
            linking.after(gathering.mark())
            with linking.use():
                push(fit(self.geometry, chunk, self.link[index % BUFFERS]), buffer)
            on_link.append(linking.mark())
            if index:
                self._announce(index - 1, chunks, on_link)
        if chunks:
            self._announce(len(chunks) - 1, chunks, on_link)
        for index in range(max(0, len(chunks) - BUFFERS), len(chunks)):
            self._await_drained(index)

    def _announce(self, index: int, chunks: Sequence[SourcePlan], on_link: Sequence[Mark]) -> None:
        on_link[index].wait()
        checksums = None
        if self.checked:
            checksums = source_checksums(self.geometry, self.region, chunks[index]).tolist()
        try:
            self.channel.send(Filled(index, checksums))
        except OSError as error:
            raise CopyError(f"the receiver on the other end of GPU {self.gpu} is gone at chunk {index}") from error

    def _await_drained(self, index: int) -> None:
        message = _receive(self.channel, self.timeout_s, f"GPU {self.gpu} waits for chunk {index} to be drained")
        if message != Drained(index):
            raise CopyError(f"GPU {self.gpu} waits for chunk {index} to be drained and got {message}")


@dataclass(slots=True)
class StagedReceiver:
    """The destination's end.

    Attributes:
        geometry, gpu: the pool and the destination GPU.
        region: the destination GPU's region.
        link: the two link buffers as this process sees them.
        buffers: two uint8 tensors on the destination GPU if the link is host memory; None if it is this
            GPU's.
        copier, channel, timeout_s: as in the sender.
    """

    geometry: PoolGeometry
    gpu: int
    region: torch.Tensor
    link: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor] | None
    copier: UnitCopier
    channel: Channel
    timeout_s: float

    def run(self, plan: SourcePlan, after: Mark = NOW) -> None:
        """Receive all of the plan that the sender runs; nothing is written to the region before `after`, and nothing
        after this has returned or raised. Blocks the calling thread.

        Raises:
            CopyError: as the sender's.
            CopyMismatch: in debug mode, a chunk that differs from its source.
        """
        lane = Lane(self.region.device)
        chunks = cut_chunks(self.geometry, plan, self.link[0].nbytes)
        with lane.use():
            tables = upload(self.copier, [from_buffer(chunk) for chunk in chunks], self.region.device)
        lane.after(after)
        try:
            for index, chunk in enumerate(chunks):
                self._take(index, chunk, tables[index], lane)
        finally:
            lane.mark().wait()

    def _take(self, index: int, chunk: SourcePlan, table: torch.Tensor, lane: Lane) -> None:
        """Bring one chunk from its link buffer into the region."""
        message = _receive(self.channel, self.timeout_s, f"GPU {self.gpu} waits for chunk {index} to be filled")
        if not isinstance(message, Filled) or message.chunk != index:
            raise CopyError(f"GPU {self.gpu} waits for chunk {index} to be filled and got {message}")
        buffer = fit(self.geometry, chunk, self.link[index % BUFFERS])
        with lane.use():
            if self.buffers is not None:
                own = fit(self.geometry, chunk, self.buffers[index % BUFFERS])
                push(own, buffer)
                buffer = own
            self.copier.copy(buffer, [self.region], table, unit_shape(self.geometry, chunk))
        lane.mark().wait()
        if message.checksums is not None:
            compare(
                self.geometry,
                chunk,
                torch.tensor(message.checksums),
                dest_checksums(self.geometry, self.region, chunk),
            )
        try:
            self.channel.send(Drained(index))
        except OSError as error:
            raise CopyError(f"the sender to GPU {self.gpu} is gone at chunk {index}") from error


def _receive(channel: Channel, timeout_s: float, what: str) -> Any:
    try:
        if not channel.poll(timeout_s):
            raise CopyError(f"{what}, but nothing came in {timeout_s:g} s")
        return channel.recv()
    except (EOFError, OSError) as error:
        raise CopyError(f"{what}, but the other end is gone") from error
