"""Debug mode of direct copies: every copy is read back and compared with its source by checksums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang_adapt.kv.checksums import compare, source_checksums
from sglang_adapt.kv.copy import DirectExecutor, check_plan, records_of
from sglang_adapt.kv.lanes import Mark
from sglang_adapt.kv.plan import SourcePlan
from sglang_adapt.kv.staging import cut_chunks, fit, from_buffer, to_buffer, unit_shape

_READ_BACK_BYTES = 256 << 20


@dataclass(slots=True)
class CheckedExecutor:
    """Runs a copy to its end and compares both sides. Slow: reads everything twice, and over the link once
    more.

    Destinations are read by the source GPU's own kernel, since memory mapped from a peer can be used from the
    mapping GPU only.
    """

    inner: DirectExecutor

    def start(self, plan: SourcePlan, layers: range | None = None) -> Mark:
        """As the inner executor's, but done on return.

        Raises:
            CopyMismatch: naming the request, the layer and the blocks that differ.
        """
        geometry = self.inner.geometry
        layers = check_plan(geometry, self.inner.gpu, plan, layers)
        planes = slice(2 * layers.start, 2 * layers.stop)
        before = source_checksums(geometry, self.inner.regions[plan.gpu], plan)
        mark = self.inner.start(plan, layers)
        mark.wait()
        for gpu in plan.dest_gpus:
            there = plan.goes_to(gpu)
            part = plan.select(there)
            after = self._dest_checksums(gpu, part)
            expected = before[:, torch.from_numpy(there).to(before.device)]
            compare(geometry, part, expected[planes], after[planes], first_plane=planes.start)
        return mark

    def _dest_checksums(self, gpu: int, plan: SourcePlan) -> torch.Tensor:
        """Checksums of what a plan wrote to one GPU, int64 `[planes, units]`, read back in pieces."""
        geometry, copier, lane = self.inner.geometry, self.inner.copier, self.inner.lane
        unit_bytes = geometry.planes * plan.unit_tokens * plan.row_bytes
        size = max(unit_bytes, min(_READ_BACK_BYTES, unit_bytes * plan.units))
        buffer = torch.empty(size, dtype=torch.uint8, device=lane.device)
        sums = []
        for chunk in cut_chunks(geometry, plan, size):
            back = _reading_back(chunk)
            here = fit(geometry, back, buffer)
            with lane.use():
                table = copier.upload(records_of(to_buffer(back), {gpu: 0}), lane.device)
                copier.copy(self.inner.regions[gpu], [here], table, unit_shape(geometry, back))
            lane.mark().wait()
            sums.append(source_checksums(geometry, here, from_buffer(back)))
        return torch.cat(sums, dim=1)


def _reading_back(chunk: SourcePlan) -> SourcePlan:
    """The chunk with what it wrote as what is read."""
    return replace(
        chunk,
        source=chunk.dest,
        routes=tuple(replace(route, source_stride=route.dest_stride) for route in chunk.routes),
    )
