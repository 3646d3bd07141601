"""Goodput by tier: replays arrivals with tiers against any OpenAI-compatible server, at one rate or several.

A request is good if it met both targets of its tier; goodput is good requests a second and, as a share, by those sent:
one that is refused, fails or is late counts as not met. Clocks start when a request is sent. The server is told the
tier by `x-adapt-tier`, which others ignore, so that stock and sglang_adapt get the same requests.

    python benchmark/bench_goodput.py --url http://127.0.0.1:30000 --model demo --rate 4 --times 1,2,4 \
        --tier strict:1:400:40 --tier loose:1:2000:80 --input 64 --output 32 --seconds 30 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from load import Request, read_trace
from server import environment, write_json

_TIMEOUT_S = 600


@dataclass(frozen=True)
class TierLoad:
    """One tier of the load, written `name:share:ttft_ms:tpot_ms`.

    Attributes:
        name: sent as `x-adapt-tier`.
        share: of requests, beside those of other tiers.
        ttft_ms, tpot_ms: by which requests are judged here; the server has its own settings.
    """

    name: str
    share: float
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Seen:
    """What became of one request; times in ms, None where there were no such tokens."""

    tier: str
    status: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens: int


def parse_tier(text: str) -> TierLoad:
    """A tier from `name:share:ttft_ms:tpot_ms`. Raises argparse.ArgumentTypeError."""
    try:
        name, share, ttft, tpot = text.split(":")
        tier = TierLoad(name, float(share), float(ttft), float(tpot))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write name:share:ttft_ms:tpot_ms") from None
    if tier.share <= 0 or tier.ttft_ms <= 0 or tier.tpot_ms <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: share and targets are above 0")
    return tier


def poisson(rate: float, seconds: float, input_tokens: int, output_tokens: int, rng: random.Random) -> list[Request]:
    """Arrivals at `rate` a second; lengths between half and one and a half of those given."""
    requests, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        lengths = (max(1, round(length * rng.uniform(0.5, 1.5))) for length in (input_tokens, output_tokens))
        requests.append(Request(at, *lengths))
    return requests


def faster(requests: Sequence[Request], times: float) -> list[Request]:
    """The same requests, arriving `times` as fast."""
    return [Request(request.arrival_s / times, request.input_tokens, request.output_tokens) for request in requests]


async def replay(
    url: str, model: str, requests: Sequence[Request], tiers: Sequence[TierLoad], seed: int
) -> tuple[list[Seen], float]:
    """Send requests at their times; returns what became of each, and the seconds in which they arrived."""
    rng = random.Random(seed)
    chosen = rng.choices(tiers, [tier.share for tier in tiers], k=len(requests))
    prompts = [[rng.randrange(10, 250) for _ in range(request.input_tokens)] for request in requests]
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()

        async def one(request: Request, tier: TierLoad, prompt: list[int]) -> Seen:
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
            return await _send(session, url, model, request, tier, prompt)

        seen = await asyncio.gather(*map(one, requests, chosen, prompts))
    return list(seen), max(request.arrival_s for request in requests)


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, tier: TierLoad, prompt: list[int]
) -> Seen:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first = last = None
    tokens, failed = 0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers={"x-adapt-tier": tier.name}) as response:
            if response.status != 200:
                await response.read()
                return Seen(tier.name, response.status, None, None, 0)
            async for line in response.content:
                if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[5:])
                failed = failed or "error" in chunk
                if chunk.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError):
        return Seen(tier.name, 0, None, None, 0)
    if first is None or last is None or failed:
        return Seen(tier.name, 0 if failed else 200, None, None, 0)
    tpot = (last - first) * 1000 / (tokens - 1) if tokens > 1 else None
    return Seen(tier.name, 200, (first - sent) * 1000, tpot, tokens)


def judge(seen: Sequence[Seen], tiers: Sequence[TierLoad], seconds: float) -> dict[str, dict[str, float | int | None]]:
    """By tier and in `total`: sent, refused, failed, met TTFT, TPOT and both, goodput, percentiles."""
    targets = {tier.name: tier for tier in tiers}
    groups = {tier.name: [one for one in seen if one.tier == tier.name] for tier in tiers} | {"total": list(seen)}
    judged = {}
    for name, group in groups.items():
        ttft = [one.ttft_ms is not None and one.ttft_ms <= targets[one.tier].ttft_ms for one in group]
        tpot = [
            one.ttft_ms is not None and (one.tpot_ms is None or one.tpot_ms <= targets[one.tier].tpot_ms)
            for one in group
        ]
        good = sum(a and b for a, b in zip(ttft, tpot, strict=True))
        judged[name] = {
            "sent": len(group),
            "refused": sum(one.status == 429 for one in group),
            "failed": sum(one.status not in (200, 429) for one in group),
            "met_ttft": sum(ttft),
            "met_tpot": sum(tpot),
            "good": good,
            "goodput_rps": round(good / seconds, 3),
            "attainment": round(good / len(group), 4) if group else None,
            **_percentiles("ttft_ms", [one.ttft_ms for one in group if one.ttft_ms is not None]),
            **_percentiles("tpot_ms", [one.tpot_ms for one in group if one.tpot_ms is not None]),
        }
    return judged


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    if len(values) < 2:
        return {f"{name}_p{percent}": round(values[0], 1) if values else None for percent in (50, 90, 99)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p{percent}": round(cuts[percent - 1], 1) for percent in (50, 90, 99)}


def table(judged: dict[str, dict[str, float | int | None]]) -> str:
    """A line a tier."""
    columns = ("sent", "refused", "failed", "met_ttft", "met_tpot", "good", "goodput_rps", "attainment")
    columns += ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
    rows = [("tier", *columns)] + [(name, *(str(one[column]) for column in columns)) for name, one in judged.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server")
    parser.add_argument("--name", default="server", help="what it is called in the result")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tier", type=parse_tier, action="append", required=True, help="name:share:ttft_ms:tpot_ms")
    parser.add_argument("--rate", type=float, help="requests a second at 1x; without --trace")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the load at 1x (default: 30)")
    parser.add_argument("--input", type=int, default=64, help="prompt tokens, about (default: 64)")
    parser.add_argument("--output", type=int, default=32, help="output tokens, about (default: 32)")
    parser.add_argument("--trace", type=Path, help="a trace CSV to replay instead")
    parser.add_argument("--count", type=int, default=200, help="requests of the trace")
    parser.add_argument("--divide", type=int, default=1, help="its lengths are divided by this")
    parser.add_argument("--times", default="1,2,4", help="multiples of the rate, one run each (default: 1,2,4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to add the result")
    options = parser.parse_args()
    if (options.rate is None) == (options.trace is None):
        parser.error("give --rate or --trace")
    runs = []
    for times in (float(part) for part in options.times.split(",")):
        rng = random.Random(options.seed)
        requests = (
            poisson(options.rate * times, options.seconds, options.input, options.output, rng)
            if options.trace is None
            else faster(read_trace(options.trace, options.count, options.divide), times)
        )
        seen, seconds = asyncio.run(replay(options.url, options.model, requests, options.tier, options.seed))
        judged = judge(seen, options.tier, seconds)
        print(f"{options.name} at {times:g}x, {len(requests)} requests in {seconds:.1f} s\n{table(judged)}", flush=True)
        runs.append({"times": times, "seconds": round(seconds, 2), "tiers": judged})
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.exists() else {"environment": environment()}
        known[options.name] = runs
        write_json(options.json, known)


if __name__ == "__main__":
    main()
