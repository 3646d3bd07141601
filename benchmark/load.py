"""Load for a running server: requests with token ids, streamed, timed at the client.

Used by the benchmarks. Works on stock sglang and on sglang_adapt alike: `/generate` with `input_ids`, so that no
tokenizer's time is in the figures.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from sglang_adapt.core.urls import KEEP_ALIVE_S


@dataclass(frozen=True)
class Request:
    """One request of a load: arrival in seconds from the start (0 in a closed loop), prompt and output tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Timing:
    """What the client saw of one request; times in milliseconds, None where there was no token.

    `tpot_ms` is (last token - first token) / (tokens - 1), as sglang.bench_serving defines it. `sent_s` is in seconds
    from the start of the load.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    tokens: int
    error: str | None
    sent_s: float = 0.0


def poisson_arrivals(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the start at which requests arrive, `rate` of them a second; drawn as they are asked for."""
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        yield at_s


def read_trace(path: Path, count: int | None, divide: int = 1, offset: int = 0) -> list[Request]:
    """The first `count` requests of a trace CSV (None: all), lengths divided by `divide` (at least 1)."""
    with path.open() as file:
        rows = list(csv.DictReader(file))[offset : None if count is None else offset + count]
    start = int(rows[0]["arrival_ms"])
    return [
        Request(
            (int(row["arrival_ms"]) - start) / 1000,
            max(1, int(row["input_tokens"]) // divide),
            max(1, int(row["output_tokens"]) // divide),
        )
        for row in rows
    ]


async def run_load(
    url: str, requests: Sequence[Request], vocab: int, concurrency: int | None = None, seed: int = 0
) -> tuple[list[Timing], float]:
    """Send requests and return their timings and the seconds from first send to last answer.

    Args:
        url: server, e.g. http://127.0.0.1:30000.
        requests: what to send. Open loop at their arrival times, unless `concurrency` is given: then a closed
            loop of that many, in order.
        vocab: token ids are drawn below this.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, vocab) for _ in range(request.input_tokens)] for request in requests]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        if concurrency is None:

            async def at_arrival(request: Request, prompt: list[int]) -> Timing:
                await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
                return await _one(session, url, request, prompt, start)

            timings = await asyncio.gather(*(at_arrival(r, p) for r, p in zip(requests, prompts, strict=True)))
        else:
            done: list[Timing | None] = [None] * len(requests)
            todo = iter(range(len(requests)))

            async def worker() -> None:
                for index in todo:
                    done[index] = await _one(session, url, requests[index], prompts[index], start)

            await asyncio.gather(*(worker() for _ in range(concurrency)))
            timings = [timing for timing in done if timing is not None]
        return timings, time.perf_counter() - start


async def _one(session: aiohttp.ClientSession, url: str, request: Request, prompt: list[int], start: float) -> Timing:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": request.output_tokens, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    sent = time.perf_counter()
    first = last = None
    tokens = 0
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                return Timing(None, None, _ms(sent), 0, f"HTTP {response.status}: {text}")
            async for line in response.content:
                if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    return Timing(None, None, _ms(sent), tokens, str(chunk["error"])[:200])
                done = chunk["meta_info"]["completion_tokens"]
                if done > tokens:
                    last = time.perf_counter()
                    first = first or last
                    tokens = done
    except (aiohttp.ClientError, TimeoutError) as error:
        return Timing(None, None, _ms(sent), tokens, f"{type(error).__name__}: {error}")
    if first is None or last is None:
        return Timing(None, None, _ms(sent), tokens, "no token")
    tpot = (last - first) * 1000 / (tokens - 1) if tokens > 1 else None
    return Timing((first - sent) * 1000, tpot, _ms(sent), tokens, None, sent - start)


def _ms(since: float) -> float:
    return (time.perf_counter() - since) * 1000


def summarize(timings: Sequence[Timing], seconds: float) -> dict[str, float | int]:
    """Counts, output tokens/s, and mean, p50, p90 and p99 of TTFT, TPOT and latency in milliseconds."""
    done = [timing for timing in timings if timing.error is None]
    summary: dict[str, float | int] = {
        "sent": len(timings),
        "completed": len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(sum(timing.tokens for timing in done) / seconds, 2),
    }
    for name in ("ttft_ms", "tpot_ms", "latency_ms"):
        values = sorted(value for timing in done if (value := getattr(timing, name)) is not None)
        if values:
            summary[f"{name}_mean"] = round(statistics.fmean(values), 3)
            for percent in (50, 90, 99):
                summary[f"{name}_p{percent}"] = round(values[min(len(values) - 1, len(values) * percent // 100)], 3)
    return summary
