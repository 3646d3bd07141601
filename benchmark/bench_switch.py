"""Switching the layout with requests in flight: how long clients wait for their next token, and what it costs.

    python benchmark/bench_switch.py --layouts tp1@0,tp1@1 tp2@0-1 --vocab 128000 --start-method spawn -- FLAGS
    python benchmark/bench_switch.py --virtual 2 --vocab 1000 --switches 3 --running 0 4 --kv-tokens 64   # a dry run

One server of ours goes from layout A to B and back, by each strategy, with so many streams running that have so much
KV. Measured at the client: for each stream the longest time between two tokens that overlaps the switch (`gap_ms`),
beside the times between tokens right before it (`step_ms`); from the server's report: its phases and the bytes copied.
With `keep`, a round is there and back at once, and a stream's gap is that of the whole round, since it rests while its
layout is away.

`--rival`: stock sglang is stopped and started with the other layout, from SIGTERM until /health_generate answers.
`--under-load SECONDS`: tokens/s with a switch every second, beside those of either layout alone (`--static-s`).

`--repair`: a rank of each engine is killed, with streams running in layout A: how long they wait, and how long until
the engine serves again.

Each part is tried by itself; what failed is noted, and the result is written whatever happens, SIGTERM included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from layouts import Layouts, Switched, sizes_of
from server import Server, environment, our_flags, write_json
from sglang_adapt.core.urls import KEEP_ALIVE_S
from streams import Streams

FAILURES = (RuntimeError, OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError)
"""What ends a part, but not the benchmark."""
_LEFT_TOKENS = 48
"""Tokens that a stream must still have to give when a switch begins, so that it does not end in it."""


def main() -> None:
    options = _options()
    result: dict[str, Any] = {
        **environment(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "cells": [],
        "rival": [],
        "under_load": {},
        "repair": [],
        "errors": [],
    }
    bench = Bench(options, result, perf_counter() + options.limit_s)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            logs = options.logs or Path(temporary)
            logs.mkdir(parents=True, exist_ok=True)
            if not options.only_rival:
                bench.ours(logs)
            if options.rival or options.only_rival:
                bench.rival(logs)
    finally:
        result["complete"] = not result["errors"]
        _print(result)
        write_json(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs=2, metavar=("A", "B"), default=["tp1@0,tp1@1", "tp2@0-1"])
    parser.add_argument("--tp-sizes", help="TP sizes that are kept warm (default: those of the layouts)")
    parser.add_argument("--vocab", type=int, required=True, help="token ids are drawn below this")
    parser.add_argument("--running", type=int, nargs="+", default=[0, 16, 64], help="streams at a switch")
    parser.add_argument("--kv-tokens", type=int, nargs="*", default=[128, 2048], help="tokens of a stream's prompt")
    parser.add_argument(
        "--kv-gb", type=float, nargs="*", default=[], help="GB of KV on each GPU, all streams of a cell together"
    )
    parser.add_argument("--strategies", nargs="+", default=["migrate", "recompute", "keep", "drain"])
    parser.add_argument("--switches", type=int, default=20, help="switches of a cell")
    parser.add_argument("--output-tokens", type=int, default=1500, help="of each stream's requests")
    parser.add_argument("--under-load", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--static-s", type=float, default=60.0, help="of each layout alone, at most --under-load")
    parser.add_argument("--load", type=int, nargs=3, default=[32, 512, 128], metavar=("STREAMS", "INPUT", "OUTPUT"))
    parser.add_argument("--repair", action="store_true", help="kill a rank of each engine, one after another")
    parser.add_argument("--rival", action="store_true", help="measure stopping and starting stock sglang as well")
    parser.add_argument("--only-rival", action="store_true", help="measure that alone")
    parser.add_argument("--limit-s", type=float, default=540.0, help="for everything; what is left out is noted")
    parser.add_argument("--cell-s", type=float, default=40.0, help="for the switches of one cell")
    parser.add_argument("--settle-s", type=float, default=60.0, help="until all streams of a cell decode")
    parser.add_argument("--virtual", type=int, default=0, metavar="N", help="virtual GPUs (no CUDA)")
    parser.add_argument("--start-method", help="--adapt-start-method")
    parser.add_argument("--ours-flags", default="", help="further flags for ours alone, as one string")
    parser.add_argument("--stock-flags", default="", help="further flags for stock alone, as one string")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_switch.json"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags for both servers")
    options = parser.parse_args()
    options.flags = [flag for flag in options.flags if flag != "--"]
    gpus = {sum(sizes_of(layout)) for layout in options.layouts}
    if len(gpus) != 1:
        parser.error(f"--layouts {shlex.join(options.layouts)}: both must cover the same GPUs")
    options.gpus = gpus.pop()
    if options.virtual not in (0, options.gpus):
        parser.error(f"--virtual {options.virtual}: the layouts are for {options.gpus} GPUs")
    options.static_s = min(options.under_load, options.static_s)
    return options


class Bench:
    """The parts of the benchmark, which add to `result`.

    Args:
        options: the command line.
        result: what is written in the end.
        deadline_s: by perf_counter; parts that would begin later are left out.
    """

    def __init__(self, options: argparse.Namespace, result: dict[str, Any], deadline_s: float) -> None:
        self._o = options
        self._result = result
        self._deadline_s = deadline_s

    # Ours.

    def ours(self, logs: Path) -> None:
        """All that needs a server of ours, with one start of it."""
        o = self._o
        sizes = o.tp_sizes.split(",") if o.tp_sizes else {tp for layout in o.layouts for tp in sizes_of(layout)}
        flags = [
            *o.flags,
            *our_flags(o.layouts[0], map(int, sizes), o.start_method, o.virtual),
            *shlex.split(o.ours_flags),
        ]
        try:
            with self._server("ours", "sglang_adapt.launch_server", flags, logs / "ours.log") as server:
                self._result["start_s"] = round(server.start_s, 1)
                try:
                    asyncio.run(self._with_server(server))
                finally:
                    self._result["log_tail"] = [line[:300] for line in server.tail(12).splitlines()]
        except FAILURES as error:
            self._note("ours", error)

    async def _with_server(self, server: Server) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
            self._session, self._url = session, server.url
            self._layouts = Layouts(session, server.url, self._o.cell_s)
            # The first switch maps all regions and compiles the copy; it says how large a token's KV is.
            bytes_per_token = await self._part("warm up", self._warm_up)
            for running in self._o.running:
                for input_tokens in self._lengths(running, bytes_per_token):
                    for strategy in self._strategies(running):
                        name = f"{strategy}, {running} running, {input_tokens} tokens"
                        await self._part(name, self._cell, name, strategy, running, input_tokens)
            if self._o.under_load:
                limit_s = 2 * (self._o.under_load + 2 * self._o.static_s + 2 * self._o.settle_s)
                await self._part("under load", self._under_load, limit_s=limit_s)
            if self._o.repair:
                await self._part("repair", self._repair, limit_s=300)

    async def _repair(self) -> None:
        """Kill a rank of each engine under streams; when it is ready again, the next."""
        for name, engine in (await self._layouts.engines()).items():
            async with self._streams(16, 128, self._o.output_tokens) as streams:
                usual = await self._ready(streams)
                killed = perf_counter()
                os.kill(engine["pids"][0], signal.SIGKILL)
                await streams.past(perf_counter(), self._o.settle_s)
                answered = perf_counter()
                while (await self._layouts.engines())[name]["restarts"] == engine["restarts"]:
                    await asyncio.sleep(0.05)
                while (await self._layouts.engines())[name]["state"] != "ready":
                    await asyncio.sleep(0.05)
                row = {
                    "engine": name,
                    "active": engine["active"],
                    "gap_ms": _spread(streams.gaps_ms(killed, answered)),
                    "step_ms": _spread(usual),
                    "ready_again_s": round(perf_counter() - killed, 2),
                }
            self._result["repair"].append(row)
            print(f"killed: {row}", flush=True)

    def _strategies(self, running: int) -> list[str]:
        """Those that make a difference: without streams all are alike, and with endless ones none drains."""
        return [
            name
            for name in self._o.strategies
            if (name == "drain") != bool(running) or (name, running) == ("migrate", 0)
        ]

    def _lengths(self, running: int, bytes_per_token: float | None) -> list[int]:
        """Tokens of a prompt, of all cells with so many streams."""
        if not running:
            return [0]
        lengths = list(self._o.kv_tokens)
        for gb in self._o.kv_gb:
            if bytes_per_token is None:
                self._note(f"--kv-gb {gb:g}", RuntimeError("nothing was migrated to learn a token's bytes from"))
            else:
                lengths.append(max(1, round(gb * 1e9 * self._o.gpus / bytes_per_token / running)))
        return list(dict.fromkeys(lengths))

    @asynccontextmanager
    async def _streams(self, count: int, input_tokens: int, output_tokens: int) -> AsyncIterator[Streams]:
        seed = count + input_tokens
        async with Streams(
            self._session, self._url, count, input_tokens, output_tokens, self._o.vocab, seed
        ) as streams:
            yield streams
            if streams.errors:
                self._note(
                    f"{count} streams of {input_tokens} tokens", RuntimeError(f"requests failed: {streams.errors}")
                )

    async def _warm_up(self) -> float | None:
        here, there = self._o.layouts
        found = None
        async with self._streams(4, 32, self._o.output_tokens) as streams:
            for _ in range(2):
                for layout in (there, here):
                    await streams.decoding(_LEFT_TOKENS, self._o.settle_s)
                    report = (await self._layouts.switch(layout, "migrate")).report
                    if report["kv_tokens"]:
                        found = report["kv_bytes"] / report["kv_tokens"]
                    await streams.decoding(_LEFT_TOKENS, self._o.settle_s)
        self._result["kv_bytes_per_token"] = found
        return found

    async def _cell(self, name: str, strategy: str, running: int, input_tokens: int) -> None:
        """Switch there and back until there are enough, or the cell's time is up."""
        here, there = self._o.layouts
        legs: dict[str, list[Switched]] = {f"{here} -> {there}": [], f"{there} -> {here}": []}
        gaps: dict[str, list[float]] = {}
        steps: dict[str, list[float]] = {}
        try:
            async with self._streams(running, input_tokens, self._o.output_tokens) as streams:
                if running:
                    await streams.decoding(_LEFT_TOKENS, self._o.settle_s)
                until = min(perf_counter() + self._o.cell_s, self._deadline_s)
                for _ in range(self._o.switches // 2):
                    if perf_counter() > until:
                        break
                    if strategy == "keep":
                        await self._round(streams, legs, gaps, steps)
                    else:
                        for layout in (there, here):
                            await self._leg(streams, layout, strategy, legs, gaps, steps)
        finally:
            for way, switched in legs.items():
                if switched:
                    key = "there and back" if strategy == "keep" else way
                    row = _row(way, strategy, running, input_tokens, switched, gaps.get(key, []), steps.get(key, []))
                    self._result["cells"].append(row)
                    print(name, way, {key: row[key] for key in ("switches", "gap_ms", "pause_ms", "kv_gb")}, flush=True)
            await self._home()

    async def _leg(
        self,
        streams: Streams,
        layout: str,
        strategy: str,
        legs: dict[str, list[Switched]],
        gaps: dict[str, list[float]],
        steps: dict[str, list[float]],
    ) -> None:
        """One switch, once all streams decode, and until they do again."""
        usual = await self._ready(streams)
        done = await self._layouts.switch(layout, strategy)
        await streams.past(done.answered_s, self._o.settle_s)
        way = f"{done.report['from']} -> {done.report['to']}"
        legs[way].append(done)
        steps.setdefault(way, []).extend(usual)
        gaps.setdefault(way, []).extend(streams.gaps_ms(done.asked_s, done.answered_s))

    async def _round(
        self,
        streams: Streams,
        legs: dict[str, list[Switched]],
        gaps: dict[str, list[float]],
        steps: dict[str, list[float]],
    ) -> None:
        """Two switches that keep the streams where they are."""
        usual = await self._ready(streams)
        both = [await self._layouts.switch(layout, "keep") for layout in reversed(self._o.layouts)]
        await streams.past(both[1].answered_s, self._o.settle_s)
        for done in both:
            legs[f"{done.report['from']} -> {done.report['to']}"].append(done)
        steps.setdefault("there and back", []).extend(usual)
        gaps.setdefault("there and back", []).extend(streams.gaps_ms(both[0].asked_s, both[1].answered_s))

    async def _ready(self, streams: Streams) -> list[float]:
        """All streams decode; returns the times between their last tokens, in milliseconds."""
        await streams.decoding(_LEFT_TOKENS, self._o.settle_s)
        streams.forget()
        for _ in range(4):
            await streams.decoding(_LEFT_TOKENS, self._o.settle_s)
        return streams.steps_ms()

    async def _home(self) -> None:
        """Whatever has happened, the next part begins in layout A."""
        if (await self._layouts.get())["active"] != self._o.layouts[0]:
            await self._layouts.switch(self._o.layouts[0], "recompute")

    async def _under_load(self) -> None:
        """Tokens/s in layout A, switching every second, and in layout B."""
        here, there = self._o.layouts
        seconds, static_s, load = self._o.under_load, self._o.static_s, self._o.load
        rates: dict[str, float] = {}
        self._result["under_load"] = rates

        async def rate(name: str, work: Callable[[Streams], Awaitable[None]]) -> None:
            async with self._streams(*load) as streams:
                await streams.past(perf_counter(), self._o.settle_s)
                tokens, began = streams.tokens, perf_counter()
                await work(streams)
                rates[name] = round((streams.tokens - tokens) / (perf_counter() - began), 1)
                print(f"under load, {name}: {rates[name]} tokens/s", flush=True)

        pauses: list[float] = []

        async def switching(streams: Streams) -> None:
            began = perf_counter()
            end = began + seconds
            for number in range(1, int(seconds) + 1):
                await asyncio.sleep(max(0.0, min(began + number, end) - perf_counter()))
                done = await self._layouts.switch((there, here)[(number - 1) % 2], "auto")
                pauses.append(done.report["pause_ms"])
                if perf_counter() > end:
                    break

        await rate(f"static {here}", lambda _: asyncio.sleep(static_s))
        await rate("a switch every second", switching)
        await self._home()
        await self._layouts.switch(there)
        await rate(f"static {there}", lambda _: asyncio.sleep(static_s))
        await self._home()
        mean = statistics.fmean((rates[f"static {here}"], rates[f"static {there}"]))
        rates["switches"] = len(pauses)
        rates["pause_ms_p50"] = round(statistics.median(pauses), 2)
        rates["ratio to the mean of both"] = round(rates["a switch every second"] / mean, 4)

    # The rival.

    def rival(self, logs: Path) -> None:
        """Stop stock in one layout and start it in the other, once each way."""
        here, there = self._o.layouts
        try:
            with self._stock(here, logs, "first"):
                began = perf_counter()
            for before, after in ((here, there), (there, here)):
                with self._stock(after, logs, f"to-{len(sizes_of(after))}") as server:
                    row = {
                        "from": before,
                        "to": after,
                        "s": round(perf_counter() - began, 2),
                        "start_s": server.start_s,
                    }
                    self._result["rival"].append(row)
                    print(f"stock, stopped and started: {row}", flush=True)
                    began = perf_counter()
        except FAILURES as error:
            self._note("rival", error)

    def _stock(self, layout: str, logs: Path, name: str) -> Server:
        sizes = sizes_of(layout)
        if len(set(sizes)) != 1:
            raise ValueError(f"stock has no layout {layout}: all its replicas have one TP size")
        dp = ["--dp-size", str(len(sizes))] if len(sizes) > 1 else []
        flags = [*self._o.flags, "--tp-size", str(sizes[0]), *dp, *shlex.split(self._o.stock_flags)]
        # On a CPU stock gets what ours sets itself: a thread a rank.
        fair = {"OMP_NUM_THREADS": "1"} if self._o.virtual else {}
        return self._server(f"stock {layout}", "sglang.launch_server", flags, logs / f"stock-{name}.log", fair)

    # What all parts share.

    def _server(self, name: str, module: str, flags: list[str], log: Path, env: dict[str, str] | None = None) -> Server:
        left = self._deadline_s - perf_counter()
        if left < 10:
            raise TimeoutError(f"no time left to start {name} (--limit-s)")
        return Server(name, module, flags, log, env or {}, start_timeout_s=left)

    async def _part(
        self, name: str, work: Callable[..., Awaitable[Any]], *args: Any, limit_s: float | None = None
    ) -> Any:
        left = self._deadline_s - perf_counter()
        try:
            if left < 5:
                raise TimeoutError("left out, no time left (--limit-s)")
            async with asyncio.timeout(min(left, limit_s or 2 * self._o.cell_s + 2 * self._o.settle_s)):
                return await work(*args)
        except FAILURES as error:
            self._note(name, error)
            return None

    def _note(self, name: str, error: Exception) -> None:
        lines = [line[:300] for line in f"{name}: {type(error).__name__}: {error}".splitlines()]
        text = "\n".join([*lines[:2], *lines[2:][-10:]])
        print(f"FAILED {text}", flush=True)
        self._result["errors"].append(text)


def _row(
    way: str,
    strategy: str,
    running: int,
    input_tokens: int,
    switched: Sequence[Switched],
    gaps: Sequence[float],
    steps: Sequence[float],
) -> dict[str, Any]:
    """All switches of one cell one way, in figures: milliseconds, each as p50 and p99."""
    reports = [done.report for done in switched]
    names = dict.fromkeys(name for report in reports for name in report["phases_ms"])
    phases = {name: _spread([report["phases_ms"].get(name, 0.0) for report in reports]) for name in names}
    kv_bytes = statistics.median(report["kv_bytes"] for report in reports)
    rates = [report["kv_bytes"] / 1e6 / report["phases_ms"]["adopt"] for report in reports if report["kv_bytes"]]
    ways: dict[str, list[int]] = {}
    for report in reports:
        for kind, count in report["requests"].items():
            ways.setdefault(kind, []).append(count)
    return {
        "way": way,
        "strategy": strategy,
        "running": running,
        "input_tokens": input_tokens,
        "switches": len(reports),
        "streams_measured": len(gaps),
        "gap_ms": _spread(gaps),
        "step_ms": _spread(steps),
        "answer_ms": _spread([1e3 * (done.answered_s - done.asked_s) for done in switched]),
        "pause_ms": _spread([report["pause_ms"] for report in reports]),
        "phases_ms": phases,
        "steps_ms": {
            f"{phase}: {step}": _spread([report["steps_ms"].get(phase, {}).get(step, 0.0) for report in reports])
            for phase, step in dict.fromkeys(
                (phase, step) for report in reports for phase, steps in report["steps_ms"].items() for step in steps
            )
        },
        "kv_gb": round(kv_bytes / 1e9, 6),
        "adopt_gb_per_s": _spread(rates),
        "requests": {kind: statistics.fmean(counts) for kind, counts in ways.items()},
        "failures": [failure for report in reports for failure in report["failures"]],
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50 and p99, or None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{percent}": round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3) for percent in (50, 99)
    }


def _print(result: dict[str, Any]) -> None:
    def cell(spread: dict[str, float] | None) -> str:
        return "-" if spread is None else f"{spread['p50']:.1f} / {spread['p99']:.1f}"

    heads = ("gap p50/p99 ms", "usual step ms", "pause ms", "export", "adopt", "release", "GB/s")
    print(
        f"\n{'strategy':10}{'way':32}{'run':>4}{'tokens':>8}{'n':>4}{'KV GB':>9}" + "".join(f"{h:>20}" for h in heads)
    )
    for row in result["cells"]:
        phases = [cell(row["phases_ms"].get(name)) for name in ("export", "adopt", "release")]
        figures = [
            cell(row["gap_ms"]),
            cell(row["step_ms"]),
            cell(row["pause_ms"]),
            *phases,
            cell(row["adopt_gb_per_s"]),
        ]
        print(
            f"{row['strategy']:10}{row['way']:32}{row['running']:4}{row['input_tokens']:8}{row['switches']:4}"
            f"{row['kv_gb']:9.3f}" + "".join(f"{figure:>20}" for figure in figures)
        )
    print("\nslowest rank's steps, p50 ms")
    for row in result["cells"]:
        steps = ", ".join(f"{step} {spread['p50']:.1f}" for step, spread in row["steps_ms"].items())
        print(f"{row['strategy']:10}{row['way']:32}{row['running']:4}{row['input_tokens']:8}  {steps}")
    for row in result["rival"]:
        print(f"stock, stopped and started, {row['from']} -> {row['to']}: {row['s']} s")
    for row in result["repair"]:
        print(
            f"{row['engine']} killed: streams wait {cell(row['gap_ms'])} ms (usual step {cell(row['step_ms'])}), "
            f"it is ready again after {row['ready_again_s']} s"
        )
    for name, value in result["under_load"].items():
        print(f"under load, {name}: {value}")
    for error in result["errors"]:
        print(f"FAILED {error}")


if __name__ == "__main__":
    main()
