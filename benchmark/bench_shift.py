"""Sequence parallelism, Shift and tensor parallelism of ours beside stock's data and tensor parallelism.

    python benchmark/bench_shift.py --model-path MODEL --vocab 128256 --gpus 4 --threshold 2048 -- STOCK FLAGS

For each input length: TTFT and TPOT of requests that come one at a time, and the throughput of many at a time. With
`--bursts`: those of all requests of a steady stream with bursts, and the most tokens/s in two seconds. Beside it the
bandwidth of an all-to-all and of a sum between the GPUs. Systems: `stock-dp`, `stock-tp`; `dp`, `tp` (one server
with --adapt-sp off), `sp` (--adapt-sp 0, every batch), `shift` (--adapt-sp THRESHOLD). CUDA graphs keep the mode in
which they were captured, so sp and shift are servers of their own. Systems run in the order in which they are named;
one that fails, or whose prompts did not run as they were to, is noted and the run ends with an error. The result is
written whatever happens, SIGTERM included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from bursts import Bursts, bursty, peak_tokens_per_s
from layouts import Layouts
from load import Request, Timing, run_load, summarize
from server import Server, environment, exit_on_sigterm, write_json
from sglang_adapt.core.layout import uniform_layout
from shift_collectives import measure_collectives

SYSTEMS = ("stock-dp", "stock-tp", "dp", "tp", "sp", "shift")
CHECKED_PROMPTS, CHECKED_TOKENS = 8, 32
PEAK_WINDOW_S = 2.0


class NotRunError(RuntimeError):
    """A system did not run as it was asked to, so that its figures would be another one's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the demo model, for a run without GPUs")
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are drawn below this")
    parser.add_argument("--gpus", type=int, default=2, help="of each system")
    parser.add_argument(
        "--smallest", type=int, default=1, help="TP size beside that of all GPUs; 2 of 4: sp runs as SP 2 x TP 2"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--threshold", type=int, default=2048, help="tokens of a batch, for shift")
    parser.add_argument("--input-tokens", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--output-tokens", type=int, default=250)
    parser.add_argument("--alone", type=int, default=4, help="requests that come one at a time")
    parser.add_argument("--peak-tokens", type=int, default=400_000, help="input tokens of the requests of a peak load")
    parser.add_argument("--peak-concurrency", type=int, default=64, help="of those, at most so many at a time")
    parser.add_argument("--bursts", type=int, default=0, help="of the bursty load (0: without it)")
    parser.add_argument("--burst-requests", type=int, default=60, help="of each burst")
    parser.add_argument("--burst-rate", type=float, default=30.0, help="requests/s in a burst")
    parser.add_argument("--burst-every-s", type=float, default=15.0, help="from one burst to the next")
    parser.add_argument("--steady-rate", type=float, default=1.0, help="requests/s beside the bursts")
    parser.add_argument("--burst-input-tokens", type=int, default=2048, help="of each request of the bursty load")
    parser.add_argument("--collective-bytes", type=int, nargs="*", default=[1 << 16, 1 << 20, 1 << 24, 1 << 28])
    parser.add_argument("--virtual", action="store_true", help="virtual GPUs (no CUDA)")
    parser.add_argument("--ours-flags", default="", help="further flags for ours alone, as one string")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_shift.json"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags for all servers")
    options = parser.parse_args()
    result: dict[str, Any] = {
        **environment(),
        "gpus": options.gpus,
        "options": {name: str(value) for name, value in vars(options).items()},
        "rows": [],
        "errors": [],
    }
    # A run that is ended early keeps what it has.
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        if options.collective_bytes:
            result["collectives"] = measure_collectives(options.gpus, options.collective_bytes)
        _measure(options, result)
    finally:
        write_json(options.out, result)
        _print(result["rows"], options)
    for error in result["errors"]:
        print(f"FAILED {error}")
    if result["errors"]:
        raise SystemExit(1)


def _measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Each system in turn; one that fails is noted, and the next one tried."""
    answers: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for name, module, own, systems in _servers(options):
            try:
                with Server(name, module, own, logs / f"{name}.log", _fair(options)) as server:
                    for system in systems:
                        if module == "sglang_adapt.launch_server":
                            asyncio.run(_go_to(server.url, _layout(system, options)))
                        answers[system] = asyncio.run(_answers(server.url, options.vocab))
                        result["same_tokens_as_stock_tp"] = _agreement(answers)
                        rows = [{"system": system, **row} for row in _rows(server, system, options)]
                        if system in ("tp", "sp", "shift"):
                            rows[-1]["batches"] = _batches(server.url, system, options.gpus)
                        result["rows"] += rows
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                result["errors"].append(f"{name}: {type(error).__name__}: {error}")


def _fair(options: argparse.Namespace) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} if options.virtual else {}


def _layout(system: str, options: argparse.Namespace) -> str:
    return str(uniform_layout(options.smallest if system == "dp" else options.gpus, options.gpus))


def _servers(options: argparse.Namespace) -> list[tuple[str, str, list[str], list[str]]]:
    """Name, module, flags and systems of each server, in the order of `--systems`."""
    gpus = options.gpus
    flags = [flag for flag in options.flags if flag != "--"]
    stock = [*_model(options), *flags]
    # The TP size that has all GPUs, and one to share the weights with.
    ours = [
        *_model(options),
        "--adapt-tp-sizes",
        f"{options.smallest},{gpus}",
        *(["--adapt-virtual-gpus", str(gpus)] if options.virtual else []),
        *shlex.split(options.ours_flags),
        *flags,
    ]
    servers = []
    for name, module, own, served in (
        ("stock-dp", "sglang.launch_server", [*stock, "--dp-size", str(gpus)], ("stock-dp",)),
        ("stock-tp", "sglang.launch_server", [*stock, "--tp-size", str(gpus)], ("stock-tp",)),
        ("ours-off", "sglang_adapt.launch_server", [*ours, "--adapt-sp", "off"], ("dp", "tp")),
        ("ours-sp", "sglang_adapt.launch_server", [*ours, "--adapt-sp", "0"], ("sp",)),
        ("ours-shift", "sglang_adapt.launch_server", [*ours, "--adapt-sp", str(options.threshold)], ("shift",)),
    ):
        systems = [system for system in options.systems if system in served]
        if systems:
            first = [] if module == "sglang.launch_server" else ["--adapt-layout", _layout(systems[0], options)]
            servers.append((name, module, [*own, *first], systems))
    return sorted(servers, key=lambda server: options.systems.index(server[3][0]))


def _model(options: argparse.Namespace) -> list[str]:
    if options.model_path is not None:
        return ["--model-path", options.model_path]
    from sglang_adapt.demo import demo_model_path

    return ["--model-path", str(demo_model_path())]


async def _go_to(url: str, layout: str) -> None:
    async with aiohttp.ClientSession() as session:
        await Layouts(session, url).switch(layout)


async def _answers(url: str, vocab: int) -> list[list[int]]:
    """Greedy tokens of some prompts, to compare systems by."""
    rng = random.Random(11)
    prompts = [[rng.randrange(10, vocab) for _ in range(40 * (1 + number))] for number in range(CHECKED_PROMPTS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": CHECKED_TOKENS, "temperature": 0, "ignore_eos": True},
        }
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            return [answer["output_ids"] for answer in await response.json()]


def _agreement(answers: dict[str, list[list[int]]]) -> dict[str, float]:
    """Share of the tokens of each system that are those of stock at the same TP size; in half precision below 1."""
    stock = answers.get("stock-tp")
    if stock is None:
        return {}
    return {
        system: round(
            sum(a == b for one, other in zip(got, stock, strict=True) for a, b in zip(one, other, strict=True))
            / (CHECKED_PROMPTS * CHECKED_TOKENS),
            4,
        )
        for system, got in answers.items()
    }


def _rows(server: Server, system: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for tokens in options.input_tokens:
        request = Request(0, tokens, options.output_tokens)
        count = max(options.gpus, min(4 * options.peak_concurrency, options.peak_tokens // tokens))
        # One of these first, with another prompt, so that nothing is compiled while it is timed.
        asyncio.run(run_load(server.url, [request], options.vocab, 1, seed=99))
        for load, requests, at_a_time in (
            ("alone", [request] * options.alone, 1),
            ("peak", [request] * count, min(options.peak_concurrency, count)),
        ):
            timings, seconds = asyncio.run(run_load(server.url, requests, options.vocab, at_a_time, seed=tokens))
            summary = summarize(timings, seconds)
            _check(timings, f"{system}, {tokens} tokens, {load}", server)
            all_tokens = summary["completed"] * (tokens + options.output_tokens) / seconds
            rows.append({"input_tokens": tokens, "load": load, "tokens_per_s": round(all_tokens, 1), **summary})
            print(system, rows[-1], flush=True)
    if options.bursts:
        rows.append(_bursty_row(server, system, options))
        print(system, rows[-1], flush=True)
    return rows


def _bursty_row(server: Server, system: str, options: argparse.Namespace) -> dict[str, Any]:
    load = Bursts(
        options.bursts, options.burst_requests, options.burst_rate, options.burst_every_s, options.steady_rate
    )
    tokens = options.burst_input_tokens
    requests = bursty(load, tokens, options.output_tokens, seed=7)
    # One of these at once and at a time first, with other prompts, so that nothing is compiled while it is timed.
    for at_a_time in (options.peak_concurrency, 1):
        asyncio.run(run_load(server.url, requests[:at_a_time], options.vocab, at_a_time, seed=98 + at_a_time))
    timings, seconds = asyncio.run(run_load(server.url, requests, options.vocab, seed=8))
    _check(timings, f"{system}, bursts", server)
    return {
        "input_tokens": tokens,
        "load": "bursts",
        "peak_tokens_per_s": round(peak_tokens_per_s(requests, timings, PEAK_WINDOW_S), 1),
        **summarize(timings, seconds),
    }


def _check(timings: list[Timing], what: str, server: Server) -> None:
    errors = sorted({timing.error for timing in timings if timing.error})
    if errors:
        raise NotRunError(f"{what}: {errors[0]}\n{server.tail()}")


def _batches(url: str, system: str, gpus: int) -> dict[str, Any] | None:
    """How the engine's batches ran, checked to be what the system's figures are said to be of."""
    with urllib.request.urlopen(f"{url}/adapt/layout", timeout=60) as answer:
        entry = json.load(answer)["engines"][f"tp{gpus}@0-{gpus - 1}"]
    said: dict[str, Any] | None = entry.get("sequence")
    if system == "tp":
        if said is not None:
            raise NotRunError(f"tp may run sequence-parallel: {said}")
        return None
    if said is None or not said["batches"]["sp"]["prefill"] or said["unable"]:
        raise NotRunError(f"{system} did not run its prompts sequence-parallel: {said or entry}")
    if system == "sp" and any(said["batches"]["tp"].values()):
        raise NotRunError(f"sp ran batches tensor-parallel: {said}")
    return said


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{'input':>7} {'system':>9} {'TTFT ms':>9} {'TPOT ms':>8} {'peak tokens/s':>14}")
    for tokens in options.input_tokens:
        for system in options.systems:
            alone, peak = (
                next((row for row in rows if (row["system"], row["input_tokens"], row["load"]) == key), None)
                for key in ((system, tokens, "alone"), (system, tokens, "peak"))
            )
            if alone is None or peak is None:
                continue
            print(
                f"{tokens:>7} {system:>9} {alone['ttft_ms_p50']:9.1f} {alone['tpot_ms_p50']:8.2f} "
                f"{peak['tokens_per_s']:14.0f}"
            )
    for row in rows:
        if row["load"] == "bursts":
            print(
                f" bursts {row['system']:>9} {row['ttft_ms_p50']:9.1f} {row['tpot_ms_p50']:8.2f} "
                f"{row['peak_tokens_per_s']:14.0f} at most; {row['output_tokens_per_s']:.0f} output tokens/s"
            )


if __name__ == "__main__":
    main()
