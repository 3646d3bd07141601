"""Checksums of copied KV at both ends: the debug mode that finds the request and the block a copy spoiled."""

from __future__ import annotations

import numpy as np
import torch

from sglang_adapt.kv.geometry import QUANTUM, PoolGeometry
from sglang_adapt.kv.plan import IntArray, SourcePlan

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, from the golden ratio: spreads places over 64 bits


class CopyMismatch(RuntimeError):
    """A destination does not hold what its source held; the text names the request, the layer and the
    blocks."""


def source_checksums(geometry: PoolGeometry, region: torch.Tensor, plan: SourcePlan) -> torch.Tensor:
    """Checksums of what a plan reads: int64 `[planes, units]` on the region's device.

    A checksum is the sum of the unit's 8-byte words, each times an odd weight of its place in the unit,
    modulo 2^64: it changes when words are lost, changed or swapped.
    """
    strides = np.array([route.source_stride for route in plan.routes], dtype=np.int64)[plan.route]
    return _checksums(geometry, region, plan, plan.source, strides)


def dest_checksums(geometry: PoolGeometry, region: torch.Tensor, plan: SourcePlan) -> torch.Tensor:
    """The same of what a plan writes to one GPU; all of the plan's routes must end in `region`."""
    strides = np.array([route.dest_stride for route in plan.routes], dtype=np.int64)[plan.route]
    return _checksums(geometry, region, plan, plan.dest, strides)


def compare(
    geometry: PoolGeometry, plan: SourcePlan, source: torch.Tensor, dest: torch.Tensor, first_plane: int = 0
) -> None:
    """Compare the checksums of both ends of a plan, int64 `[planes, units]` from `first_plane` on.

    Raises:
        CopyMismatch: naming the first unit that differs, and how many do.
    """
    bad = (source.cpu() != dest.cpu()).nonzero()
    if not len(bad):
        return
    plane, unit = bad[0].tolist()
    plane += first_plane
    route = plan.routes[plan.route[unit]]
    block_quanta = geometry.block_bytes // QUANTUM
    raise CopyMismatch(
        f"request {plan.rids[plan.request[unit]]}: {'KV'[plane % 2]} of layer {plane // 2}, KV head "
        f"{route.first_head}: block {plan.dest[unit] // block_quanta} of GPU {route.dest_gpu} does not hold "
        f"what block {plan.source[unit] // block_quanta} of GPU {plan.gpu} holds "
        f"({len(bad)} of {source.numel()} pieces differ); do not adopt from this copy"
    )


def _checksums(
    geometry: PoolGeometry, region: torch.Tensor, plan: SourcePlan, starts: IntArray, strides: np.ndarray
) -> torch.Tensor:
    device = region.device
    words = plan.row_quanta * 2
    unit = np.repeat(np.arange(plan.units), plan.tokens)
    row = np.arange(len(unit)) - (np.cumsum(plan.tokens) - plan.tokens)[unit]
    rows = torch.from_numpy((starts[unit] + row * strides[unit]) // plan.row_quanta).to(device)
    place = torch.from_numpy(row).to(device)[:, None] * words + torch.arange(words, device=device)
    weight = (place + 1) * _MULTIPLIER | 1
    units = torch.from_numpy(unit).to(device)
    planes = region.view(-1).view(torch.int64).view(geometry.planes, -1, words)
    sums = torch.zeros(geometry.planes, plan.units, dtype=torch.int64, device=device)
    for plane in range(geometry.planes):  # one plane at a time bounds the temporary copy
        sums[plane].index_add_(0, units, (planes[plane].index_select(0, rows) * weight).sum(1))
    return sums
