"""The router alone: how many tokenized requests a second it sends to 128 engines.

    python benchmark/bench_router.py [--profile]

A generator process sends stock messages with the prompt lengths of the Azure code trace (2023, CC BY 4.0, see
benchmark/traces/README.md), all encoded beforehand; sink processes hold the engines' sockets and count. Each request
is decoded as far as the router needs, assigned to the least-loaded engine, entered as in flight and forwarded, as in
the server. Beside it the rival: stock's DataParallelController dispatch (round robin) on the same messages and sinks,
in the same run. Nitsum's Rust scheduler is reported at 16,100 requests/s (Nitsum, section 5).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import multiprocessing
import os
import pstats
import tempfile
import time
from array import array
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

os.environ["SGLANG_USE_PICKLE_IPC"] = "0"

import uvloop
import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from sglang.srt.sampling.sampling_params import SamplingParams

from load import read_trace
from server import environment, write_json
from sglang_adapt.core.layout import uniform_layout
from sglang_adapt.router.engine import Engine
from sglang_adapt.router.outlets import Outlets
from sglang_adapt.router.router import Router
from sglang_adapt.router.sockets import Inbox, make_socket

TRACE = Path(__file__).parent / "traces" / "azure_code_2023.csv"
NITSUM_RPS = 16100


def generator(endpoint: str, count: int, go: Connection) -> None:
    """Encode all requests, say so, and send them when told to."""
    lengths = [request.input_tokens for request in read_trace(TRACE, 8000)]
    params = SamplingParams(max_new_tokens=64)
    messages = []
    for number in range(count):
        request = io_struct.TokenizedGenerateReqInput(
            rid=f"{number:032x}",
            input_text="",
            input_ids=array("q", [7]) * lengths[number % len(lengths)],
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
        )
        messages.append(msgpack_encode(request))
    socket = make_socket(zmq.Context(), zmq.PUSH, endpoint, bind=True)
    socket.setsockopt(zmq.LINGER, -1)
    go.send(sum(map(len, messages)))
    while go.recv() == "go":
        for message in messages:
            socket.send(message)


def sink(endpoints: list[str], count: int, report: Connection) -> None:
    """Count the messages of some engines; report each time all engines together could have seen theirs."""
    context = zmq.Context()
    poller = zmq.Poller()
    for endpoint in endpoints:
        poller.register(make_socket(context, zmq.PULL, endpoint, bind=True), zmq.POLLIN)
    report.send("bound")
    received = 0
    while True:
        for socket, _ in poller.poll():
            try:
                while True:
                    socket.recv(zmq.NOBLOCK)
                    received += 1
            except zmq.Again:
                pass
        report.send(received)


def to_engine(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A socket to a sink that delivers what it holds even when it is closed first."""
    socket = make_socket(context, zmq.PUSH, endpoint, bind=False)
    socket.setsockopt(zmq.LINGER, -1)
    return socket


def ours(loop: asyncio.AbstractEventLoop, context: zmq.Context, source: str, engines: list[str], count: int) -> float:
    """Seconds from the first message to the last one sent."""
    done = loop.create_future()
    layout = uniform_layout(1, len(engines))
    ignore = lambda *_: None  # noqa: E731
    router = Router(layout, Outlets(ignore, ignore, ignore, ignore, ignore, ignore))
    for spec, endpoint in zip(layout.engines, engines, strict=True):
        socket = to_engine(context, endpoint)
        engine = Engine(spec.name, send=partial(socket.send, flags=zmq.NOBLOCK))
        router.add_engine(engine)
        router.engine_ready(engine)
    started = 0.0
    seen = 0

    def handle(data: bytes) -> None:
        nonlocal started, seen
        if not seen:
            started = time.perf_counter()
        seen += 1
        router.on_front_message(data)
        if seen == count:
            done.set_result(time.perf_counter() - started)

    inbox = Inbox(loop, make_socket(context, zmq.PULL, source, bind=False), handle)
    seconds: float = loop.run_until_complete(done)
    assert router.in_flight == count
    inbox.close()
    return seconds


def stock(context: zmq.Context, source: str, engines: list[str], count: int) -> float:
    """The same for what stock's DataParallelController does with a request: decode, round robin, encode, send."""
    workers = [to_engine(context, endpoint) for endpoint in engines]
    socket = make_socket(context, zmq.PULL, source, bind=False)
    started = 0.0
    for number in range(count):
        data = socket.recv()
        if not number:
            started = time.perf_counter()
        request = msgpack_decode(data)
        workers[number % len(workers)].send(msgpack_encode(request))
    seconds = time.perf_counter() - started
    socket.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--engines", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="profile one more run of ours")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_router.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, profile, megabytes = measure(options, Path(folder))
    best = {system: max(run["rps"] for run in runs if run["system"] == system) for system in ("stock", "ours")}
    print(
        f"ours {best['ours']:,.0f} req/s, stock {best['stock']:,.0f} req/s, ratio {best['ours'] / best['stock']:.2f}; ",
        end="",
    )
    print(f"goal {NITSUM_RPS:,} req/s: {best['ours'] / NITSUM_RPS:.2f} of it; {megabytes:.0f} MB of messages")
    if profile:
        print(profile)
    result = {"requests": options.requests, "engines": options.engines, "megabytes": megabytes, "runs": runs}
    write_json(options.out, {**environment(), **result, "best_rps": best, "goal_rps": NITSUM_RPS, "profile": profile})


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict], str | None, float]:
    context = multiprocessing.get_context("fork")
    endpoints = [f"ipc://{folder}/e{i}" for i in range(options.engines)]
    source = f"ipc://{folder}/source"
    sinks = []
    reader, writer = context.Pipe()
    sinks.append((context.Process(target=sink, args=(endpoints, options.requests, writer), daemon=True), reader))
    go, theirs = context.Pipe()
    feed = context.Process(target=generator, args=(source, options.requests, theirs), daemon=True)
    for process, _ in sinks:
        process.start()
    feed.start()
    for _, report in sinks:
        assert report.recv() == "bound"
    megabytes = go.recv() / 1e6
    zmq_context = zmq.Context()
    loop = uvloop.new_event_loop()
    runs = []
    expected = 0
    profile_text = None
    plan = ["stock", "ours"] * options.repeats + (["profile"] if options.profile else [])
    for system in plan:
        go.send("go")
        began = time.perf_counter()
        if system == "stock":
            seconds = stock(zmq_context, source, endpoints, options.requests)
        else:
            profiler = cProfile.Profile() if system == "profile" else None
            if profiler:
                profiler.enable()
            seconds = ours(loop, zmq_context, source, endpoints, options.requests)
            if profiler:
                profiler.disable()
                text = io.StringIO()
                pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(14)
                profile_text = text.getvalue()
        expected += options.requests
        for _, report in sinks:
            while report.recv() < expected:
                pass
        delivered = time.perf_counter() - began
        if system != "profile":
            rps = options.requests / seconds
            runs.append({"system": system, "rps": round(rps, 1), "seconds": seconds, "delivered_s": delivered})
            print(f"{system:6} {rps:9,.0f} req/s dispatched; all delivered after {delivered:.2f} s", flush=True)
    go.send("stop")
    feed.join()
    return runs, profile_text, megabytes


if __name__ == "__main__":
    main()
