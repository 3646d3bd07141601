"""The sending end of staged copies of one GPU's KV, in the process that owns its region.

Whoever needs the KV connects and sends an `Order`; the receiver's end of `staged` follows on the same connection. So a
copy depends on no engine that has had the KV, as with peer access. One order at a time is carried out, since all have
the same buffers: what leads out of the GPU is full with one.
"""

from __future__ import annotations

import logging
import socket
import threading
from multiprocessing.connection import Connection

import torch

from sglang_adapt.kv.copiers import copiers_of
from sglang_adapt.kv.copy import CopyError
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.staged import BUFFERS, StagedSender
from sglang_adapt.kv.staged_handle import Order, StagedHandle
from sglang_adapt.kv.staging import halves
from sglang_adapt.kv.transfer import pin
from sglang_adapt.memory import HostHandle, Region

logger = logging.getLogger(__name__)

SENDER_TIMEOUT_S = 20.0
"""The longest wait for a receiver to drain a chunk."""


_BACKLOG = 64
"""More ranks than ask at the same time."""


class StagedServer:
    """Serves from its construction on, in threads, until it is closed or its process ends.

    Args:
        name: of the GPU, for the log.
        geometry: shapes of the region.
        region: the GPU's KV.
        link: host memory for the two link buffers.
        address: path of the Unix socket to make, in a folder that is private.
        timeout_s: the longest wait for a receiver to drain a chunk.

    Attributes:
        handle: for the receivers.
    """

    def __init__(
        self,
        name: str,
        geometry: PoolGeometry,
        region: Region,
        link: Region,
        address: str,
        timeout_s: float = SENDER_TIMEOUT_S,
    ) -> None:
        assert isinstance(link.handle, HostHandle), "the link buffers lie in host memory"
        self._name, self._geometry, self._timeout_s = name, geometry, timeout_s
        # Others attach to them for as long as these live.
        self._owned = (region, link)
        self._region = region.tensor[: geometry.region_bytes]
        self._device = self._region.device
        if self._device.type == "cuda":
            # Else it would be the context of GPU 0.
            with torch.cuda.device(self._device):
                pin(link.tensor)
        self._link = halves(link.tensor)
        self._buffers = [torch.zeros(half.nbytes, dtype=torch.uint8, device=self._device) for half in self._link]
        assert len(self._buffers) == BUFFERS
        self._copiers = copiers_of(self._device)
        self._turn = threading.Lock()
        self._closed = False
        # Not multiprocessing's Listener, which removes the file at the end of the process, when the folder may be gone.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self.handle = StagedHandle(address, link.handle)
        threading.Thread(target=self._accept, name=f"kv_out_{name}", daemon=True).start()

    def close(self) -> None:
        """Take no more receivers; those that are there are served."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                raise
            channel = Connection(accepted.detach())
            threading.Thread(target=self._serve, args=(channel,), name=f"kv_out_{self._name}", daemon=True).start()

    def _serve(self, channel: Connection) -> None:
        """Carry out the orders of one receiver until it is gone, or one fails."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with channel:
            while True:
                try:
                    order: Order = channel.recv()
                except (EOFError, OSError):
                    return
                try:
                    with self._turn:
                        self._sender(order, channel).run(order.plan)
                except CopyError as error:
                    logger.warning("%s: a copy of KV has broken off: %s", self._name, error)
                    return

    def _sender(self, order: Order, channel: Connection) -> StagedSender:
        copier = self._copiers.ahead if order.ahead else self._copiers.now
        gpu = order.plan.gpu
        return StagedSender(
            self._geometry, gpu, self._region, self._buffers, self._link, copier, channel, self._timeout_s
        )
