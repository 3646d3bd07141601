"""The receiving end of staged copies, in a rank: one thread, which asks one GPU after the other for its part.

The rank's own thread never waits for it unless it wants to: what has begun is a `Delivery`, which tells when it has
ended, and whether it has failed. A source that is gone, or silent, fails the delivery and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue

import torch

from sglang_adapt.kv.copiers import Copiers
from sglang_adapt.kv.copy import CopyError
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import Mark
from sglang_adapt.kv.plan import SourcePlan
from sglang_adapt.kv.staged import StagedReceiver
from sglang_adapt.kv.staged_handle import Order, StagedHandle
from sglang_adapt.kv.staging import halves
from sglang_adapt.kv.transfer import TransferError, pin, unpin
from sglang_adapt.memory import Region, SharedMemoryError, attach

logger = logging.getLogger(__name__)

RECEIVER_TIMEOUT_S = 25.0
"""The longest wait for a sender: its own for another receiver, which may have the buffers first, and a little more."""


class Delivery:
    """Copies that have been asked for.

    Attributes:
        fault: why they have failed, once they have ended; None if they have not.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self.fault: str | None = None

    @property
    def ended(self) -> bool:
        """Nothing is copied any more."""
        return self._over.is_set()

    def wait(self) -> None:
        """Until it has ended; it always does, since every wait in it is bounded."""
        self._over.wait()

    def end(self, fault: str | None) -> None:
        self.fault = fault
        self._over.set()


@dataclass(slots=True)
class _Source:
    """A GPU whose KV can be asked for.

    Attributes:
        link: its link buffers, mapped here.
        channel: to its sender; None until it is needed, and after a failure.
    """

    handle: StagedHandle
    link: Region
    channel: Connection | None = None

    def call(self) -> Connection:
        if self.channel is None:
            self.channel = Client(self.handle.address, "AF_UNIX")
        return self.channel

    def hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


@dataclass(frozen=True, slots=True)
class _Job:
    plans: Sequence[SourcePlan]
    after: Mark
    ahead: bool
    delivery: Delivery


@dataclass(slots=True)
class StagedClient:
    """See the module.

    Attributes:
        geometry, gpu: the pool and this rank's GPU.
        region: this GPU's.
        copiers: that write to it.
        timeout_s: the longest wait for a sender.
    """

    geometry: PoolGeometry
    gpu: int
    region: torch.Tensor
    copiers: Copiers
    timeout_s: float = RECEIVER_TIMEOUT_S
    _sources: dict[int, _Source] = field(default_factory=dict, init=False)
    _jobs: SimpleQueue[_Job] = field(default_factory=SimpleQueue, init=False)
    _buffers: list[torch.Tensor] = field(default_factory=list, init=False)
    _works: bool = field(default=False, init=False)

    @property
    def gpus(self) -> set[int]:
        """Those whose KV can be asked for."""
        return set(self._sources)

    def open(self, gpu: int, handle: StagedHandle) -> None:
        """Know a GPU's sender; the one that was known before is gone. Raises MemoryGoneError, SharedMemoryError."""
        there = self._sources.get(gpu)
        if there is not None and there.handle == handle:
            return
        on_gpu = self.region.device.type == "cuda"
        link = attach(handle.link, "write" if on_gpu else "read")
        if on_gpu:
            # The kernel that scatters does not read host memory: what arrives goes to the GPU first.
            try:
                pin(link.tensor)
            except TransferError as error:
                raise SharedMemoryError(f"the buffers by which KV of GPU {gpu} comes: {error}") from error
            if not self._buffers:
                self._buffers = [
                    torch.zeros(half.nbytes, dtype=torch.uint8, device=self.region.device)
                    for half in halves(link.tensor)
                ]
            if there is not None:
                unpin(there.link.tensor)
        self._sources[gpu] = _Source(handle, link)

    def begin(self, plans: Sequence[SourcePlan], after: Mark, *, ahead: bool) -> Delivery:
        """Ask for the parts of these plans that go to this GPU, which may be written to from a mark on.

        Args:
            plans: of GPUs that are known, with this one as their destination.
            ahead: as in `Order`.
        """
        delivery = Delivery()
        if not plans:
            delivery.end(None)
            return delivery
        # Each rank begins with its neighbour, so that not all ask the same GPU first.
        ordered = sorted(plans, key=lambda plan: (plan.gpu - self.gpu) % (1 + max(self._sources)))
        self._jobs.put(_Job(ordered, after, ahead, delivery))
        if not self._works:
            self._works = True
            threading.Thread(target=self._work, name=f"kv_in_{self.gpu}", daemon=True).start()
        return delivery

    def _work(self) -> None:
        if self.region.device.type == "cuda":
            torch.cuda.set_device(self.region.device)
        while True:
            job = self._jobs.get()
            try:
                for plan in job.plans:
                    self._fetch(plan, job)
            except Exception as error:  # noqa: BLE001 -- whatever it is, who waits has to know
                logger.error("KV has not arrived on GPU %d: %s", self.gpu, error)
                job.delivery.end(f"{type(error).__name__}: {error}")
            else:
                job.delivery.end(None)

    def _fetch(self, plan: SourcePlan, job: _Job) -> None:
        source = self._sources[plan.gpu]
        try:
            channel = source.call()
            channel.send(Order(plan, job.ahead))
            receiver = StagedReceiver(
                self.geometry,
                self.gpu,
                self.region,
                halves(source.link.tensor),
                self._buffers or None,
                self.copiers.ahead if job.ahead else self.copiers.now,
                channel,
                self.timeout_s,
            )
            receiver.run(plan, job.after)
        except OSError as error:
            source.hang_up()
            raise CopyError(f"the KV of GPU {plan.gpu} has not come, who sends it is gone ({error})") from error
        except CopyError as error:
            # What the sender still says would be taken for the answer to the next order.
            source.hang_up()
            raise CopyError(f"the KV of GPU {plan.gpu} has not come: {error}") from error
        except Exception:
            source.hang_up()
            raise
