r"""Goodput by tier: replays arrivals with tiers against any OpenAI-compatible server, at one rate or several.

A request is good if it met both targets of its tier; goodput is good requests a second and, as a share, by those sent:
one that is refused, fails or is late counts as not met. Clocks start when a request is sent. The server is told the
tier by `x-adapt-tier`, which others ignore, so that stock and sglang_adapt get the same requests.

    python benchmark/bench_goodput.py --url http://127.0.0.1:30000 --model demo --rate 4 --times 1,2,4 \
        --tier strict:1:400:40 --tier loose:1:2000:80 --input 64 --output 32 --seconds 30 --json out.json

Whole systems, each started and ended, at several rates in one run: `compare_goodput.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from load import Request, poisson_arrivals, read_trace
from server import environment, write_json
from sglang_adapt.core.urls import KEEP_ALIVE_S
from sglang_adapt.simulate.outcome import aligned

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
    """What became of one request; times in ms, None where there were no such tokens; `at_s` from the load's start."""

    tier: str
    status: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens: int
    at_s: float = 0.0


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
    requests = []
    for at in poisson_arrivals(rate, seconds, rng):
        lengths = (max(1, round(length * rng.uniform(0.5, 1.5))) for length in (input_tokens, output_tokens))
        requests.append(Request(at, *lengths))
    return requests


def faster(requests: Sequence[Request], times: float) -> list[Request]:
    """The same requests, arriving `times` as fast."""
    return [Request(request.arrival_s / times, request.input_tokens, request.output_tokens) for request in requests]


async def replay(
    url: str | Mapping[str, str],
    model: str,
    requests: Sequence[Request],
    tiers: Sequence[TierLoad],
    seed: int,
    vocab: int = 250,
    token_ids: bool = False,
    prompts_of: str = "",
) -> tuple[list[Seen], float]:
    """Send requests at their times; returns what became of each, and the seconds in which they arrived.

    Args:
        url: of the server, or of each tier's.
        vocab: token ids are drawn below this.
        token_ids: ask sglang's `/generate`, which needs no tokenizer, and not `/v1/completions`.
        prompts_of: a name of this run. Another one has prompts of the same lengths and other tokens: a server that has
            served one run must not find the prompts of the next in its prefix cache.
    """
    chosen = random.Random(seed).choices(tiers, [tier.share for tier in tiers], k=len(requests))
    rng = random.Random(f"{seed} {prompts_of}")
    prompts = [[rng.randrange(10, vocab) for _ in range(request.input_tokens)] for request in requests]
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S), timeout=timeout
    ) as session:
        start = time.perf_counter()

        async def one(request: Request, tier: TierLoad, prompt: list[int]) -> Seen:
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
            if token_ids:
                path, body = "/generate", _generate_body(request, prompt)
            else:
                path, body = "/v1/completions", _completions_body(model, request, prompt)
            base = url if isinstance(url, str) else url[tier.name]
            return replace(await _send(session, base + path, body, tier), at_s=request.arrival_s)

        seen = await asyncio.gather(*map(one, requests, chosen, prompts))
    return list(seen), max(request.arrival_s for request in requests)


def _completions_body(model: str, request: Request, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _generate_body(request: Request, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": request.output_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": True}


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any], tier: TierLoad) -> Seen:
    sent = time.perf_counter()
    first = last = None
    tokens, failed = 0, False
    try:
        async with session.post(url, json=body, headers={"x-adapt-tier": tier.name}) as response:
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
                if "meta_info" in chunk and chunk["meta_info"]["completion_tokens"] > tokens:
                    last = time.perf_counter()
                    first = first or last
                    tokens = chunk["meta_info"]["completion_tokens"]
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError):
        return Seen(tier.name, 0, None, None, 0)
    if first is None or last is None or failed:
        return Seen(tier.name, 0 if failed else 200, None, None, 0)
    tpot = (last - first) * 1000 / (tokens - 1) if tokens > 1 else None
    return Seen(tier.name, 200, (first - sent) * 1000, tpot, tokens)


def met(one: Seen, tier: TierLoad) -> tuple[bool, bool]:
    """Whether a request met the targets of its tier: TTFT, TPOT (which one token meets)."""
    if one.ttft_ms is None:
        return False, False
    return one.ttft_ms <= tier.ttft_ms, one.tpot_ms is None or one.tpot_ms <= tier.tpot_ms


def judge(seen: Sequence[Seen], tiers: Sequence[TierLoad], seconds: float) -> dict[str, dict[str, float | int | None]]:
    """By tier and in `total`: sent, refused, failed, met TTFT, TPOT and both, goodput, percentiles."""
    targets = {tier.name: tier for tier in tiers}
    groups = {tier.name: [one for one in seen if one.tier == tier.name] for tier in tiers} | {"total": list(seen)}
    judged = {}
    for name, group in groups.items():
        both = [met(one, targets[one.tier]) for one in group]
        good = sum(ttft and tpot for ttft, tpot in both)
        judged[name] = {
            "sent": len(group),
            "refused": sum(one.status == 429 for one in group),
            "failed": sum(one.status not in (200, 429) for one in group),
            "met_ttft": sum(ttft for ttft, _ in both),
            "met_tpot": sum(tpot for _, tpot in both),
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
    columns = ["sent", "refused", "failed", "met_ttft", "met_tpot", "good", "goodput_rps", "attainment"]
    columns += ["ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"]
    rows = [("tier", *columns)] + [(name, *(str(one[column]) for column in columns)) for name, one in judged.items()]
    return aligned(rows)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say what is sent."""
    parser.add_argument("--tier", type=parse_tier, action="append", required=True, help="name:share:ttft_ms:tpot_ms")
    parser.add_argument("--rate", type=float, help="requests a second at 1x; without --trace")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the load, at each rate (default: 30)")
    parser.add_argument("--input", type=int, default=64, help="prompt tokens, about (default: 64)")
    parser.add_argument("--output", type=int, default=32, help="output tokens, about (default: 32)")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="trace CSVs to replay instead, one by one")
    parser.add_argument("--count", type=int, help="requests of a trace (default: those of --seconds, at each rate)")
    parser.add_argument("--divide", type=int, default=1, help="its lengths are divided by this")
    parser.add_argument("--longest", type=int, default=1 << 30, help="leave out what is longer, with its output")
    parser.add_argument("--times", default="1,2,4", help="multiples of the rate, one run each (default: 1,2,4)")
    parser.add_argument("--vocab", type=int, default=250, help="token ids are drawn below this (default: 250)")
    parser.add_argument("--token-ids", action="store_true", help="ask /generate, which needs no tokenizer")
    parser.add_argument("--seed", type=int, default=0)


def check_load(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message if the flags say nothing or two things."""
    if (options.rate is None) == (not options.trace):
        parser.error("give --rate or --trace")


@dataclass(frozen=True)
class Load:
    """One load: the name of its trace or `Poisson`, and the multiple of its rate."""

    name: str
    times: float
    trace: Path | None = None


def loads_of(options: argparse.Namespace) -> list[Load]:
    """All loads that the flags ask for, in order."""
    return [
        Load("Poisson" if trace is None else trace.stem, float(times), trace)
        for trace in options.trace or [None]
        for times in options.times.split(",")
    ]


def requests_of(load: Load, options: argparse.Namespace) -> list[Request]:
    """What is sent of a load; the same at each call."""
    if load.trace is None:
        rng = random.Random(options.seed)
        return poisson(options.rate * load.times, options.seconds, options.input, options.output, rng)
    requests = faster(read_trace(load.trace, options.count, options.divide), load.times)
    if options.count is None:
        requests = [one for one in requests if one.arrival_s < options.seconds]
    return [one for one in requests if one.input_tokens + one.output_tokens <= options.longest]


def measure(name: str, url: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Send all loads to a server, one after the other; a dict for each."""
    runs = []
    for load in loads_of(options):
        requests = requests_of(load, options)
        seen, seconds = asyncio.run(
            replay(
                url,
                model,
                requests,
                options.tier,
                options.seed,
                options.vocab,
                options.token_ids,
                f"{name} {load.name} {load.times:g}",
            )
        )
        judged = judge(seen, options.tier, seconds)
        print(
            f"{name}, {load.name} at {load.times:g}x, {len(requests)} requests in {seconds:.1f} s\n{table(judged)}",
            flush=True,
        )
        runs.append({"load": load.name, "times": load.times, "seconds": round(seconds, 2), "tiers": judged})
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server")
    parser.add_argument("--name", default="server", help="what it is called in the result")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", type=Path, help="where to add the result")
    add_load_flags(parser)
    options = parser.parse_args()
    check_load(parser, options)
    runs = measure(options.name, options.url, options.model, options)
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.exists() else {"environment": environment()}
        known[options.name] = runs
        write_json(options.json, known)


if __name__ == "__main__":
    main()
