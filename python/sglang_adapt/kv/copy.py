"""Carrying out copy plans where the source GPU can write to its destinations directly.

`staged` is the way for GPUs without peer access, and the gentlest way beside running work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from sgl_kernel_ext.kv_copy_reference import pack_records

from sglang_adapt.kv.copiers import Records, UnitCopier, UnitShape
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import Lane, Mark
from sglang_adapt.kv.plan import SourcePlan


class CopyError(RuntimeError):
    """A plan that this executor cannot carry out; the text names the GPU or layer at fault."""


class CopyExecutor(Protocol):
    """Starts the copies of one source GPU."""

    def start(self, plan: SourcePlan, layers: range | None = None) -> Mark:
        """Queue the copy after the work of the current stream. Wait for the mark before anything reads the
        destinations, frees the sources, or closes a mapped region.

        Raises:
            CopyError: a plan of another GPU, a destination that is not mapped here, layers that do not exist.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCopy:
    """A plan on the device: the regions it writes to, its records there, and the units' shape."""

    dests: Sequence[torch.Tensor]
    table: torch.Tensor
    shape: UnitShape


@dataclass(slots=True)
class DirectExecutor:
    """Writes straight into the destinations' regions, its own GPU's and those mapped from peers.

    Attributes:
        geometry: shapes of every region.
        gpu: the source GPU.
        regions: each GPU's region by index, shape `geometry.region_shape`; the source's and all
            destinations'.
        copier: what moves the units; on a GPU its grid decides how much of the GPU the copy takes.
        lane: where copies run; its device is that of the source region.
    """

    geometry: PoolGeometry
    gpu: int
    regions: Mapping[int, torch.Tensor]
    copier: UnitCopier
    lane: Lane

    @classmethod
    def on(
        cls, geometry: PoolGeometry, gpu: int, regions: Mapping[int, torch.Tensor], copier: UnitCopier
    ) -> DirectExecutor:
        """An executor with a lane of its own.

        Raises:
            CopyError: no region of `gpu`.
            GeometryError: a region whose shape or element size is not the pool's.
        """
        if gpu not in regions:
            raise CopyError(f"GPU {gpu} has no region here; regions are those of GPUs {sorted(regions)}")
        for region in regions.values():
            geometry.check_region(tuple(region.shape), region.element_size())
        return cls(geometry, gpu, dict(regions), copier, Lane(regions[gpu].device))

    def start(self, plan: SourcePlan, layers: range | None = None) -> Mark:
        return self.launch(self.prepare(plan, layers))

    def prepare(self, plan: SourcePlan, layers: range | None = None) -> PreparedCopy:
        """Upload a plan without starting it: what can be done before the source's KV is final."""
        layers = check_plan(self.geometry, self.gpu, plan, layers)
        dests = plan.dest_gpus
        missing = [gpu for gpu in dests if gpu not in self.regions]
        if missing:
            raise CopyError(f"the region of GPU {missing[0]} is not mapped on GPU {self.gpu}; map it before copying")
        slots = {gpu: slot for slot, gpu in enumerate(dests)}
        shape = UnitShape(
            plan.unit_tokens,
            plan.row_quanta,
            range(2 * layers.start, 2 * layers.stop),
            self.geometry.planes,
        )
        with self.lane.use():
            table = self.copier.upload(records_of(plan, slots), self.lane.device)
        return PreparedCopy([self.regions[gpu] for gpu in dests], table, shape)

    def launch(self, copy: PreparedCopy) -> Mark:
        """Queue a prepared copy after the work of the current stream; it can be launched again."""
        self.lane.after_current()
        with self.lane.use():
            self.copier.copy(self.regions[self.gpu], copy.dests, copy.table, copy.shape)
        return self.lane.mark()


def check_plan(geometry: PoolGeometry, gpu: int, plan: SourcePlan, layers: range | None) -> range:
    """The layers to copy, all by default.

    Raises:
        CopyError: a plan of another source GPU, or layers that do not exist.
    """
    if plan.gpu != gpu:
        raise CopyError(f"the plan is for source GPU {plan.gpu}, this executor is on GPU {gpu}")
    if layers is None:
        return range(geometry.layers)
    if layers.step != 1 or layers.start < 0 or layers.stop > geometry.layers:
        raise CopyError(f"layers {layers} are no run of the pool's {geometry.layers} layers")
    return layers


def records_of(plan: SourcePlan, slots: Mapping[int, int]) -> Records:
    """The records of a plan's units, with `slots` saying which destination slot each GPU is."""
    slot = np.array([slots.get(route.dest_gpu, -1) for route in plan.routes], dtype=np.int32)
    source_stride = np.array([route.source_stride for route in plan.routes], dtype=np.int32)
    dest_stride = np.array([route.dest_stride for route in plan.routes], dtype=np.int32)
    route = plan.route
    return pack_records(plan.source, plan.dest, plan.tokens, slot[route], source_stride[route], dest_stride[route])
