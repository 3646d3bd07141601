"""Requests as cheap as they can be sent: bytes made beforehand, raw sockets, one thread, a process of its own.

Each connection is kept and has one request at a time. At a given rate what is due leaves each millisecond, and answers
are read then, so that the flood wakes up a thousand times a second and not twice a request.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

_TICK_S = 0.001
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]+)\r\n", re.IGNORECASE)


class _Peer:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_at = 0.0
        self.read = b""

    def answered(self) -> str | None:
        """The status if its answer is whole now, else None. Raises ConnectionError."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server has closed a connection")
        if self.read:
            data = self.read + data
        end = data.find(b"\r\n\r\n")
        found = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if found is None or len(data) < end + 4 + int(found[1]):
            self.read = data
            return None
        self.read = b""
        return data[9:12].decode()


def flood(port: int, made: Sequence[bytes], connections: int, rate: float, stop: Connection) -> None:
    """Send requests until told to stop, then send (answers by status, seconds, latencies in ms, CPU seconds) back.

    Args:
        made: whole requests, sent in turn.
        rate: requests a second; 0: each connection sends its next request as soon as it has its answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peers = [_Peer(port) for _ in range(connections)]
    by_fd = {peer.socket.fileno(): peer for peer in peers}
    epoll = select.epoll()
    for fd in (*by_fd, stop.fileno()):
        epoll.register(fd, select.EPOLLIN)
    idle = list(peers)
    statuses: dict[str, int] = {}
    latencies: list[float] = []
    began, spent, sent, stopped = time.perf_counter(), time.process_time(), 0, False
    while not stopped:
        now = time.perf_counter()
        due = min(len(idle), int((now - began) * rate) - sent) if rate else len(idle)
        for _ in range(due):
            peer = idle.pop()
            peer.socket.sendall(made[sent % len(made)])
            peer.sent_at = now
            sent += 1
        if rate:
            time.sleep(max(0.0, now + _TICK_S - time.perf_counter()))
        for fd, _ in epoll.poll(0 if rate else None):
            peer_or_none = by_fd.get(fd)
            if peer_or_none is None:
                stopped = True
            elif (status := peer_or_none.answered()) is not None:
                statuses[status] = statuses.get(status, 0) + 1
                latencies.append((time.perf_counter() - peer_or_none.sent_at) * 1000)
                idle.append(peer_or_none)
    stop.send((statuses, time.perf_counter() - began, latencies, time.process_time() - spent))


@contextlib.contextmanager
def flooding(port: int, made: Sequence[bytes], connections: int, rate: float, into: dict[str, Any]) -> Iterator[None]:
    """A flood for as long as the block runs; its result goes into `into`. Raises RuntimeError if it ends itself."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=flood, args=(port, made, connections, rate, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield
        try:
            ours.send("stop")
            statuses, seconds, latencies, spent_s = ours.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the flood has ended before it was told to; its error is above") from error
        into |= {
            "generator_cpu": round(spent_s / seconds, 3),
            "statuses": statuses,
            "rps": round(sum(statuses.values()) / seconds, 1),
            "latency_ms_p50": percentile(latencies, 50),
            "latency_ms_p99": percentile(latencies, 99),
        }
    finally:
        process.join(5)
        process.kill()


def percentile(values: Sequence[float], percent: int) -> float | None:
    """By rank; None of nothing."""
    return round(sorted(values)[min(len(values) - 1, len(values) * percent // 100)], 3) if values else None
