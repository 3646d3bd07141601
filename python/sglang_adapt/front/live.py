"""The live page: `GET /adapt` is the page, `GET /adapt/events` its data, as server-sent events.

While somebody looks, the router is asked once a second, whoever looks and however many they are; while nobody does,
not at all. A viewer that reads slowly misses snapshots and holds up nobody. The page itself has no data and needs no
key; the events are for those who may read `GET /adapt/layout`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from sglang_adapt.core.messages import LayoutAnswer
from sglang_adapt.front.layout_api import Answer, refuse
from sglang_adapt.front.link import LinkClosedError

logger = logging.getLogger(__name__)

PAGE_PATH = "/adapt"
EVENTS_PATH = "/adapt/events"
PAGE = (Path(__file__).parent / "page.html").read_bytes()
PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
INTERVAL_S = 1.0
MOST_VIEWERS = 32


class TooManyViewersError(RuntimeError):
    """As many look at the page as may."""


class Live:
    """One snapshot for all who look.

    Args:
        ask: the router's part of it. Raises TimeoutError, LinkClosedError.
        front: the front's part of it.
        interval_s: how often a snapshot is made.
        most: viewers at a time.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[LayoutAnswer]],
        front: Callable[[], dict[str, Any]],
        interval_s: float = INTERVAL_S,
        most: int = MOST_VIEWERS,
    ) -> None:
        self._ask = ask
        self._front = front
        self._interval_s = interval_s
        self._most = most
        self._viewers = 0
        self._event = b""
        self._next: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def viewers(self) -> int:
        """How many look now."""
        return self._viewers

    def look(self) -> AsyncIterator[bytes]:
        """Events for one viewer, from now until `close`.

        Raises:
            TooManyViewersError: later ones have to wait until somebody goes.
        """
        if self._viewers >= self._most:
            raise TooManyViewersError(f"{self._most} look at the page already; close one, or try again later")
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        if self._viewers >= self._most:
            # Many have asked in the same moment: the page asks again, and is told.
            return
        self._viewers += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._make())
            elif self._event:
                yield self._event
            while not self._closed:
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                # Others wait for the same one.
                await asyncio.shield(self._next)
                if self._closed or self._task.done():
                    return
                yield self._event
        finally:
            self._viewers -= 1

    async def _make(self) -> None:
        """Make snapshots for as long as somebody looks."""
        try:
            while self._viewers and not self._closed:
                said = json.dumps(await self._snapshot(), separators=(",", ":"))
                self._event = b"data: " + said.encode() + b"\n\n"
                self._wake()
                await asyncio.sleep(self._interval_s)
        except Exception:
            # Viewers' events end; their pages say so, and ask again.
            logger.exception("the live page's data could not be made")
        finally:
            self._event = b""
            asyncio.get_running_loop().call_soon(self._wake)

    async def _snapshot(self) -> dict[str, Any]:
        try:
            router = (await self._ask()).body
        except (TimeoutError, LinkClosedError):
            router = None
        return {"time": round(time.time(), 3), "router": router, **self._front()}

    def _wake(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)

    def close(self) -> None:
        """End all events: the server stops."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._wake()


def watching(live: Live) -> Callable[[], AsyncIterator[bytes] | Answer]:
    """The handler of `EVENTS_PATH`: events, or why there are none."""

    def handler() -> AsyncIterator[bytes] | Answer:
        try:
            return live.look()
        except TooManyViewersError as error:
            return refuse(503, "too_many_viewers", str(error))

    return handler
