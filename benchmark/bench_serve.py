"""Ours beside stock sglang with the same static layout, in one run: TTFT, TPOT, throughput, time to serve.

    python benchmark/bench_serve.py --model-path MODEL --gpus 2 --layouts tp1@0,tp1@1 tp2@0-1 -- STOCK FLAGS

Stock serves `tp1@0,tp1@1` as `--dp-size 2` and `tp2@0-1` as `--tp-size 2`. For each layout both systems are started
in turn; the order alternates between repeats. Prints a table with the ratio ours/stock and writes JSON.

Two kinds of load: closed loops (`--concurrency`), whose requests fall into step, so that TTFT depends on which of two
rhythms a run happens to find, and Poisson arrivals (`--rate`, requests/s), the same for both systems.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import tempfile
from pathlib import Path

import aiohttp

from layouts import Layouts
from load import Request, poisson_arrivals, run_load, summarize
from server import Server, environment, write_json

METRICS = ("ttft_ms_p50", "tpot_ms_p50", "latency_ms_p50", "output_tokens_per_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["tp1@0,tp1@1", "tp2@0-1"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--vocab", type=int, required=True, help="token ids are drawn below this")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=4, help="requests per unit of concurrency")
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests/s of loads with Poisson arrivals")
    parser.add_argument("--rate-seconds", type=float, default=12.0, help="length of each of those")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--virtual", action="store_true", help="virtual GPUs (no CUDA)")
    parser.add_argument("--start-method", default="forkserver", help="for ours: --adapt-start-method")
    parser.add_argument(
        "--one-server", action="store_true", help="start ours once and switch its layout, as a user would"
    )
    parser.add_argument("--ours-flags", default="", help="further flags for ours alone, as one string")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_serve.json"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags for both servers")
    options = parser.parse_args()
    flags = [flag for flag in options.flags if flag != "--"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for repeat in range(options.repeats):
            for layout in options.layouts:
                systems = ["ours", "stock"] if repeat % 2 == 0 else ["stock", "ours"]
                for system in systems:
                    if system == "ours" and options.one_server:
                        # All layouts are measured when the first one's turn is.
                        layouts = options.layouts if layout == options.layouts[0] else []
                    else:
                        layouts = [layout]
                    if layouts:
                        rows += _measure(system, layouts, flags, options, logs, repeat)
    table = _table(rows, options)
    write_json(
        options.out,
        {
            **environment(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "rows": rows,
            "ratios": table,
        },
    )


def _loads(options: argparse.Namespace) -> list[tuple[str, list[Request], int | None]]:
    """Name, requests, and concurrency of a closed loop (None: at their arrival times) of each load."""
    shape = options.input_tokens, options.output_tokens
    loads: list[tuple[str, list[Request], int | None]] = [
        (f"{concurrency} at a time", [Request(0, *shape)] * (options.requests * concurrency), concurrency)
        for concurrency in options.concurrency
    ]
    for rate in options.rate:
        arrivals = poisson_arrivals(rate, options.rate_seconds, random.Random(5))
        requests = [Request(at, *shape) for at in arrivals]
        loads.append((f"{rate:g} requests/s", requests, None))
    return loads


def _measure(
    system: str, layouts: list[str], flags: list[str], options: argparse.Namespace, logs: Path, repeat: int
) -> list[dict]:
    layout = layouts[0]
    engines = layout.split(",")
    tp = options.gpus // len(engines)
    if system == "stock":
        own = ["--tp-size", str(tp), *(["--dp-size", str(len(engines))] if len(engines) > 1 else [])]
        module = "sglang.launch_server"
    else:
        own = [
            "--adapt-layout",
            layout,
            *shlex.split(options.ours_flags),
            *(["--adapt-start-method", options.start_method] if options.start_method else []),
            *(["--adapt-virtual-gpus", str(options.gpus)] if options.virtual else []),
        ]
        module = "sglang_adapt.launch_server"
    rows = []
    # On a CPU stock gets what ours sets itself: a thread a rank, and idle ranks that sleep.
    fair = {"OMP_NUM_THREADS": "1"} if options.virtual else {}
    with Server(f"{system} {layout}", module, [*flags, *own], logs / f"{system}-tp{tp}-{repeat}.log", fair) as server:
        for number, now in enumerate(layouts):
            if number:
                asyncio.run(_go_to(server.url, now))
            rows += [
                {"system": system, "layout": now, "repeat": repeat, "start_s": server.start_s, **row}
                for row in _rows(server, f"{system} {now}", options, repeat)
            ]
    return rows


async def _go_to(url: str, layout: str) -> None:
    async with aiohttp.ClientSession() as session:
        print((await Layouts(session, url).switch(layout)).report, flush=True)


def _rows(server: Server, name: str, options: argparse.Namespace, repeat: int) -> list[dict]:
    rows = []
    for load, requests, concurrency in _loads(options):
        # One round to warm up caches and graphs of these shapes, with other prompts.
        asyncio.run(run_load(server.url, requests[: concurrency or 32], options.vocab, concurrency or 32, seed=99))
        timings, seconds = asyncio.run(run_load(server.url, requests, options.vocab, concurrency, seed=repeat))
        errors = {timing.error for timing in timings if timing.error}
        if errors:
            print(f"{server.name}: {errors}\n{server.tail()}", flush=True)
        summary = summarize(timings, seconds)
        print(name, load, summary, flush=True)
        rows.append({"load": load, **summary})
    return rows


def _table(rows: list[dict], options: argparse.Namespace) -> list[dict]:
    table = []
    print(f"{'layout':14} {'load':>16} {'metric':>20} {'stock':>10} {'ours':>10} {'ours/stock':>10}")
    for layout in options.layouts:
        for load in dict.fromkeys(row["load"] for row in rows):
            for metric in METRICS:
                pair = {
                    system: statistics.median(
                        row[metric]
                        for row in rows
                        if (row["system"], row["layout"], row["load"]) == (system, layout, load)
                    )
                    for system in ("stock", "ours")
                }
                ratio = round(pair["ours"] / pair["stock"], 4)
                table.append({"layout": layout, "load": load, "metric": metric, **pair, "ratio": ratio})
                print(f"{layout:14} {load:>16} {metric:>20} {pair['stock']:10.2f} {pair['ours']:10.2f} {ratio:10.3f}")
    return table


if __name__ == "__main__":
    main()
