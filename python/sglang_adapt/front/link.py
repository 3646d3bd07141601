"""The front's end of the control socket: the router's latest status, and requests to the router."""

from __future__ import annotations

import asyncio
import logging
import time

import zmq
import zmq.asyncio

from sglang_adapt.core import messages
from sglang_adapt.core.messages import RouterStatus

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 5.0
"""The router sends its status every second; after this long without one it counts as silent."""


class RouterLink:
    """Receives `RouterStatus` in the background.

    Args:
        endpoint: where to listen; the router connects.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._status: RouterStatus | None = None
        self._heard_at = 0.0
        self._heard = asyncio.Event()

    def open(self) -> None:
        """Start receiving on the running event loop."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)
        self._task = asyncio.get_running_loop().create_task(self._receive(self._socket))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._status = messages.decode_router_to_front(await socket.recv())
            self._heard_at = time.monotonic()
            self._heard.set()

    @property
    def status(self) -> RouterStatus | None:
        """The router's last status; None before the first and when the router has been silent too long."""
        if self._status is not None and time.monotonic() - self._heard_at > SILENT_AFTER_S:
            return None
        return self._status

    async def ask(self) -> RouterStatus | None:
        """The router's status as it is now; None if it does not answer in `SILENT_AFTER_S`."""
        assert self._socket is not None
        self._heard.clear()
        await self._socket.send(messages.encode(messages.StatusRequest()))
        try:
            await asyncio.wait_for(self._heard.wait(), SILENT_AFTER_S)
        except TimeoutError:
            return None
        return self._status

    async def drain(self, timeout_s: float) -> None:
        """Tell the router to finish its requests within `timeout_s`, stop the engines and exit."""
        assert self._socket is not None
        await self._socket.send(messages.encode(messages.DrainRequest(timeout_s)))
