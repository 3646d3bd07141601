"""Sockets on an event loop."""

from __future__ import annotations

import asyncio
import select
import time

import zmq

from sglang_adapt.router.sockets import Inbox, make_socket


def test_a_message_that_came_in_while_sending_is_read() -> None:
    """Sending takes in zmq's note of it, after which the file descriptor stays silent for ever."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        context = zmq.Context()
        ours, peer = (make_socket(context, zmq.PAIR, "inproc://pair", bind) for bind in (True, False))
        got: asyncio.Future[bytes] = loop.create_future()
        inbox = Inbox(loop, ours, got.set_result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        peer.send(b"hello")
        # Without giving the loop a turn: send until nothing is left to be read from the file descriptor.
        deadline = time.monotonic() + 5
        readable = select.poll()
        readable.register(ours.getsockopt(zmq.FD), select.POLLIN)
        while readable.poll(0):
            assert time.monotonic() < deadline
            inbox.send(b"status")
        try:
            return await asyncio.wait_for(got, 5)
        finally:
            inbox.close()
            peer.close()
            context.destroy(linger=0)

    assert asyncio.run(run()) == b"hello"
