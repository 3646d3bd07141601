"""Bringing the KV of requests that arrive onto this rank's GPU: each rank of the destination pulls its own part.

So a destination engine depends on no other engine: the memory is the keepers', and what it reads lies still until the
router says so, whatever becomes of the source's processes. Where GPUs do not reach each other, the keepers send it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from sglang_adapt.core.handoff import AdoptCall, KvSource, PrecopyCall
from sglang_adapt.kv.copiers import copiers_of
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import NOW, Lane, Mark, Marks
from sglang_adapt.kv.plan import CopyBatch, RequestCopy, SourcePlan, batches_to
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged_client import Delivery, StagedClient
from sglang_adapt.kv.staged_handle import KvHandle, StagedHandle
from sglang_adapt.memory import Region, attach

logger = logging.getLogger(__name__)


class CopyRefusedError(RuntimeError):
    """KV that cannot be brought here; the text names the GPU. Nothing is being copied."""


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


@dataclass(frozen=True)
class Pulled:
    """Copies that have begun.

    Attributes:
        marks: of those that this rank's GPU makes, which do not fail.
        delivery: what the senders of other GPUs bring; None where this GPU reads their memory.
    """

    marks: Marks
    delivery: Delivery | None = field(default=None)

    @property
    def by_host(self) -> bool:
        """Some of it is the work of processes, on this rank or another one: it has to be seen before anything relies on
        it, and it may fail."""
        return self.delivery is not None

    @property
    def ended(self) -> bool:
        """The work of processes is over."""
        return self.delivery is None or self.delivery.ended

    @property
    def fault(self) -> str | None:
        """Why it has failed, if it has."""
        return None if self.delivery is None else self.delivery.fault

    def wait(self) -> None:
        """Until nothing is copied any more."""
        if self.delivery is not None:
            self.delivery.wait()
        self.marks.wait()

    def hold_back(self, stream: object) -> None:
        """What is put into a CUDA stream from now on starts when all is there. The calling thread waits for what is
        the work of processes."""
        if self.delivery is not None:
            self.delivery.wait()
        self.marks.hold_back(stream)


class KvCopies:
    """The regions of all GPUs as this rank sees them, and the copies from them into its own: from memory that is mapped
    here, or, without peer access, by those who have it (`kv.staged_client`).

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
        if by_page:
            logger.info("KV arrives with a copy for each page, layer, K and V")
        self._copiers = copiers_of(region.device, by_page=by_page)
        self._staged: StagedClient | None = None

    def map(self, handles: Mapping[int, KvHandle]) -> None:
        """Map the regions of other GPUs, or know who sends them, by the deployment's index; what is known stays.

        Raises:
            MemoryGoneError, SharedMemoryError: a region that cannot be mapped.
        """
        for gpu, handle in handles.items():
            if isinstance(handle, StagedHandle):
                # All ranks are told of all GPUs, so that all know alike that copies are staged.
                if self._staged is None:
                    self._staged = StagedClient(self._geometry, self._gpu, self._own, self._copiers)
                if gpu != self._gpu:
                    self._staged.open(gpu, handle)
            elif gpu != self._gpu and (gpu not in self._mapped or self._mapped[gpu].handle != handle):
                self._mapped[gpu] = attach(handle, "read", self._own.device)

    def from_token(self, source: KvSource, first: int) -> KvSource:
        """The same source with blocks from the one that holds token `first` on."""
        skipped = first // self._geometry.tokens_per_block(len(source.gpus))
        return KvSource(source.gpus, [blocks[skipped:] for blocks in source.blocks])

    def pull(self, pulls: Sequence[Pull], after: Mark, *, ahead: bool = False) -> Pulled:
        """Begin to copy KV, after a mark; what is returned tells when it is there.

        Raises:
            CopyRefusedError: a source GPU of which nothing is known.
            PlanError: block lists that do not fit the requests' lengths.

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

        The copies from different GPUs run side by side, each from `after` on. Those of a PrecopyCall go ahead. Staged
        ones are there on return, because nothing may be taken up before it is known that they have not failed.

        Raises:
            CopyRefusedError: a source GPU of which nothing is known, or whose sender is gone.
            PlanError: block lists that do not fit the requests' lengths.
        """
        pulled = self._start(self._batches(call), after, isinstance(call, PrecopyCall))
        if pulled.by_host:
            pulled.wait()
            if pulled.fault is not None:
                raise CopyRefusedError(f"{self._engine}: {pulled.fault}")
        return pulled.wait

    def _start(self, batches: Sequence[CopyBatch], after: Mark, ahead: bool) -> Pulled:
        plans = build_plans(self._geometry, batches, self._gpu)
        here = self._mapped.keys() | {self._gpu}
        sent = set() if self._staged is None else self._staged.gpus
        missing = {plan.gpu for plan in plans} - here - sent
        if missing:
            raise CopyRefusedError(
                f"{self._engine}: the KV region of GPU {min(missing)} is not mapped on GPU {self._gpu}; "
                f"send kv_map first"
            )
        marks = Marks(
            [self._begin(self._executor(plan.gpu, ahead), plan, after) for plan in plans if plan.gpu not in sent]
        )
        if self._staged is None:
            return Pulled(marks)
        return Pulled(marks, self._staged.begin([plan for plan in plans if plan.gpu in sent], after, ahead=ahead))

    @staticmethod
    def _begin(executor: DirectExecutor, plan: SourcePlan, after: Mark) -> Mark:
        prepared = executor.prepare(plan)
        executor.lane.after(after)
        return executor.launch(prepared)

    def _executor(self, source: int, ahead: bool) -> DirectExecutor:
        regions = {self._gpu: self._own, source: self._view(source)}
        if source not in self._lanes:
            self._lanes[source] = Lane(self._own.device)
        copier = self._copiers.ahead if ahead else self._copiers.now
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


def handles_of(regions: dict[str, object]) -> dict[int, KvHandle]:
    """The handles in a call's payload, by the deployment's GPU.

    Raises:
        msgspec.ValidationError: no such handles.
    """
    return msgspec.convert(regions, dict[int, KvHandle], strict=False)
