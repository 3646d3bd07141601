"""The front's end of the control socket: the router's latest status, and requests to the router."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from sglang_adapt.core import messages
from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest, LayoutAnswer, RequestReport, RouterStatus
from sglang_adapt.core.slo import SloConfig

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", AdmitAnswer, LayoutAnswer)

LAYOUT_TIMEOUT_S = 40.0
"""How long the engines may take to say what they have: longer than the router waits for each."""
SILENT_AFTER_S = 5.0
"""The router sends its status every second; after this long without one it counts as silent."""
_TICK_S = 0.5
"""So often this process counts how long it has not heard of the router: time in which it did not run itself, as on a
machine that was suspended, says nothing of the router."""


class LinkClosedError(RuntimeError):
    """The server has stopped: the router is gone, and answers nothing that it was asked."""


class RouterLink:
    """Receives `RouterStatus` in the background.

    Args:
        endpoint: where to listen; the router connects.
        on_report: told how each request with a tier has ended.
        on_status: told each status.
    """

    def __init__(
        self,
        endpoint: str,
        on_report: Callable[[RequestReport], None] = lambda report: None,
        on_status: Callable[[RouterStatus], None] = lambda status: None,
    ) -> None:
        self._on_report = on_report
        self._on_status = on_status
        self._admissions: dict[int, asyncio.Future[AdmitAnswer]] = {}
        self._endpoint = endpoint
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._status: RouterStatus | None = None
        self._silent_s = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._heard = asyncio.Event()
        self._ids = itertools.count(1)
        self._layout_answers: dict[int, asyncio.Future[LayoutAnswer]] = {}

    def open(self) -> None:
        """Start receiving on the running event loop."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)
        self._task = asyncio.get_running_loop().create_task(self._receive(self._socket))
        self._tick(time.monotonic())

    def close(self) -> None:
        """The router has ended: whoever waits for an answer, or asks from now on, is told so."""
        if self._socket is None or self._task is None:
            return
        self._task.cancel()
        if self._ticking is not None:
            self._ticking.cancel()
        self._socket.close(linger=0)
        self._socket = None
        waiting: list[asyncio.Future[Any]] = [*self._layout_answers.values(), *self._admissions.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(_closed())
                # Known, also if its asker is still sending.
                future.exception()

    def _not_heard(self, elapsed_s: float) -> None:
        self._silent_s += min(elapsed_s, 2 * _TICK_S)

    def _tick(self, before_s: float) -> None:
        now_s = time.monotonic()
        self._not_heard(now_s - before_s)
        self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick, now_s)

    async def _send(self, message: messages.FrontToRouter) -> None:
        """Raises LinkClosedError."""
        if self._socket is None:
            raise _closed()
        try:
            await self._socket.send(messages.encode(message))
        except asyncio.CancelledError:
            # Closing the socket cancels what waits for it.
            if self._socket is None:
                raise _closed() from None
            raise

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = messages.decode_router_to_front(await socket.recv())
            if isinstance(message, LayoutAnswer):
                future = self._layout_answers.pop(message.id, None)
                if future is not None and not future.done():
                    future.set_result(message)
                continue
            if isinstance(message, AdmitAnswer):
                waiting = self._admissions.pop(message.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                continue
            if isinstance(message, RequestReport):
                self._on_report(message)
                continue
            self._status = message
            self._silent_s = 0.0
            self._on_status(message)
            self._heard.set()

    @property
    def status(self) -> RouterStatus | None:
        """The router's last status; None before the first and when the router has been silent too long."""
        return None if self._silent_s > SILENT_AFTER_S else self._status

    async def ask(self) -> RouterStatus | None:
        """The router's status as it is now; None if it does not answer in `SILENT_AFTER_S`, or has ended."""
        self._heard.clear()
        try:
            await self._send(messages.StatusRequest())
            await asyncio.wait_for(self._heard.wait(), SILENT_AFTER_S)
        except (TimeoutError, LinkClosedError):
            return None
        return self._status

    async def admit(self, request: AdmitRequest) -> AdmitAnswer:
        """Whether a request will be served. Raises TimeoutError, LinkClosedError."""
        return await self._answer_to(request, self._admissions, SILENT_AFTER_S)

    async def give_back(self, request_id: int) -> None:
        """An admitted request has gone without being tokenized; once the router has ended, nobody needs to know."""
        with suppress(LinkClosedError):
            await self._send(messages.PlaceReturned(request_id))

    async def set_tiers(self, config: SloConfig) -> None:
        """Give the router other tiers. Raises LinkClosedError."""
        await self._send(messages.TiersOrder(config))

    async def layout(self) -> LayoutAnswer:
        """The layout, read back from the engines. Raises TimeoutError, LinkClosedError."""
        return await self._answer_to(messages.LayoutRequest(next(self._ids)), self._layout_answers, LAYOUT_TIMEOUT_S)

    async def switch(self, layout: str, strategy: str, reason: str) -> LayoutAnswer:
        """Go over to a layout; returns when it is done or refused. The router limits how long that takes.

        Raises LinkClosedError: it ended meanwhile.
        """
        request = messages.SwitchRequest(next(self._ids), layout, strategy, reason)
        return await self._answer_to(request, self._layout_answers, None)

    async def plan(self, rates: dict[str, float] | None) -> LayoutAnswer:
        """What the planner would do at these rates, or now. Raises TimeoutError, LinkClosedError."""
        return await self._answer_to(
            messages.PlanRequest(next(self._ids), rates), self._layout_answers, LAYOUT_TIMEOUT_S
        )

    async def view(self) -> LayoutAnswer:
        """What the live page shows. Raises TimeoutError, LinkClosedError."""
        return await self._answer_to(messages.ViewRequest(next(self._ids)), self._layout_answers, SILENT_AFTER_S)

    async def _answer_to(
        self,
        request: messages.SwitchRequest
        | messages.LayoutRequest
        | messages.PlanRequest
        | messages.ViewRequest
        | AdmitRequest,
        waiting: dict[int, asyncio.Future[Answer]],
        timeout_s: float | None,
    ) -> Answer:
        """Send a request that has an id, and wait among `waiting` for its answer.

        Raises:
            TimeoutError: it has not come in time.
            LinkClosedError: it will not come.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting[request.id] = future
        try:
            await self._send(request)
            return await asyncio.wait_for(future, timeout_s)
        finally:
            waiting.pop(request.id, None)

    async def drain(self, timeout_s: float) -> None:
        """Tell the router to finish its requests within `timeout_s`, stop the engines and exit."""
        await self._send(messages.DrainRequest(timeout_s))

    async def no_more(self) -> None:
        """Tell the router, which drains, that no request comes any more."""
        await self._send(messages.NoMoreRequests())


def _closed() -> LinkClosedError:
    return LinkClosedError("the server is shutting down; send the request to another one")
