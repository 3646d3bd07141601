"""Chunks of a copy in a contiguous buffer: cutting a plan into them, and the plans to and from the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang_adapt.kv.copiers import UnitCopier, UnitShape
from sglang_adapt.kv.copy import CopyError, records_of
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import SourcePlan

BUFFER_BYTES = 32 << 20
"""Of a staging buffer: 1.3 ms on a PCIe link of 25 GB/s, so that what a chunk costs beside its bytes is a few percent,
and the last chunk, which nothing overlaps, still short."""
VIRTUAL_BUFFER_BYTES = 128 << 10
"""On virtual GPUs: a few blocks of a small model, so that a copy has chunks there, too."""


def buffer_bytes(planes: int, block_bytes: int, *, virtual: bool) -> int:
    """Bytes of a staging buffer: at least those of a block in all planes, which hold any unit.

    Args:
        planes, block_bytes: as in `PoolGeometry`.
        virtual: the GPUs are.
    """
    return max(VIRTUAL_BUFFER_BYTES if virtual else BUFFER_BYTES, planes * block_bytes)


def halves(memory: torch.Tensor) -> list[torch.Tensor]:
    """The two buffers that lie one behind the other in a uint8 tensor of an even size."""
    return list(memory.view(-1).tensor_split(2))


def cut_chunks(geometry: PoolGeometry, plan: SourcePlan, buffer_bytes: int) -> list[SourcePlan]:
    """Cut a plan with one destination GPU into chunks of whole units that fit a buffer with all planes.

    Raises:
        CopyError: several destinations, or a buffer that does not hold one unit; names the bytes needed.
    """
    if len(plan.dest_gpus) > 1:
        raise CopyError(f"a staged copy goes to one GPU, the plan goes to GPUs {plan.dest_gpus}; split it first")
    unit_bytes = geometry.planes * plan.unit_tokens * plan.row_bytes
    count = buffer_bytes // unit_bytes
    if plan.units and not count:
        raise CopyError(f"a staging buffer of {buffer_bytes} bytes does not hold one unit of {unit_bytes} bytes")
    return [plan.select(np.arange(first, min(first + count, plan.units))) for first in range(0, plan.units, count or 1)]


def unit_shape(geometry: PoolGeometry, chunk: SourcePlan) -> UnitShape:
    """The shape of a chunk's units, in all planes."""
    return UnitShape(chunk.unit_tokens, chunk.row_quanta, range(geometry.planes), geometry.planes)


def fit(geometry: PoolGeometry, chunk: SourcePlan, buffer: torch.Tensor) -> torch.Tensor:
    """The front of a buffer that holds a chunk: all planes, each with its units one after the other."""
    return buffer.view(-1)[: geometry.planes * chunk.units * chunk.unit_tokens * chunk.row_bytes]


def to_buffer(chunk: SourcePlan) -> SourcePlan:
    """The chunk with its units' destinations in the buffer."""
    return replace(
        chunk,
        dest=np.arange(chunk.units, dtype=np.int32) * (chunk.unit_tokens * chunk.row_quanta),
        routes=tuple(replace(route, dest_stride=chunk.row_quanta) for route in chunk.routes),
    )


def from_buffer(chunk: SourcePlan) -> SourcePlan:
    """The chunk with its units' sources in the buffer."""
    return replace(
        chunk,
        source=np.arange(chunk.units, dtype=np.int32) * (chunk.unit_tokens * chunk.row_quanta),
        routes=tuple(replace(route, source_stride=chunk.row_quanta) for route in chunk.routes),
    )


def upload(copier: UnitCopier, chunks: Sequence[SourcePlan], device: torch.device) -> Sequence[torch.Tensor]:
    """The records of each chunk, all brought to the device at once on the current stream: what takes the host long is
    done before the first chunk, not between two."""
    if not chunks:
        return ()
    slots = dict.fromkeys(chunks[0].dest_gpus, 0)
    table = copier.upload(np.concatenate([records_of(chunk, slots) for chunk in chunks]), device)
    return table.split([chunk.units for chunk in chunks])
