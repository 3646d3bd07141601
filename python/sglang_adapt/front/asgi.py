"""Our ASGI layer around stock's HTTP app.

- `/adapt`: the live page (`live.py`).
- `/health`: liveness, without generating; `/ready`: 200 only when new work is admitted; `/adapt/engines`: the
  engines' states. `/health_generate` stays stock's, which generates a token.
- Work is refused with a 503 before it is read when the server drains or no engine is up.
- With tiers, `gate.py` decides about requests that generate, before they are tokenized.
- Every 503 carries Retry-After, stock's too, and errors of stock's have the form of ours (`error_form.py`).
- SIGTERM and Ctrl-C drain: no new work, what runs finishes, the engines stop, then the HTTP server ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

from sglang_adapt.core.messages import RouterStatus, no_engine_is_up
from sglang_adapt.front.early import EarlyRefusals
from sglang_adapt.front.error_form import body_of, formed
from sglang_adapt.front.errors import RETRY_AFTER_S, Refusal
from sglang_adapt.front.gate import Admitted, Gate
from sglang_adapt.front.link import RouterLink
from sglang_adapt.front.live import PAGE, PAGE_HEADERS, PAGE_PATH
from sglang_adapt.front.refusal_log import keep_out_of_access_log, refusing
from sglang_adapt.front.tier_told import TIER_IN_BODY, tier_told
from sglang_adapt.upstream.early_answers import EarlyAnswer
from sglang_adapt.upstream.tickets import ticket

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STOP_GRACE_S = 20.0
"""How long the engines may take to stop after the last request has ended; the router kills them after 15 s."""

_WORK_PREFIXES = ("/v1/", "/api/")
_WORK_PATHS = frozenset(("/generate", "/encode", "/classify", "/invocations", "/vertex_generate", "/rerank", "/score"))
_GENERATING = frozenset(
    (
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/generate",
        "/api/chat",
        "/invocations",
        "/vertex_generate",
    )
)
"""Work that has a first token and later ones, and so can have targets."""
_NOT_WORK = frozenset(("/v1/models", "/v1/loads", "/v1/tokenize", "/v1/detokenize"))


_OURS = frozenset((PAGE_PATH, "/health", "/ready", "/adapt/engines"))
"""What is answered here, to GET and HEAD."""


class RouterProcess(Protocol):
    """The router's process, as far as draining needs it."""

    def is_alive(self) -> bool: ...


class AdaptLayer:
    """The middleware; one instance a server.

    Args:
        app: stock's app.
        link: what the router says.
        drain_timeout_s: how long running requests may take once the server drains.
        router: returns the router's process.
        start_receiving: makes the tokenizer manager receive (and take over signals, which are then taken back).
        gate: decides about requests by their tiers; None without tiers.
        early: tells refusals that the gate remembers before requests come here; None: all come here.
        reload: reads the tiers again, upon SIGHUP.
        started: called when the HTTP server is about to listen.
        stopping: called when the drain is over; ends what would else go on for ever.
        stopped: called when the HTTP server has stopped, or could not listen.
    """

    def __init__(
        self,
        app: App,
        link: RouterLink,
        drain_timeout_s: float,
        router: Callable[[], RouterProcess],
        start_receiving: Callable[[], None],
        gate: Gate | None = None,
        early: EarlyRefusals | None = None,
        reload: Callable[[], Awaitable[Any]] | None = None,
        started: Callable[[], None] = lambda: None,
        stopping: Callable[[], None] = lambda: None,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._link = link
        self._drain_timeout_s = drain_timeout_s
        self._router = router
        self._start_receiving = start_receiving
        self._gate = gate
        self._early = early
        self._reload = reload
        self._started = started
        self._stopping = stopping
        self._stopped = stopped
        self._reloads: set[asyncio.Future[Any]] = set()
        self._working = 0
        self._seen_to_serve: RouterStatus | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stop_server: Callable[..., Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, self._ending(receive), self._starting(send))
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _starting(self, send: Send) -> Send:
        async def wrapped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._link.open()
                self._take_signals()
                self._started()
                if self._gate is not None:
                    keep_out_of_access_log()
                if self._early is not None:
                    self._early.begin(lambda: self._refusal() is None)
            await send(message)

        return wrapped

    def _ending(self, receive: Receive) -> Receive:
        async def wrapped() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._stopped()
            return message

        return wrapped

    def _take_signals(self) -> None:
        """Take SIGTERM and Ctrl-C from uvicorn, and keep uvicorn's own handler for the end of the drain."""
        handler = signal.getsignal(signal.SIGTERM)
        if not callable(handler):
            raise RuntimeError(f"uvicorn has not installed its SIGTERM handler (found {handler})")
        self._stop_server = handler
        self._start_receiving()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._start_drain)
        if self._reload is not None:
            loop.add_signal_handler(signal.SIGHUP, self._start_reload)

    def _start_reload(self) -> None:
        assert self._reload is not None
        if self._draining is not None:
            logger.info("the tiers are not read again: the server is shutting down")
            return
        task = asyncio.ensure_future(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def _start_drain(self) -> None:
        if self._draining is None:
            logger.info("shutting down: %d requests to finish", self._working)
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._link.drain(self._drain_timeout_s)
        deadline = time.monotonic() + self._drain_timeout_s + STOP_GRACE_S
        told = False
        while self._router().is_alive():
            if not self._working and not told:
                await self._link.no_more()
                told = True
            if time.monotonic() > deadline:
                # The first process ends what is left once this one has ended.
                logger.error(
                    "the router has not stopped %.0f s after --adapt-drain-timeout (%.0f s); its processes are killed",
                    STOP_GRACE_S,
                    self._drain_timeout_s,
                )
                break
            await asyncio.sleep(0.02)
        # The router has ended every request; give the answers a moment to be written.
        for _ in range(100):
            if not self._working:
                break
            await asyncio.sleep(0.05)
        self._stopping()
        self._link.close()
        assert self._stop_server is not None
        self._stop_server(signal.SIGTERM, None)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        if scope["method"] in ("GET", "HEAD"):
            if path == "/health":
                status, body = self._health()
                await _answer(send, status, body)
                return
            if path == "/ready":
                refusal = self._refusal()
                body = {"ready": refusal is None, "reason": None if refusal is None else refusal.message}
                await _answer(send, 200 if refusal is None else 503, body)
                return
            if path == PAGE_PATH:
                length = (b"content-length", str(len(PAGE)).encode())
                await send({"type": "http.response.start", "status": 200, "headers": [*PAGE_HEADERS, length]})
                await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else PAGE})
                return
            if path == "/adapt/engines":
                status_now = await self._link.ask()
                body = {"layout": None, "engines": []} if status_now is None else _engines(status_now)
                await _answer(send, 200 if status_now is not None else 503, body)
                return
        elif path in _OURS:
            await _respond(send, 405, body_of(405, {"message": "Method Not Allowed"}, path), allow=b"GET, HEAD")
            return
        if not _is_work(scope["method"], path):
            if path == "/metrics":
                scope = _as_plain_text(scope)
            await self._app(scope, receive, formed(send, path))
            return
        refusal = self._refusal()
        if refusal is not None:
            await _refuse(send, refusal.told(path))
            return
        self._working += 1
        try:
            if self._gate is None or path not in _GENERATING:
                await self._app(scope, receive, formed(_with_retry_after(send), path))
            else:
                await self._through_gate(self._gate, path, scope, receive, send)
        finally:
            self._working -= 1

    async def _through_gate(self, gate: Gate, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        read: list[MutableMapping[str, Any]] = []
        while not read or read[-1].get("more_body", False):
            read.append(await receive())
            if read[-1]["type"] == "http.disconnect":
                return
        body = b"".join(message.get("body", b"") for message in read)
        if self._early is not None:
            self._early.came_in(scope["path"], scope["headers"])
        decided = await gate.enter(scope["headers"], body)
        if not isinstance(decided, Admitted):
            if decided.status == 429:
                refusing()
            await _refuse(send, decided.told(path))
            return
        messages = iter(read)

        async def again() -> MutableMapping[str, Any]:
            return next(messages, None) or await receive()

        send = formed(tier_told(_with_retry_after(send), decided.terms.tier, in_body=path in TIER_IN_BODY), path)
        with ticket(decided.request) as admitted:
            try:
                await self._app(scope, again, send)
            finally:
                if not admitted.used:
                    await gate.left(decided.request)

    def _refusal(self) -> Refusal | None:
        """Why new work is not admitted now, or None."""
        if self._draining is not None:
            return Refusal(503, "draining", "the server is shutting down; send the request to another one")
        status = self._link.status
        if status is None:
            return Refusal(503, "no_engine", "the router does not answer; the server is starting or broken")
        if not self._serves(status):
            active = [engine for engine in status.engines if engine.active]
            if all(engine.state == "failed" for engine in active):
                text = f"the server has given up all engines of layout {status.layout}, which died too often"
                return Refusal(503, "no_engine", f"{text}; its log says why; start the server again")
            return Refusal(503, "no_engine", no_engine_is_up(status.layout))
        return None

    def _serves(self, status: RouterStatus) -> bool:
        """Whether an engine of the layout is up; asked for each refusal, so looked up once a status."""
        if status is not self._seen_to_serve and any(
            engine.active and engine.state == "ready" for engine in status.engines
        ):
            self._seen_to_serve = status
        return status is self._seen_to_serve

    def _health(self) -> tuple[int, dict[str, Any]]:
        """200 while requests can be served; `degraded` names engines that are down. A drain is not healthy."""
        refusal = self._refusal()
        status = self._link.status
        body = {"layout": None, "engines": []} if status is None else _engines(status)
        if refusal is not None:
            return 503, {"status": refusal.code, "message": refusal.message, **body}
        down = [] if status is None else [engine.name for engine in status.engines if engine.state != "ready"]
        return 200, {"status": "degraded" if down else "ok", "down": down, **body}


def _engines(status: RouterStatus) -> dict[str, Any]:
    return {
        "layout": status.layout,
        "engines": [
            {
                "name": engine.name,
                "state": engine.state,
                "active": engine.active,
                "role": engine.role,
                "in_flight": engine.in_flight,
                "restarts": engine.restarts,
                "pids": engine.pids,
                "last_death": engine.last_death,
                "leased_blocks": engine.leased_blocks,
                "free_blocks": engine.free_blocks,
            }
            for engine in status.engines
        ],
    }


def _is_work(method: str, path: str) -> bool:
    if method != "POST" or path in _NOT_WORK:
        return False
    return path in _WORK_PATHS or path.startswith(_WORK_PREFIXES)


def _as_plain_text(scope: Scope) -> Scope:
    """The same request for Prometheus' text format.

    In OpenMetrics, which Prometheus before 3.0 asks for first, `prometheus_client` writes `sglang_x` for `sglang:x`.
    """
    headers = [(name, value) for name, value in scope["headers"] if name != b"accept"]
    return {**scope, "headers": [*headers, (b"accept", b"text/plain; version=0.0.4")]}


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await _respond(send, status, json.dumps(body).encode())


async def _refuse(send: Send, answer: EarlyAnswer) -> None:
    await _send(send, answer.status, answer.headers, answer.body)


async def _respond(send: Send, status: int, body: bytes, allow: bytes | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if allow is not None:
        headers.append((b"allow", allow))
    await _send(send, status, headers, body)


async def _send(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


def _with_retry_after(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 503:
            headers = list(message.get("headers", ()))
            if not any(name.lower() == b"retry-after" for name, _ in headers):
                headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
            message = {**message, "headers": headers}
        await send(message)

    return wrapped
