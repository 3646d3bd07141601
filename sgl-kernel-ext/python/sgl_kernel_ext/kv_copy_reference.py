"""The KV unit copy in plain PyTorch: what the Triton kernel of `kv_copy` must equal, and the CPU path.

A region is `planes` planes of equal bytes. A unit is a strided rectangle within a plane, up to `unit_tokens`
rows of `row_quanta` quanta (16 bytes), and the same rectangle is copied in every plane. Units are packed into
records, int32 `[units, 4]`:

    0: offset of the first row in the source plane, in quanta
    1: offset of the first row in the destination plane, in quanta
    2: rows << 16 | destination slot
    3: quanta between rows in the source << 16 | quanta between rows in the destination
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

QUANTUM_BYTES = 16
_LOW = 0xFFFF
_MAX_HIGH = 0x7FFF  # the upper half of a record's word stays clear of the sign bit


def pack_records(
    source: npt.NDArray[Any],
    dest: npt.NDArray[Any],
    rows: npt.NDArray[Any],
    slot: npt.NDArray[Any],
    source_stride: npt.NDArray[Any],
    dest_stride: npt.NDArray[Any],
) -> npt.NDArray[np.int32]:
    """Pack units (arrays of one length, offsets and strides in quanta) into records, int32 `[units, 4]`.

    Raises:
        ValueError: a unit of more than 32767 rows, a stride of more than 32767 quanta, or a slot over 65535.
    """
    for name, values, most in (
        ("rows of a unit", rows, _MAX_HIGH),
        ("slot", slot, _LOW),
        ("source stride", source_stride, _MAX_HIGH),
        ("destination stride", dest_stride, _MAX_HIGH),
    ):
        if values.size and (values.min() < 0 or values.max() > most):
            worst = int(values.max() if values.max() > most else values.min())
            raise ValueError(f"{name} is {worst}; a copy record holds 0 to {most}")
    records = np.empty((len(source), 4), dtype=np.int32)
    records[:, 0] = source
    records[:, 1] = dest
    records[:, 2] = rows << 16 | slot
    records[:, 3] = source_stride << 16 | dest_stride
    return records


def copy_units_reference(
    source: torch.Tensor,
    dests: Sequence[torch.Tensor],
    records: torch.Tensor,
    *,
    planes: int,
    row_quanta: int,
    first_plane: int = 0,
    source_planes: int | None = None,
) -> None:
    """Copy the units of `records` in planes `first_plane` to `first_plane + planes - 1`.

    Args:
        source: contiguous tensor of any dtype, `source_planes` planes of equal size.
        dests: a contiguous tensor for each slot, with as many planes as the source.
        records: int32 `[units, 4]` on the CPU. Offsets and strides must be multiples of `row_quanta`.
        planes: how many planes to copy.
        row_quanta: quanta of a row.
        source_planes: planes of a region; by default `first_plane + planes`.

    Raises:
        ValueError: offsets, strides or planes that are no whole number of rows.
    """
    if not len(records):
        return
    total = first_plane + planes if source_planes is None else source_planes
    table = records.to(torch.int64)
    rows, slot = table[:, 2] >> 16, table[:, 2] & _LOW
    source_stride, dest_stride = table[:, 3] >> 16, table[:, 3] & _LOW
    uneven = (table[:, :2] % row_quanta).any() or (source_stride % row_quanta).any() or (dest_stride % row_quanta).any()
    if uneven:
        raise ValueError(f"an offset or a stride of a copy is not a multiple of its row of {row_quanta} quanta")
    unit = torch.repeat_interleave(torch.arange(len(table)), rows)
    row = torch.arange(len(unit)) - (torch.cumsum(rows, 0) - rows)[unit]
    source_rows = (table[:, 0][unit] + row * source_stride[unit]) // row_quanta
    dest_rows = (table[:, 1][unit] + row * dest_stride[unit]) // row_quanta
    from_rows = _as_rows(source, total, row_quanta)
    for index, dest in enumerate(dests):
        here = (slot == index)[unit]
        if not here.any():
            continue
        to_rows = _as_rows(dest, total, row_quanta)
        reads, writes = source_rows[here], dest_rows[here]
        for plane in range(first_plane, first_plane + planes):  # one plane at a time bounds the temporary copy
            to_rows[plane].index_copy_(0, writes, from_rows[plane].index_select(0, reads))


def _as_rows(region: torch.Tensor, planes: int, row_quanta: int) -> torch.Tensor:
    """View a region as int64 `[planes, rows, words of a row]`."""
    row_bytes = row_quanta * QUANTUM_BYTES
    total_bytes = region.numel() * region.element_size()
    if total_bytes % (planes * row_bytes):
        raise ValueError(f"a region of {total_bytes} bytes is not {planes} planes of rows of {row_bytes} bytes")
    return region.view(-1).view(torch.int64).view(planes, -1, row_bytes // 8)
