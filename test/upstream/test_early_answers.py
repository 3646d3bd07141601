"""Answers before the app, on a real uvicorn and raw connections: same bytes, right order, nothing lost."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from sglang_adapt.upstream import early_answers
from sglang_adapt.upstream.early_answers import EarlyAnswer, EarlyAnswersProtocol, ReadByOurProtocol, use_early_answers
from sglang_adapt.upstream.known_heads import Head
from sglang_adapt.upstream.patch import PatchError

KEEP_ALIVE_S = 1


FULL = EarlyAnswer(429, ((b"content-type", b"text/plain"), (b"content-length", b"4")), b"full")


@dataclass
class Says:
    """Refuses bodies that begin with `no`, and remembers what it was shown."""

    active: bool = True
    shown: list[tuple[Head, bytes]] = field(default_factory=list)

    def answer(self, head: Head, body: bytes | bytearray) -> EarlyAnswer | None:
        self.shown.append((head, bytes(body)))
        return FULL if body.startswith(b"no") else None


class Reads(EarlyAnswersProtocol):
    """Counts the heads that are read."""

    heads = 0

    def on_message_begin(self) -> None:
        Reads.heads += 1
        super().on_message_begin()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers as `Says` does to `no`, else with its body; `slow` after a moment."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if body == b"slow":
        await asyncio.sleep(0.2)
    status, said = (429, b"full") if body.startswith(b"no") else (200, body)
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    says = Says()
    monkeypatch.setattr(EarlyAnswersProtocol, "answerer", says)
    monkeypatch.setattr(EarlyAnswersProtocol, "_heads", early_answers.KnownHeads())
    monkeypatch.setattr(Reads, "heads", 0)
    return says


@pytest.fixture
def port(says: Says) -> Iterator[int]:
    config = uvicorn.Config(
        app, http=Reads, loop="uvloop", lifespan="off", log_level="error", timeout_keep_alive=KEEP_ALIVE_S
    )
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def peer(port: int) -> Iterator[socket.socket]:
    deadline = time.monotonic() + 10
    while True:
        try:
            made = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    with made:
        yield made


def post(body: bytes, *headers: bytes, path: bytes = b"/generate", version: bytes = b"1.1") -> bytes:
    lines = [
        b"POST %s HTTP/%s" % (path, version),
        b"Host: h",
        *headers,
        b"Content-Length: %d" % len(body),
        b"X-Last: 1",
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer(peer: socket.socket, rest: bytearray) -> tuple[bytes, bytes]:
    """(head without the date, body) of the next answer; `rest` holds what was read of the one after it."""

    def more() -> None:
        data = peer.recv(65536)
        assert data, bytes(rest)
        rest.extend(data)

    while b"\r\n\r\n" not in rest:
        more()
    head, _, _ = bytes(rest).partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(rest) < len(head) + 4 + length:
        more()
    body = bytes(rest[len(head) + 4 : len(head) + 4 + length])
    del rest[: len(head) + 4 + length]
    return re.sub(rb"date: [^\r]*\r\n", b"", head), body


def asks(peer: socket.socket) -> Callable[[bytes], tuple[bytes, bytes]]:
    rest = bytearray()

    def ask(data: bytes) -> tuple[bytes, bytes]:
        peer.sendall(data)
        return answer(peer, rest)

    return ask


def test_an_early_answer_is_the_same_bytes_as_by_the_long_way(peer: socket.socket, says: Says) -> None:
    ask = asks(peer)
    says.active = False
    by_the_app = ask(post(b"no"))
    assert not says.shown
    says.active = True
    assert ask(post(b"no")) == ask(post(b"no, longer")) == by_the_app
    assert [body for _, body in says.shown] == [b"no", b"no, longer"]
    assert by_the_app[0].startswith(b"HTTP/1.1 429 Too Many Requests\r\nserver: uvicorn\r\n")


def test_a_head_that_is_known_is_not_read_again_whatever_its_length(peer: socket.socket, says: Says) -> None:
    ask = asks(peer)
    for size in (1, 1000, 30_000):
        assert ask(post(b"no" * size))[1] == b"full"
    assert Reads.heads == 1
    assert says.shown[2][0] is says.shown[0][0]
    assert says.shown[2][0].path == "/generate" and says.shown[2][0].first[b"x-last"] == b"1"
    ask(post(b"no", b"X-Other: 1"))
    ask(post(b"no", path=b"/v1/completions"))
    assert Reads.heads == 3
    assert [head.path for head, _ in says.shown[3:]] == ["/generate", "/v1/completions"]


def test_what_is_not_refused_reaches_the_app_whole(peer: socket.socket, says: Says) -> None:
    ask = asks(peer)
    assert ask(post(b"no"))[1] == b"full"
    for body in (b"yes", b"", b"x" * 200_000):
        assert ask(post(body))[1] == body


def test_a_request_that_comes_in_parts_is_answered_by_the_app(peer: socket.socket, says: Says) -> None:
    ask = asks(peer)
    ask(post(b"no"))
    shown = len(says.shown)
    data = post(b"no more of this")
    for at in (10, data.index(b"\r\n\r\n") + 4, len(data) - 5):
        peer.sendall(data[:at])
        # The server has read it when it answers another connection.
        with socket.create_connection(peer.getpeername(), timeout=10) as other:
            asks(other)(post(b"yes"))
        assert ask(data[at:])[0].startswith(b"HTTP/1.1 429 ")
    assert [body for _, body in says.shown[shown:]].count(b"no more of this") <= 1


@pytest.mark.parametrize(
    "data",
    [
        post(b"no", b"Connection: close"),
        post(b"no", version=b"1.0"),
        b"POST /generate HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
        b"PUT" + post(b"no")[4:],
        post(b"no", b"Connection: upgrade", b"Upgrade: h2c"),
    ],
)
def test_what_is_not_plain_is_answered_all_the_same_and_its_head_is_not_kept(
    peer: socket.socket, says: Says, data: bytes
) -> None:
    found = asks(peer)(data)
    says.active = False
    with socket.create_connection(peer.getpeername(), timeout=10) as other:
        assert asks(other)(data) == found
    assert EarlyAnswersProtocol._heads._known == {}


def test_a_client_that_waits_for_leave_to_send_gets_it(peer: socket.socket, says: Says) -> None:
    data = post(b"no", b"Expect: 100-continue")
    peer.sendall(data[:-2])
    assert peer.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert asks(peer)(b"no")[1] == b"full"


def test_requests_in_a_row_are_answered_in_their_order(peer: socket.socket, says: Says) -> None:
    rest = bytearray()
    bodies = [b"no", b"1", b"no", b"slow", b"no", b"no", b"2"]
    for _ in range(2):
        peer.sendall(b"".join(map(post, bodies)))
        wanted = [b"full" if body == b"no" else body for body in bodies]
        assert [answer(peer, rest)[1] for _ in bodies] == wanted


def test_a_connection_is_closed_some_time_after_its_last_answer(peer: socket.socket, says: Says) -> None:
    ask = asks(peer)
    began = time.monotonic()
    while time.monotonic() - began < 1.5 * KEEP_ALIVE_S:
        ask(post(b"no"))
        time.sleep(0.05)
    last = time.monotonic()
    assert peer.recv(1) == b""
    assert 0.8 * KEEP_ALIVE_S < time.monotonic() - last < 5 * KEEP_ALIVE_S


def test_a_first_request_whose_head_another_connection_has_said_also_starts_the_clock(
    peer: socket.socket, says: Says
) -> None:
    asks(peer)(post(b"no"))
    with socket.create_connection(peer.getpeername(), timeout=10) as other:
        assert asks(other)(post(b"no"))[1] == b"full"
        assert Reads.heads == 1
        assert other.recv(1) == b""


def test_another_uvicorn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_answers.HttpToolsProtocol, "_start_asgi_task", lambda self, cycle: None)
    with pytest.raises(PatchError, match="_start_asgi_task is not as in the version"):
        use_early_answers(Says())


def test_stocks_server_gets_our_protocol() -> None:
    args, kwargs = ReadByOurProtocol.hook("config", app, http="auto", loop="uvloop")
    assert (args, kwargs) == (("config", app), {"http": EarlyAnswersProtocol, "loop": "uvloop"})
