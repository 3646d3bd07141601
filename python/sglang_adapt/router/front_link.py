"""The router's end of the control socket: what the front asks and orders, and what it is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import zmq

from sglang_adapt.core import messages
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.layout_requests import LAYOUT_QUESTIONS, LayoutQuestion
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.sockets import Inbox
from sglang_adapt.router.status import status_of

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
"""How often the router tells the front that it lives."""


class FrontLink:
    """See the module. `router` is to be set before the event loop runs on.

    Args:
        loop: the router's event loop.
        socket: to the front.
        specs: all engines.
        layout: answers what is asked about the layout.
        drain: called with the time that requests have, once.
        ticked: called each time that the state is told over again.

    Attributes:
        router: what is asked about.
        pools: the KV blocks that the status tells of; None with a single TP size.
    """

    router: Router
    pools: Pools | None = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket,
        specs: Sequence[EngineSpec],
        layout: Callable[[LayoutQuestion], Awaitable[messages.LayoutAnswer]],
        drain: Callable[[float], Awaitable[None]],
        ticked: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._inbox = Inbox(loop, socket, self._on_message)
        self._specs = specs
        self._layout = layout
        self._drain = drain
        self._ticked = ticked
        self._draining: asyncio.Future[None] | None = None
        self._asked: set[asyncio.Task[None]] = set()

    def _on_message(self, data: bytes) -> None:
        request = messages.decode_front_to_router(data)
        if isinstance(request, messages.StatusRequest):
            self.send_status()
        elif isinstance(request, LAYOUT_QUESTIONS):
            task = self._loop.create_task(self._answer_layout(request))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        elif isinstance(request, messages.AdmitRequest):
            self._tell(self._admit(request), "the answer about a request")
        elif isinstance(request, messages.PlaceReturned):
            if self.router.admission is not None:
                self.router.admission.give_back(request.id)
        elif isinstance(request, messages.TiersOrder):
            if self.router.admission is not None:
                self.router.admission.reload(request.config)
        elif isinstance(request, messages.NoMoreRequests):
            self.router.closed = True
        elif self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(request.timeout_s))

    def _admit(self, request: messages.AdmitRequest) -> messages.AdmitAnswer:
        """Whether a request will be served."""
        if self.router.admission is None:
            return messages.AdmitAnswer(request.id, True)
        if not self.router.accepting:
            return messages.AdmitAnswer(request.id, False, reason="the server is shutting down", draining=True)
        return self.router.ask(request)

    async def _answer_layout(self, request: LayoutQuestion) -> None:
        self._tell(await self._layout(request), "an answer about the layout")

    def send_report(self, report: messages.RequestReport) -> None:
        """Tell how a request with a tier has ended."""
        self._tell(report, f"the report of request {report.rid}")

    def send_status(self) -> None:
        """Tell the state of all engines."""
        if self.pools is not None:
            for spec in self._specs:
                self.router.engines[spec.name].blocks = self.pools.counts(spec)
        self._tell(status_of(self.router), "the status", logging.DEBUG)

    def _tell(self, message: messages.RouterToFront, what: str, level: int = logging.WARNING) -> None:
        """Send, if anybody listens; after `close` the front has told whoever waits that the server stops.

        Args:
            message: to the front.
            what: it is, for the log.
            level: of the log where the front does not listen; it does not yet when the server starts.
        """
        if self._inbox.closed:
            logger.debug("the server stops; %s is not sent", what)
            return
        try:
            self._inbox.send(messages.encode(message))
        except zmq.Again:
            logger.log(level, "the front takes no messages; %s is lost", what)

    async def tick(self) -> None:
        """Tell the state over and over."""
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.send_status()
            self._ticked()

    def close(self) -> None:
        """Read and send no more. What was asked about the layout and has no answer yet is given up."""
        for task in self._asked:
            task.cancel()
        self._inbox.close()
