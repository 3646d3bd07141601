"""The router's end of the control socket when the server stops."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq
from router_fakes import World

from sglang_adapt.core import messages
from sglang_adapt.router.front_link import FrontLink
from sglang_adapt.router.layout_requests import LayoutQuestion
from sglang_adapt.router.sockets import make_socket


@pytest.mark.parametrize("ignores", [False, True])
def test_an_answer_that_comes_after_the_end_is_no_fault(ignores: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also of one who is in the middle of something that does not end by being cancelled."""
    faults: list[dict[str, object]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: faults.append(context))
        context = zmq.Context()
        asked, over = asyncio.Event(), asyncio.Event()

        async def layout(request: LayoutQuestion) -> messages.LayoutAnswer:
            asked.set()
            try:
                await over.wait()
            except asyncio.CancelledError:
                if not ignores:
                    raise
            return messages.LayoutAnswer(request.id, 200, {})

        async def drain(timeout_s: float) -> None:
            return None

        ours, front = (make_socket(context, zmq.PAIR, "inproc://control", bind) for bind in (True, False))
        link = FrontLink(loop, ours, [], layout, drain)
        link.router = World().router
        front.send(messages.encode(messages.LayoutRequest(1)))
        await asyncio.wait_for(asked.wait(), 5)
        tasks = list(link._asked)
        link.close()
        await asyncio.wait(tasks, timeout=5)
        link.send_status()
        assert [task.cancelled() for task in tasks] == [not ignores]
        assert ignores is False or tasks[0].exception() is None
        front.close()
        context.destroy(linger=0)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert (faults, caplog.records) == ([], [])
