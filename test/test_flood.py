"""The flood of `bench_refusals.py`: what it sends, at which rate, and what it counts."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from flood import flooding, percentile


class Answers(asyncio.Protocol):
    """Answers a 429, each third a 503 in two parts; notes what came."""

    seen: list[bytes]
    connections = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).connections += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.seen.append(data)
        assert isinstance(self._transport, asyncio.Transport)
        if len(self.seen) % 3:
            self._transport.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull")
        else:
            self._transport.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\nx: 1\r\n\r\n")
            asyncio.get_running_loop().call_soon(self._transport.write, b"no")


@pytest.fixture
def port() -> Iterator[int]:
    Answers.seen, Answers.connections = [], 0
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Answers, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def until(count: int) -> None:
    deadline = time.monotonic() + 30
    while len(Answers.seen) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("rate", [0.0, 300.0])
def test_each_answer_is_counted_and_requests_go_in_turn(port: int, rate: float) -> None:
    found: dict = {}
    began = time.monotonic()
    with flooding(port, [b"a", b"b", b"c"], 4, rate, found):
        until(90)
    seconds = time.monotonic() - began
    assert Answers.connections == 4
    assert sorted(set(Answers.seen)) == [b"a", b"b", b"c"]
    counted = sum(found["statuses"].values())
    # What was on its way when it was told to stop is not counted.
    assert len(Answers.seen) - 4 <= counted <= len(Answers.seen)
    assert abs(found["statuses"]["503"] - counted / 3) <= 4
    if rate:
        assert len(Answers.seen) <= rate * seconds + 1
    assert found["generator_cpu"] > 0 and found["latency_ms_p50"] <= found["latency_ms_p99"]


def test_a_server_that_hangs_up_is_no_silent_end() -> None:
    with pytest.raises(RuntimeError, match="ended before it was told to"), flooding(_closed_port(), [b"a"], 1, 0.0, {}):
        pass


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_percentiles_are_by_rank() -> None:
    assert percentile([], 50) is None
    assert [percentile(list(range(100)), percent) for percent in (0, 50, 99)] == [0, 50, 99]
