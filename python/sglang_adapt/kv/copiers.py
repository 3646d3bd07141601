"""Moving the units of a plan on one device: vectorised torch on a CPU, one Triton launch on a GPU; or a copy a page.

Both take the records of `sgl_kernel_ext.kv_copy_reference`, and put their work into the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from sgl_kernel_ext.kv_copy_reference import QUANTUM_BYTES, copy_units_reference

Records = npt.NDArray[np.int32]

_STAGED_BYTES = 32 * 1024
"""So much of ordinary memory CUDA takes into a buffer of its own at once, up to 64 KB. Pinned memory would have to be
found first, and made, in a millisecond, for each size that comes for the first time."""


@dataclass(frozen=True, slots=True)
class UnitShape:
    """What a copy's units have in common: the most rows, quanta (16 bytes) of a row, and the planes to copy
    of the `total_planes` that a region has."""

    tokens: int
    row_quanta: int
    planes: range
    total_planes: int


class UnitCopier(Protocol):
    """Copies units from one tensor into others, all of which have `shape.total_planes` planes."""

    def upload(self, records: Records, device: torch.device) -> torch.Tensor:
        """Bring records, int32 `[units, 4]`, to where `copy` reads them, on the current stream."""
        ...

    def copy(self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape) -> None:
        """Queue the copy of the uploaded records from `source` to the slots `dests`, which are of equal size.
        The caller keeps all tensors alive until it has ended."""
        ...


class CpuCopier:
    """Copies within host memory; done on return."""

    def upload(self, records: Records, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(records)

    def copy(self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape) -> None:
        copy_units_reference(
            source,
            dests,
            table,
            planes=len(shape.planes),
            first_plane=shape.planes.start,
            source_planes=shape.total_planes,
            row_quanta=shape.row_quanta,
        )


@dataclass(slots=True)
class TritonCopier:
    """Copies with one kernel on the source's GPU, which also writes to peers' memory mapped here.

    Attributes:
        programs: the grid's size; None fills the GPU (a switch, with serving stopped), 16 to 64 leave most of
            it to running work (a hand-over beside decoding).
    """

    programs: int | None = None
    _addresses: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def upload(self, records: Records, device: torch.device) -> torch.Tensor:
        host = torch.from_numpy(records)
        if device.type != "cuda":
            return host
        return (host if records.nbytes <= _STAGED_BYTES else host.pin_memory()).to(device, non_blocking=True)

    def copy(self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape) -> None:
        from sgl_kernel_ext.kv_copy import copy_units  # Triton is needed on GPUs only

        copy_units(
            source,
            self._addresses_of(table.device, dests),
            table,
            planes=len(shape.planes),
            first_plane=shape.planes.start,
            source_plane_bytes=source.nbytes // shape.total_planes,
            dest_plane_bytes=dests[0].nbytes // shape.total_planes,
            unit_tokens=shape.tokens,
            row_quanta=shape.row_quanta,
            programs=self.programs,
        )

    def _addresses_of(self, device: torch.device, dests: Sequence[torch.Tensor]) -> torch.Tensor:
        key = tuple(dest.data_ptr() for dest in dests)
        if key not in self._addresses:
            self._addresses[key] = torch.tensor(key, dtype=torch.int64, device=device)
        return self._addresses[key]


class PageCopier:
    """Copies each unit, which is at most a page, in each plane by a copy of its own, as a naive migration does with
    `cudaMemcpyAsync` (Nitsum, 4.2.1). To measure what one launch for all is worth; what arrives is the same.

    Attributes:
        copies: that were made.
    """

    def __init__(self) -> None:
        self.copies = 0

    def upload(self, records: Records, device: torch.device) -> torch.Tensor:
        """Records stay in host memory, where each copy is made from one."""
        return torch.from_numpy(records)

    def copy(self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape) -> None:
        here = _words(source, shape.total_planes)
        there = [_words(dest, shape.total_planes) for dest in dests]
        words = QUANTUM_BYTES // 8
        for first_from, first_to, rows_and_slot, strides in table.tolist():
            size = (rows_and_slot >> 16, shape.row_quanta * words)
            dest = there[rows_and_slot & 0xFFFF]
            step_from, step_to = (strides >> 16) * words, (strides & 0xFFFF) * words
            for plane in shape.planes:
                reads = torch.as_strided(here[plane], size, (step_from, 1), _start(here[plane]) + first_from * words)
                writes = torch.as_strided(dest[plane], size, (step_to, 1), _start(dest[plane]) + first_to * words)
                writes.copy_(reads, non_blocking=True)
                self.copies += 1


PROGRAMS_BESIDE_WORK = 64
"""Of a copy that goes ahead while its GPU serves: of 16, 32, 64 and the whole grid the number that costs a decode step
beside it the least in all (1.23 times as long, not 1.45; 143 GB/s, not 189; `bench_kv_copy_2xH200.json`)."""


@dataclass(frozen=True, slots=True)
class Copiers:
    """What moves units on one device: for a copy that somebody waits for, and for one that goes ahead."""

    now: UnitCopier
    ahead: UnitCopier


def copiers_of(device: torch.device, *, by_page: bool = False) -> Copiers:
    """Those of a device.

    Args:
        by_page: each page and plane is a copy of its own.
    """
    if by_page:
        copier: UnitCopier = PageCopier()
        return Copiers(copier, copier)
    if device.type == "cuda":
        return Copiers(TritonCopier(), TritonCopier(PROGRAMS_BESIDE_WORK))
    copier = CpuCopier()
    return Copiers(copier, copier)


def _words(region: torch.Tensor, planes: int) -> torch.Tensor:
    """A region as int64 `[planes, words]`."""
    return region.view(-1).view(torch.int64).view(planes, -1)


def _start(plane: torch.Tensor) -> int:
    """Where a plane begins in its storage, in words."""
    return int(plane.storage_offset())
