"""Bringing the KV of requests that arrive onto this rank's GPU: each rank of the destination pulls its own part.

So a destination engine depends on no other engine: the memory is the keepers', and what it reads lies still until the
router says so, whatever becomes of the source's processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from sglang_adapt.core.handoff import AdoptCall, KvSource, PrecopyCall
from sglang_adapt.kv.copiers import CpuCopier, PageCopier, TritonCopier, UnitCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import NOW, Lane, Mark, Marks
from sglang_adapt.kv.plan import CopyBatch, RequestCopy, SourcePlan, batches_to
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.memory import Region, RegionHandle, attach

logger = logging.getLogger(__name__)

_PROGRAMS_BESIDE_WORK = 64
"""Of a copy that goes ahead while its GPU serves: of 16, 32, 64 and the whole grid the number that costs a decode step
beside it the least in all (1.23 times as long, not 1.45; 143 GB/s, not 189; `bench_kv_copy_2xH200.json`)."""


class CopyRefusedError(RuntimeError):
    """KV that cannot be brought here; the text names the GPU. Nothing was copied."""


@dataclass(frozen=True)
class Pull:
    """KV of one request to bring into blocks that a rank has chosen itself.

    Attributes:
        rid: the request's id, for error texts.
        first, end: its tokens `first` to `end - 1`.
        source: where they lie, blocks from the one that holds `first` on.
        blocks: of this rank, likewise.
    """

    rid: str
    first: int
    end: int
    source: KvSource
    blocks: list[int]


class KvCopies:
    """The regions of all GPUs as this rank sees them, and the copies from them into its own.

    Args:
        engine: name of the rank's engine, for error texts.
        geometry: shapes of every region.
        gpus: the deployment's GPUs of the engine's ranks.
        rank: this rank.
        region: its own GPU's region, `geometry.region_shape`, on the rank's device.
        by_page: each page and plane is a copy of its own.
    """

    def __init__(
        self,
        engine: str,
        geometry: PoolGeometry,
        gpus: tuple[int, ...],
        rank: int,
        region: torch.Tensor,
        *,
        by_page: bool = False,
    ) -> None:
        self._engine = engine
        self._geometry = geometry
        self._gpus = gpus
        self._gpu = gpus[rank]
        self._own = region
        self._mapped: dict[int, Region] = {}
        self._lanes: dict[int, Lane] = {}
        self._copier: UnitCopier
        self._ahead_copier: UnitCopier
        if by_page:
            logger.info("KV arrives with a copy for each page, layer, K and V")
            self._copier = self._ahead_copier = PageCopier()
        elif region.device.type == "cuda":
            self._copier, self._ahead_copier = TritonCopier(), TritonCopier(_PROGRAMS_BESIDE_WORK)
        else:
            self._copier = self._ahead_copier = CpuCopier()

    def map(self, handles: Mapping[int, RegionHandle]) -> None:
        """Map the regions of other GPUs, by the deployment's index; those that are mapped already stay.

        Raises:
            MemoryGoneError, SharedMemoryError: a region that cannot be mapped.
        """
        for gpu, handle in handles.items():
            if gpu != self._gpu and (gpu not in self._mapped or self._mapped[gpu].handle != handle):
                self._mapped[gpu] = attach(handle, "read", self._own.device)

    def from_token(self, source: KvSource, first: int) -> KvSource:
        """The same source with blocks from the one that holds token `first` on."""
        skipped = first // self._geometry.tokens_per_block(len(source.gpus))
        return KvSource(source.gpus, [blocks[skipped:] for blocks in source.blocks])

    def pull(self, pulls: Sequence[Pull], after: Mark, *, ahead: bool = False) -> Marks:
        """Begin to copy KV, after a mark; what is returned is reached when it is there. Raises as `start`.

        Args:
            ahead: nobody waits for it, and it leaves most of the GPU to what runs there.
        """
        copies = [
            (
                pull.source.gpus,
                RequestCopy(
                    pull.rid,
                    pull.end,
                    np.asarray(pull.source.blocks, dtype=np.int32),
                    # A rank carries out its own part only, so its blocks can stand for those of the other ranks.
                    np.asarray([pull.blocks] * len(self._gpus), dtype=np.int32),
                    pull.first,
                ),
            )
            for pull in pulls
            if pull.first < pull.end
        ]
        return self._start(batches_to(self._gpus, copies), after, ahead)

    def start(self, call: AdoptCall | PrecopyCall, after: Mark = NOW) -> Callable[[], None]:
        """Begin to copy what this rank's blocks of `call` are to hold; what is returned waits until it is there.

        The copies from different GPUs run side by side, each from `after` on. Those of a PrecopyCall go ahead.

        Raises:
            CopyRefusedError: a source GPU whose region is not mapped.
            PlanError: block lists that do not fit the requests' lengths.
        """
        return self._start(self._batches(call), after, isinstance(call, PrecopyCall)).wait

    def _start(self, batches: Sequence[CopyBatch], after: Mark, ahead: bool) -> Marks:
        plans = build_plans(self._geometry, batches, self._gpu)
        needed = {plan.gpu for plan in plans}
        missing = needed - self._mapped.keys() - {self._gpu}
        if missing:
            raise CopyRefusedError(
                f"{self._engine}: the KV region of GPU {min(missing)} is not mapped on GPU {self._gpu}; "
                f"send kv_map first"
            )
        return Marks([self._begin(self._executor(plan.gpu, ahead), plan, after) for plan in plans])

    @staticmethod
    def _begin(executor: DirectExecutor, plan: SourcePlan, after: Mark) -> Mark:
        prepared = executor.prepare(plan)
        executor.lane.after(after)
        return executor.launch(prepared)

    def _executor(self, source: int, ahead: bool) -> DirectExecutor:
        regions = {self._gpu: self._own, source: self._view(source)}
        if source not in self._lanes:
            self._lanes[source] = Lane(self._own.device)
        copier = self._ahead_copier if ahead else self._copier
        return DirectExecutor(self._geometry, source, regions, copier, self._lanes[source])

    def _view(self, gpu: int) -> torch.Tensor:
        if gpu == self._gpu:
            return self._own
        whole = self._mapped[gpu].tensor[: self._geometry.region_bytes]
        return whole.view(self._own.dtype).view(self._geometry.region_shape)

    def _batches(self, call: AdoptCall | PrecopyCall) -> list[CopyBatch]:
        copies: list[tuple[Sequence[int], RequestCopy]] = []
        for at, (request, source) in enumerate(zip(call.requests, call.sources, strict=True)):
            if isinstance(call, PrecopyCall):
                first, end = 0, request.ahead
            else:
                first, end = request.ahead, request.kv_tokens if request.rid not in call.aborted else 0
            if end <= first:
                continue
            copy = RequestCopy(
                request.rid,
                end,
                np.asarray(source.blocks, dtype=np.int32),
                np.asarray([by_request[at] for by_request in call.blocks], dtype=np.int32),
                first,
            )
            copies.append((source.gpus, copy))
        return batches_to(self._gpus, copies)


def handles_of(regions: dict[str, object]) -> dict[int, RegionHandle]:
    """The handles in a call's payload, by the deployment's GPU.

    Raises:
        msgspec.ValidationError: no such handles.
    """
    return msgspec.convert(regions, dict[int, RegionHandle], strict=False)
