"""zmq sockets driven by an asyncio event loop, without a coroutine a message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)


class Inbox:
    """Calls `handler(message)` for every message of a receiving socket.

    zmq signals its file descriptor on the edge only, so each wake-up reads until the socket is empty; after
    `burst` messages it gives the loop a turn, so that one busy socket cannot starve the others.

    A socket that is also sent on must be sent on through `send`: sending takes in zmq's note that a message has
    come, so that the file descriptor never signals again.

    A handler that raises costs its message only: it is logged with its traceback.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket, handler: Callable[[bytes], None], burst: int = 256
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._handler = handler
        self._burst = burst
        self._fd = int(socket.getsockopt(zmq.FD))
        self._closed = False
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)

    def _drain(self) -> None:
        receive, handler = self._socket.recv, self._handler
        for _ in range(self._burst):
            if self._closed:
                return
            try:
                message = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                handler(message)
            except Exception:
                logger.exception("a message of %d bytes could not be handled", len(message))
        self._loop.call_soon(self._drain)

    @property
    def closed(self) -> bool:
        """Has it been closed?"""
        return self._closed

    def send(self, message: bytes) -> None:
        """Send without waiting, and look for what has come in meanwhile.

        Raises:
            zmq.Again: nobody is connected.
        """
        try:
            self._socket.send(message, zmq.NOBLOCK)
        finally:
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop reading and close the socket."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def make_socket(context: zmq.Context, kind: int, endpoint: str, bind: bool) -> zmq.Socket:
    """A socket without a high-water mark: what may be in flight is bounded by admission, not by zmq."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
    return socket
