"""What refusing costs: refusals a second of the real front, and the TTFT of accepted requests beside them.

    python benchmark/bench_refusals.py [--seconds 5] [--rate 5000] [--own-targets] [--profile front.txt]

One server on one virtual GPU with two tiers: `open`, whose targets everything meets, and `shut`, whose targets no
request here can meet, so that each is answered with a 429. Two measurements, by turns, to see the same machine:

1. Refusals as fast as they go: connections that are kept, each with one request at a time (no pipelining).
2. TTFT of streamed `open` requests, alone, and beside refusals at `--rate` a second.

The generator of refused requests is a process of its own, on raw sockets, and takes its share of the same cores; what
a refusal costs the server is told by the CPU time of its processes, what it costs the generator beside it. Goal: 5,000
refusals/s on 2 cores, TTFT at most 10 % up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from server import Server, environment, write_json

TIERS = """\
default: open
tiers:
  - {name: open, ttft_ms: 60000, tpot_ms: 60000}
  - {name: shut, ttft_ms: 3, tpot_ms: 60000, when_infeasible: reject}
"""
GOAL_RPS = 5000
GOAL_TTFT_RATIO = 1.1
_PROMPT = "Once upon a time there was a small house at the end of the road. "


def requests(host: str, sizes: tuple[int, int], own_targets: bool, rng: random.Random) -> list[bytes]:
    """256 different requests of the tier `shut`, with prompts of so many bytes."""
    made = []
    for number in range(256):
        size = rng.randint(*sizes)
        content = (_PROMPT * (size // len(_PROMPT) + 1))[:size]
        body = json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 64, "stream": True}
        ).encode()
        own = f"x-slo-ttft-ms: {3 + number / 1e6:.6f}\r\n" if own_targets else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nx-adapt-tier: shut\r\n{own}Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


def flood(port: int, made: list[bytes], connections: int, rate: float, stop: Connection) -> None:
    """Send requests until told to stop, then send [answers by status, seconds, latencies in ms, CPU seconds] back.

    Args:
        rate: requests a second; 0: each connection sends its next request as soon as it has its answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    idle: list[socket.socket] = []
    for _ in range(connections):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(peer, selectors.EVENT_READ, peer)
        idle.append(peer)
    statuses: dict[str, int] = {}
    sent_at: dict[socket.socket, float] = {}
    read: dict[socket.socket, bytes] = {}
    latencies: list[float] = []
    began, sent = time.perf_counter(), 0
    while not stop.poll():
        now = time.perf_counter()
        due = len(idle) if not rate else min(len(idle), int((now - began) * rate) - sent)
        for _ in range(due):
            peer = idle.pop()
            peer.sendall(made[sent % len(made)])
            sent_at[peer] = now
            sent += 1
        for key, _ in selector.select(0.001):
            peer = key.data
            data = read.pop(peer, b"") + peer.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0] or -1)
            if not head or len(body) < length or length < 0:
                read[peer] = data
                if not data:
                    raise ConnectionError("the server has closed a connection")
                continue
            status = head[9:12].decode()
            statuses[status] = statuses.get(status, 0) + 1
            latencies.append((time.perf_counter() - sent_at[peer]) * 1000)
            idle.append(peer)
    stop.send((statuses, time.perf_counter() - began, latencies, time.process_time()))


@contextlib.contextmanager
def flooding(port: int, made: list[bytes], connections: int, rate: float, into: dict[str, Any]) -> Iterator[None]:
    """A flood for as long as the block runs; its result goes into `into`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=flood, args=(port, made, connections, rate, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield
        ours.send("stop")
        statuses, seconds, latencies, spent_s = ours.recv()
        into |= {
            "generator_cpu": round(spent_s / seconds, 3),
            "statuses": statuses,
            "rps": round(sum(statuses.values()) / seconds, 1),
            "latency_ms_p50": _percentile(latencies, 50),
            "latency_ms_p99": _percentile(latencies, 99),
        }
    finally:
        process.join(5)
        process.kill()


def ttfts(port: int, seconds: float, rate: float, rng: random.Random) -> list[float]:
    """TTFT in ms of streamed requests of the tier `open`, one after the other, begun `rate` a second."""
    seen: list[float] = []
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        due = began + len(seen) / rate
        if due > now:
            time.sleep(due - now)
        body = {"model": "demo", "prompt": [rng.randrange(10, 250) for _ in range(32)], "max_tokens": 4, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        sent = time.perf_counter()
        headers = {"content-type": "application/json", "x-adapt-tier": "open"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.readline()
        seen.append((time.perf_counter() - sent) * 1000)
        answer.read()
        connection.close()
    return seen


def cpu_s(server: Server) -> dict[str, float]:
    """CPU seconds of the server's processes, by what they are."""
    spent: dict[str, float] = {}
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            kind = (process.cmdline() or ["?"])[0].removeprefix("sglang_adapt::").split()[0]
            spent[kind] = spent.get(kind, 0.0) + times.user + times.system
    return spent


def front_pid(server: Server) -> int:
    """The front's process."""
    for process in psutil.Process(server.pid).children(recursive=True):
        if process.cmdline()[:1] == ["sglang_adapt::front"]:
            return process.pid
    raise RuntimeError("the server has no front")


def _percentile(values: list[float], percent: int) -> float | None:
    return round(sorted(values)[min(len(values) - 1, len(values) * percent // 100)], 3) if values else None


def measure(server: Server, options: argparse.Namespace) -> list[dict]:
    """A dict a round: `fastest` (refusals only), `alone` and `beside` (TTFT without and with refusals)."""
    rng = random.Random(0)
    made = requests(f"127.0.0.1:{server.port}", (options.least, options.most), options.own_targets, rng)
    ttfts(server.port, 3.0, options.accepted, rng)
    rounds = []
    for _ in range(options.rounds):
        fastest: dict = {}
        before = cpu_s(server)
        with flooding(server.port, made, options.connections, 0.0, fastest):
            time.sleep(options.seconds)
        after = cpu_s(server)
        answered = sum(fastest["statuses"].values())
        fastest["cpu_us"] = {kind: round((after[kind] - before.get(kind, 0.0)) / answered * 1e6, 1) for kind in after}
        alone = ttfts(server.port, options.seconds, options.accepted, rng)
        paced: dict = {}
        before = cpu_s(server)
        with flooding(server.port, made, options.connections, options.rate, paced):
            time.sleep(0.5)
            beside = ttfts(server.port, options.seconds, options.accepted, rng)
        after = cpu_s(server)
        paced["cpu_s"] = {kind: round(after[kind] - before.get(kind, 0.0), 3) for kind in after}
        rounds.append({"fastest": fastest, "alone_ttft_ms": alone, "beside_ttft_ms": beside, "beside": paced})
        print(
            f"{fastest['rps']:8,.0f} refusals/s {fastest['statuses']}, front {fastest['cpu_us'].get('front')} us each; "
            f"TTFT p50 {statistics.median(alone):.1f} ms alone, {statistics.median(beside):.1f} beside "
            f"{paced['rps']:,.0f}/s (p99 of these {paced['latency_ms_p99']} ms)",
            flush=True,
        )
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default: 3)")
    parser.add_argument("--rate", type=float, default=float(GOAL_RPS), help="refusals/s beside accepted requests")
    parser.add_argument("--accepted", type=float, default=8.0, help="accepted requests/s (default: 8)")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--least", type=int, default=200, help="bytes of the shortest prompt (default: 200)")
    parser.add_argument("--most", type=int, default=4000, help="bytes of the longest prompt (default: 4000)")
    parser.add_argument("--own-targets", action="store_true", help="256 different targets, so that terms differ")
    parser.add_argument("--profile", type=Path, help="py-spy's profile of the front under refusals goes here")
    parser.add_argument("--name", default="now", help="of these figures in the result (default: now)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_refusals.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiers = Path(folder) / "tiers.yaml"
        tiers.write_text(TIERS)
        flags = ["--adapt-virtual-gpus", "1", "--adapt-tp-sizes", "1", "--adapt-slo-config", str(tiers)]
        with Server("ours", "sglang_adapt.launch_server", flags, Path(folder) / "log") as server:
            if options.profile is not None:
                profile(server, options)
                return
            rounds = measure(server, options)
    best = max(one["fastest"]["rps"] for one in rounds)
    alone = statistics.median([value for one in rounds for value in one["alone_ttft_ms"]])
    beside = statistics.median([value for one in rounds for value in one["beside_ttft_ms"]])
    figures = {
        "refusals_rps": best,
        "ttft_ms_alone": round(alone, 2),
        "ttft_ms_beside": round(beside, 2),
        "ttft_ratio": round(beside / alone, 3),
        "beside_rps": [one["beside"]["rps"] for one in rounds],
    }
    print(f"{figures}; goals: {GOAL_RPS}/s, ratio {GOAL_TTFT_RATIO}")
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    known[options.name] = {**environment(), **figures, "rounds": [_short(one) for one in rounds]}
    write_json(options.out, known)


def _short(one: dict) -> dict:
    """A round without its single times."""
    cut = {key: [_percentile(one[key], percent) for percent in (50, 90, 99)] for key in one if key.endswith("_ms")}
    return {"fastest": one["fastest"], "beside": one["beside"], **{f"{key}_p50_p90_p99": cut[key] for key in cut}}


def profile(server: Server, options: argparse.Namespace) -> None:
    """Where the front's time goes while it refuses as fast as it can, by py-spy."""
    rng = random.Random(0)
    made = requests(f"127.0.0.1:{server.port}", (options.least, options.most), options.own_targets, rng)
    spy = str(Path(sys.executable).with_name("py-spy"))
    command = [spy, "record", "-p", str(front_pid(server)), "-d", str(int(options.seconds)), "-r", "500"]
    with flooding(server.port, made, options.connections, 0.0, {}):
        subprocess.run([*command, "-f", "raw", "-o", str(options.profile)], check=True)


if __name__ == "__main__":
    main()
