"""The KV unit copy as one Triton launch: all planes, local and peer destinations together.

A program takes one tile of one unit in one plane at a time: it reads the unit's record, loads the rows with
16-byte accesses and stores them at the address of the record's destination slot, which may be memory of
another GPU mapped into this process. Records are described in `kv_copy_reference`, the plain PyTorch version.

Tiles hold 16 KB, and 64 KB are in flight on each multiprocessor: with that, plain Triton saturates NVLink.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_WORDS = 2048  # 16 KB of 8-byte words
_IN_FLIGHT_BYTES = 64 * 1024


@triton.jit(do_not_specialize=["units", "tasks", "first_plane"])
def _copy_units_kernel(  # type: ignore[no-untyped-def]
    source,
    addresses,
    records,
    units,
    tasks,
    first_plane,
    source_plane,
    dest_plane,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """`tasks` tiles, spread over the programs of the grid. Plane sizes are in quanta, offsets become
    words."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = task % CHUNKS
        index = task // CHUNKS
        plane = index // units
        record = records + (index - plane * units).to(tl.int64) * 4
        source_at = tl.load(record).to(tl.int64)
        dest_at = tl.load(record + 1).to(tl.int64)
        rows_and_slot = tl.load(record + 2)
        strides = tl.load(record + 3)
        address = tl.load(addresses + (rows_and_slot & 0xFFFF))
        at_plane = (first_plane + plane).to(tl.int64)
        row = chunk * ROWS + rows
        mask = row < (rows_and_slot >> 16)
        if COLS != ROW_WORDS:
            mask = mask & (cols < ROW_WORDS)
        row = row.to(tl.int64)
        source_words = (at_plane * source_plane + source_at + row * (strides >> 16)) * 2 + cols
        dest_words = (at_plane * dest_plane + dest_at + row * (strides & 0xFFFF)) * 2 + cols
        dest = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        tl.store(dest + dest_words, tl.load(source + source_words, mask=mask), mask=mask)


def copy_units(
    source: torch.Tensor,
    addresses: torch.Tensor,
    records: torch.Tensor,
    *,
    planes: int,
    source_plane_bytes: int,
    dest_plane_bytes: int,
    unit_tokens: int,
    row_quanta: int,
    first_plane: int = 0,
    programs: int | None = None,
) -> None:
    """Copy the units of `records` in planes `first_plane` to `first_plane + planes - 1`, on the current
    stream.

    Args:
        source: contiguous region, any dtype; memory of the GPU that runs the kernel, or a peer's mapped there.
        addresses: int64 `[slots]` on that GPU: where each destination region begins, multiples of 16. The
            caller keeps all regions alive and mapped until the copy has ended.
        records: int32 `[units, 4]` on the GPU that runs the kernel, which is the current device.
        planes: how many planes to copy.
        source_plane_bytes, dest_plane_bytes: bytes of a plane at either end.
        unit_tokens: the most rows of a unit.
        row_quanta: quanta (16 bytes) of a row.
        programs: size of the grid; by default as many as fill the GPU. Fewer leave room for other work.

    Raises:
        ValueError: more tiles than one launch can count (2^31), or a region that is not aligned to 16 bytes.
    """
    units = records.shape[0]
    if not units or not planes:
        return
    if source.data_ptr() % 16:
        raise ValueError(f"the source region begins at {source.data_ptr():#x}, not at a multiple of 16")
    row_words = row_quanta * 2
    cols = triton.next_power_of_2(row_words)
    rows = min(triton.next_power_of_2(unit_tokens), max(1, _TILE_WORDS // cols))
    chunks = triton.cdiv(unit_tokens, rows)
    tasks = units * planes * chunks
    if tasks >= 1 << 31:
        raise ValueError(f"{units} units x {planes} planes x {chunks} tiles do not fit into one launch")
    tile_bytes = rows * cols * 8
    if programs is None:
        programs = default_programs(records.device, tile_bytes)
    _copy_units_kernel[(min(programs, tasks),)](
        source.view(-1).view(torch.int64),
        addresses,
        records,
        units,
        tasks,
        first_plane,
        source_plane_bytes // 16,
        dest_plane_bytes // 16,
        CHUNKS=chunks,
        ROWS=rows,
        COLS=cols,
        ROW_WORDS=row_words,
        num_warps=min(8, max(1, tile_bytes // 2048)),
    )


def default_programs(device: torch.device, tile_bytes: int) -> int:
    """Programs that keep 64 KB in flight on each multiprocessor of `device`, at most 16 a multiprocessor."""
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after the other
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return count * min(16, max(1, _IN_FLIGHT_BYTES // tile_bytes))
