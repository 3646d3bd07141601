"""Engines with roles: how long a hand-over takes, and what prompts cost the requests that decode.

    python benchmark/bench_roles.py --split tp1@0:prefill,tp1@1:decode --vocab 128000 --start-method spawn -- FLAGS
    python benchmark/bench_roles.py --virtual 2 --vocab 1000 --requests 6 --input 128 --prompts 256 --streams 4 \\
        --seconds 3    # a dry run

One server of ours, in the split layout and in the same engines without roles. Measured at the client, by token:

`handover`: of requests one at a time, beside `--beside` streams, the time from the first token, which the engine that
prefills sends when the prompt is read, to the second, less the median time between its later tokens. Without roles
this is what a first decode step costs anyway. With roles, also what the server says of the steps of its last hand-overs
(`GET /adapt/layout`).

`decode`: time between two tokens of `--streams` streams, alone, and while prompts of `--prompts` tokens arrive that
ask for a few tokens each, `--rate` a second; the streams of the split layout are on the engines that decode.

Each part is tried by itself; what failed is noted, and the result is written whatever happens, SIGTERM included.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from layouts import Layouts, sizes_of
from server import Server, environment, our_flags, write_json
from sglang_adapt.core.urls import KEEP_ALIVE_S
from streams import Streams

FAILURES = (RuntimeError, OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError)
"""What ends a part, but not the benchmark."""
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_SETTLE_S = 60.0
_PROMPT_OUTPUT = 4
"""Tokens that the arriving prompts ask for: enough to be handed over."""


def main() -> None:
    options = _options()
    result: dict[str, Any] = {
        **environment(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "handover": [],
        "decode": [],
        "errors": [],
    }
    try:
        with tempfile.TemporaryDirectory() as temporary:
            logs = options.logs or Path(temporary)
            logs.mkdir(parents=True, exist_ok=True)
            _run(options, result, logs)
    finally:
        result["complete"] = not result["errors"]
        for row in (*result["handover"], *result["decode"], *result["errors"]):
            _show(row)
        write_json(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="tp1@0:prefill,tp1@1:decode", help="the layout with roles")
    parser.add_argument("--tp-sizes", help="TP sizes that are kept warm (default: those of the layout, 1 and 2)")
    parser.add_argument("--vocab", type=int, required=True, help="token ids are drawn below this")
    parser.add_argument("--requests", type=int, default=50, help="requests of a hand-over row")
    parser.add_argument("--input", type=int, default=2048, help="tokens of their prompts")
    parser.add_argument("--output", type=int, default=32, help="tokens that they ask for")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 16], help="streams beside them")
    parser.add_argument("--streams", type=int, default=32, help="streams whose steps are measured")
    parser.add_argument("--stream-output", type=int, default=6000, help="tokens of each stream's requests")
    parser.add_argument("--prompts", type=int, default=8192, help="tokens of the prompts that arrive")
    parser.add_argument("--rate", type=float, default=2.0, help="prompts that arrive in a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement of steps")
    parser.add_argument("--virtual", type=int, default=0, metavar="N", help="virtual GPUs (no CUDA)")
    parser.add_argument("--start-method", help="--adapt-start-method")
    parser.add_argument("--logs", type=Path, help="keep the server's log in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_roles.json"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags for the server")
    options = parser.parse_args()
    options.flags = [flag for flag in options.flags if flag != "--"]
    if ":" not in options.split:
        parser.error(f"--split {options.split}: give engines roles, e.g. tp1@0:prefill,tp1@1:decode")
    if options.virtual not in (0, sum(sizes_of(options.split))):
        parser.error(f"--virtual {options.virtual}: the layout is for {sum(sizes_of(options.split))} GPUs")
    return options


def _run(o: argparse.Namespace, result: dict[str, Any], logs: Path) -> None:
    sizes = o.tp_sizes.split(",") if o.tp_sizes else {1, 2, *sizes_of(o.split)}
    flags = [*o.flags, *our_flags(o.split, map(int, sizes), o.start_method, o.virtual)]
    try:
        with Server("ours", "sglang_adapt.launch_server", flags, logs / "ours.log") as server:
            try:
                asyncio.run(Bench(o, result, server.url).run())
            finally:
                result["log_tail"] = [line[:300] for line in server.tail(12).splitlines()]
    except FAILURES as error:
        result["errors"].append(f"server: {type(error).__name__}: {error}")


class Bench:
    """The parts, which add to `result`."""

    def __init__(self, options: argparse.Namespace, result: dict[str, Any], url: str) -> None:
        self._o = options
        self._result = result
        self._url = url
        self._rng = random.Random(7)

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
            self._session = session
            layouts = Layouts(session, self._url)
            mixed = ",".join(part.partition(":")[0] for part in self._o.split.split(","))
            for layout in (self._o.split, mixed):
                await self._part(f"to {layout}", partial(layouts.switch, layout))
                for beside in self._o.beside:
                    await self._part(f"handover, {layout}, {beside} beside", partial(self._handover, layout, beside))
                await self._part(f"decode, {layout}", partial(self._decode, layout))
                said = await layouts.get()
                self._result.setdefault("handovers", {})[layout] = said["handovers"]

    async def _part(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        print(name, flush=True)
        try:
            await work()
        except FAILURES as error:
            self._result["errors"].append(f"{name}: {type(error).__name__}: {error}")

    async def _handover(self, layout: str, beside: int) -> None:
        o = self._o
        async with Streams(self._session, self._url, beside, 256, o.stream_output, o.vocab, 1) as streams:
            await streams.decoding(16, _SETTLE_S)
            # The first ones compile and map what is needed.
            for _ in range(3):
                await self._times(o.input, o.output)
            first, steps = [], []
            for _ in range(o.requests):
                chunks = await self._times(o.input, o.output)
                # By token, where a chunk has several.
                gaps = [
                    1e3 * (after_s - before_s) / (after - before)
                    for (before, before_s), (after, after_s) in pairwise(chunks)
                ]
                steps += gaps[1:]
                if [tokens for tokens, _ in chunks[:2]] == [1, 2]:
                    first.append(gaps[0] - statistics.median(gaps[1:]))
            self._errors_of(streams)
        row = {"layout": layout, "beside": beside, "input": o.input, "requests": len(first)}
        row |= {"beyond_a_step_ms": _spread(first), "step_ms": _spread(steps)}
        if ":" in layout:
            # Of the last 50 hand-overs, so of this row from 50 requests on.
            said = await Layouts(self._session, self._url).get()
            row["hand_over_steps_ms"] = said["handovers"].get("steps_ms", {})
        self._result["handover"].append(row)

    async def _decode(self, layout: str) -> None:
        o = self._o
        async with Streams(self._session, self._url, o.streams, 256, o.stream_output, o.vocab, 2) as streams:
            await streams.decoding(16, _SETTLE_S)
            # They are handed over one after another; only what follows counts.
            await streams.past(perf_counter(), _SETTLE_S)
            streams.forget()
            await asyncio.sleep(o.seconds)
            alone = streams.steps_ms()
            streams.forget()
            prompts, took = [], []
            until = perf_counter() + o.seconds
            while perf_counter() < until:
                prompts.append(asyncio.create_task(self._times(o.prompts, _PROMPT_OUTPUT)))
                await asyncio.sleep(self._rng.expovariate(o.rate))
            busy = streams.steps_ms()
            took = await asyncio.gather(*prompts)
            self._errors_of(streams)
        row = {"layout": layout, "streams": o.streams, "prompt_tokens": o.prompts, "prompts": len(took)}
        self._result["decode"].append(row | {"alone_ms": _spread(alone), "beside_prompts_ms": _spread(busy)})

    def _errors_of(self, streams: Streams) -> None:
        if streams.errors:
            raise RuntimeError(f"requests failed: {streams.errors}")

    async def _times(self, input_tokens: int, output_tokens: int) -> list[tuple[int, float]]:
        """One request's chunks: how many tokens there were, and when, by perf_counter. Raises RuntimeError if tokens
        are missing."""
        prompt = [self._rng.randrange(10, self._o.vocab) for _ in range(input_tokens)]
        sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        chunks: list[tuple[int, float]] = []
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                found = _TOKENS.search(line)
                if found is not None and (not chunks or int(found[1]) > chunks[-1][0]):
                    chunks.append((int(found[1]), perf_counter()))
                elif line.startswith(b"data: {") and found is None:
                    raise RuntimeError(line.decode()[:200])
        if not chunks or chunks[-1][0] != output_tokens:
            raise RuntimeError(f"{chunks[-1][0] if chunks else 0} tokens came of {output_tokens}")
        return chunks


def _show(row: Any) -> None:
    steps = row.get("hand_over_steps_ms") if isinstance(row, dict) else None
    if not steps:
        print(row, flush=True)
        return
    print({name: value for name, value in row.items() if name != "hand_over_steps_ms"}, flush=True)
    medians = [f"{step} {spread['p50']:.2f}" for step, spread in steps.items()]
    print(f"    p50 ms: {', '.join(medians)}", flush=True)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, or None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{percent}": round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)
        for percent in (50, 90, 99)
    }


if __name__ == "__main__":
    main()
