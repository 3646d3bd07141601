"""What the one-launch copy is compared with: a plain peer copy, gather and one big copy, one copy per page."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kv_bench.clock import Clock
from sglang_adapt.kv.copy import DirectExecutor, records_of
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import SourcePlan
from sglang_adapt.kv.staging import fit, from_buffer, to_buffer, unit_shape
from sglang_adapt.kv.transfer import push

_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED


class BigCopy:
    """Gather all that goes to a GPU into a buffer, move it with one copy, scatter it there; one after the
    other."""

    def __init__(
        self,
        executor: DirectExecutor,
        plans: Mapping[int, SourcePlan],
        outbox: torch.Tensor,
        inboxes: Mapping[int, torch.Tensor],
        clock: Clock,
    ) -> None:
        """`outbox` is this GPU's, `inboxes` are all GPUs' (uint8)."""
        geometry, gpu, copier, lane = executor.geometry, executor.gpu, executor.copier, executor.lane
        self._geometry, self._copier, self._clock = geometry, copier, clock
        self._executor, self._region = executor, executor.regions[gpu]
        mine = plans[gpu]
        self._local = executor.prepare(mine.to_gpu(gpu)) if gpu in mine.dest_gpus else None
        self._out: list[tuple[SourcePlan, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._in: list[tuple[SourcePlan, torch.Tensor, torch.Tensor]] = []
        used = 0
        for dest in mine.dest_gpus:
            if dest != gpu:
                part = mine.to_gpu(dest)
                source = fit(geometry, part, outbox[used:])
                used += source.numel()
                there = fit(geometry, part, inboxes[dest][_inbox_start(geometry, plans, dest, gpu) :])
                table = copier.upload(records_of(to_buffer(part), {dest: 0}), lane.device)
                self._out.append((part, source, there, table))
        for source_gpu, plan in plans.items():
            if source_gpu != gpu and gpu in plan.dest_gpus:
                part = plan.to_gpu(gpu)
                here = fit(geometry, part, inboxes[gpu][_inbox_start(geometry, plans, gpu, source_gpu) :])
                table = copier.upload(records_of(from_buffer(part), {gpu: 0}), lane.device)
                self._in.append((part, here, table))

    def run(self) -> None:
        """Queue all of it on the current stream."""
        for part, source, _, table in self._out:
            self._copier.copy(self._region, [source], table, unit_shape(self._geometry, part))
        for _, source, there, _ in self._out:
            push(there, source)
        if self._local is not None:
            self._executor.launch(self._local)
        self._clock.rendezvous()
        for part, here, table in self._in:
            self._copier.copy(here, [self._region], table, unit_shape(self._geometry, part))


def _inbox_start(geometry: PoolGeometry, plans: Mapping[int, SourcePlan], dest: int, source: int) -> int:
    """Where in `dest`'s inbox the bytes from `source` begin: after those from lower sources."""
    start = 0
    for gpu in sorted(plans):
        if gpu == source:
            return start
        if gpu != dest and dest in plans[gpu].dest_gpus:
            part = plans[gpu].to_gpu(dest)
            start += geometry.planes * part.units * part.unit_tokens * part.row_bytes
    raise ValueError(f"GPU {source} has no plan")


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver API."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


def per_page_ms(
    geometry: PoolGeometry, plan: SourcePlan, regions: Mapping[int, torch.Tensor], most_calls: int
) -> tuple[float, int]:
    """Milliseconds on the host for one asynchronous copy per page and plane, extrapolated from the first
    `most_calls` calls, and how many calls all of the plan takes. For CUDA."""
    units = min(plan.units, max(1, most_calls // geometry.planes))
    copies = [
        _copy_2d(geometry, plan, regions, unit, plane) for unit in range(units) for plane in range(geometry.planes)
    ]
    call: Any = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for copy in copies:
        code = call(ctypes.byref(copy), stream)
        if code:
            raise RuntimeError(f"cuMemcpy2DAsync failed with CUresult {code}")
    torch.cuda.synchronize()
    elapsed = (time.perf_counter() - begin) * 1e3
    return elapsed * plan.units / units, plan.units * geometry.planes


def _copy_2d(
    geometry: PoolGeometry, plan: SourcePlan, regions: Mapping[int, torch.Tensor], unit: int, plane: int
) -> _Copy2D:
    route = plan.routes[plan.route[unit]]
    base = plane * geometry.plane_bytes
    return _Copy2D(
        srcMemoryType=_UNIFIED,
        srcDevice=regions[plan.gpu].data_ptr() + base + int(plan.source[unit]) * 16,
        srcPitch=route.source_stride * 16,
        dstMemoryType=_UNIFIED,
        dstDevice=regions[route.dest_gpu].data_ptr() + base + int(plan.dest[unit]) * 16,
        dstPitch=route.dest_stride * 16,
        WidthInBytes=plan.row_bytes,
        Height=int(plan.tokens[unit]),
    )


def plain_copies(clock: Clock, own: torch.Tensor, peers: Sequence[torch.Tensor | None], reps: int) -> list[float]:
    """Milliseconds of copying `own` (uint8) to each of `peers` in turn; where it is None this GPU only
    waits."""

    def send(peer: torch.Tensor | None) -> None:
        if peer is not None:
            push(peer, own)

    return [clock.measure(partial(send, peer), reps) for peer in peers]
