"""Answers some requests when their last byte has been read, before an ASGI task is made of them.

uvicorn makes a task of each request, which passes ten layers of middleware before ours sees it. For a refusal that is
known beforehand that is most of what it costs; most of the rest is to read the head, which clients send alike each time
(`known_heads.py`). So our protocol is uvicorn's httptools one, but of a POST whose whole body came with the bytes just
read it first asks an `Answerer`; what that does not answer goes on as ever. An answer is the same bytes as by the long
way. Written for uvicorn 0.54.0 (uvicorn/protocols/http/httptools_impl.py), which pyproject.toml pins.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sglang_adapt.upstream.known_heads import Head, KnownHeads, head_of
from sglang_adapt.upstream.patch import Patch, PatchError


@dataclass(frozen=True, slots=True, eq=False)
class EarlyAnswer:
    """An answer as it is sent, but for what the server adds to each (date, server).

    Attributes:
        status: of HTTP.
        headers: lower-case names; content-length is among them.
        body: whole.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Answerer(Protocol):
    """Who may answer early. To be called on the event loop; neither may wait."""

    @property
    def active(self) -> bool:
        """Whether it is worth asking now."""
        ...

    def answer(self, head: Head, body: bytes | bytearray) -> EarlyAnswer | None:
        """The answer to a POST, or None if the request goes its usual way."""
        ...


class _Rendered:
    """Answers as bytes; made anew when the server's own headers change, which have the time in seconds."""

    def __init__(self) -> None:
        self._server: list[tuple[bytes, bytes]] = []
        self._known: dict[EarlyAnswer, bytes] = {}

    def of(self, answer: EarlyAnswer, server: list[tuple[bytes, bytes]]) -> bytes:
        if server is not self._server:
            self._server, self._known = server, {}
        found = self._known.get(answer)
        if found is None:
            lines = [b"%s: %s\r\n" % header for header in (*server, *answer.headers)]
            found = self._known[answer] = b"".join((STATUS_LINE[answer.status], *lines, b"\r\n", answer.body))
        return found


class EarlyAnswersProtocol(HttpToolsProtocol):
    """See the module. `use_early_answers` gives it its answerer."""

    answerer: Answerer | None = None
    _heads = KnownHeads()
    _rendered = _Rendered()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between = True
        """Nothing has been read of a request that is not read to its end."""
        self._reading: bytes | None = None
        """What is being read, from between two requests on; else, and further on, None."""
        self._held: tuple[RequestResponseCycle, Any] | None = None
        """A request whose task is not made yet; only while bytes are being read."""
        self._answered_at = 0.0

    def data_received(self, data: bytes) -> None:
        if self.answerer is None or not self.answerer.active or not self._is_free():
            super().data_received(data)
            return
        found = self._heads.whole(data)
        if found is not None and (answer := self.answerer.answer(*found)) is not None:
            self._write(answer)
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            self._answered_at = self.loop.time()
            return
        self._reading = data
        try:
            super().data_received(data)
        finally:
            self._reading = None
            if self._held is not None:
                # The rest of its body is still to come.
                self._go_on()

    def _is_free(self) -> bool:
        """The next byte begins a request, which may be answered at once."""
        return (
            self._between
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self.transport.is_closing()
        )

    def timeout_keep_alive_handler(self) -> None:
        # Answers to known heads do not set the clock anew each time.
        left = self._answered_at + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if (
            self._reading is not None
            and cycle.scope["method"] == "POST"
            and cycle.keep_alive
            and not cycle.waiting_for_100_continue
            and not self.parser.should_upgrade()
            and app is self.app
        ):
            self._held = (cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # What follows an upgrade is not HTTP/1.1.
        self._between = not self.parser.should_upgrade()
        data, self._reading = self._reading, None
        if self._held is None:
            return
        cycle, _ = self._held
        scope = cycle.scope
        head = head_of(scope["path"], scope["headers"])  # type: ignore[arg-type]
        assert self.answerer is not None and data is not None
        answer = self.answerer.answer(head, cycle.body)
        if answer is None:
            self._go_on()
            return
        self._held = None
        self._heads.add(data, head, scope["headers"], len(cycle.body))  # type: ignore[arg-type]
        cycle.response_started = cycle.response_complete = True
        cycle.on_response = _nothing
        self._write(answer)
        self.on_response_complete()
        self.server_state.total_requests -= 1

    def _write(self, answer: EarlyAnswer) -> None:
        self.transport.write(self._rendered.of(answer, self.server_state.default_headers))
        self.server_state.total_requests += 1

    def _go_on(self) -> None:
        assert self._held is not None
        cycle, app = self._held
        self._held = None
        super()._start_asgi_task(cycle, app)


def _nothing() -> None:
    """What a cycle calls at its end once all has been done."""


class ReadByOurProtocol(Patch):
    """Makes stock's HTTP server read by `EarlyAnswersProtocol`; stock leaves the choice to uvicorn and has no flag."""

    target = "uvicorn.config.Config.__init__"
    kind = "before"

    @staticmethod
    def hook(self: Any, app: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self, app, *args), {**kwargs, "http": EarlyAnswersProtocol}


def use_early_answers(answerer: Answerer) -> None:
    """Have requests of this process's HTTP server shown to `answerer` first. To be called before the server starts.

    Raises:
        PatchError: uvicorn's protocol is not the one that this was written for.
    """
    if AutoHTTPProtocol is not HttpToolsProtocol:
        raise PatchError("uvicorn does not read by httptools; install it")
    wanted = {"_start_asgi_task": ["self", "cycle", "app"], **{name: ["self"] for name in _WITHOUT_ARGUMENTS}}
    for name, parameters in wanted.items():
        found = vars(HttpToolsProtocol).get(name)
        if found is None or list(inspect.signature(found).parameters) != parameters:
            raise PatchError(f"uvicorn's HttpToolsProtocol.{name} is not as in the version this was written for")
    EarlyAnswersProtocol.answerer = answerer


_WITHOUT_ARGUMENTS = ("on_message_begin", "on_message_complete", "on_response_complete", "timeout_keep_alive_handler")

EARLY_ANSWERS: tuple[type[Patch], ...] = (ReadByOurProtocol,)
