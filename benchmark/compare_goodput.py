r"""Goodput of whole systems under the same load, each started and ended in turn: ours, stock sglang, stock by tier.

    auto                    ours, the layout follows the traffic
    static:tp2              ours with one layout, engines of one TP size (or static:tp2@0-1,tp1@2,tp1@3)
    stock:tp2               stock, as many engines as fit (--dp-size)
    split:chat=tp2@0-1/batch=tp1@2-3   stock, a deployment a tier on GPUs of its own
    ablation:N              ours with mechanisms switched off (--adapt-ablate-* of the server): Nitsum's steps, below

The steps of the ablation (Nitsum, 4.2.1), each a server of its own:

    ablation:1              the smallest TP size, requests go on as they come (TP 1; or ablation:1:tp2)
    ablation:2:tp1@0:prefill,tp1@1:decode          the same with fixed roles
    ablation:3:tp2          the batch rule; give each TP size, the best of them is the step
    ablation:4:chat=tp2@0-1/batch=tp1@2,tp1@3      the batch rule, each tier has these engines of its own
    ablation:5:chat=tp2@0-1/batch=tp1@2,tp1@3      + the scheduler by targets, on the same engines, which tiers share
    ablation:6              + the layout follows the traffic, but a switch reads weights again and copies page by page
    ablation:6-warm         the same, weights are kept (for --load-format dummy, which has none to read)
    ablation:7              all of it

`python -m sglang_adapt.simulate --study ablation` has the same steps, and finds the best layouts of 2 to 5 for a load.

Every system gets the same requests with the same tiers at every rate, `--repeats` times, each time another one first.
A profile of ours is measured at the start. What is in the result already is not measured again, so that a comparison
goes on where it was interrupted. What both get stands after `--`.

One virtual GPU (about 5 minutes; 1x is to be what stock just meets, which on two quiet cores is 16 requests/s or more):

    python benchmark/compare_goodput.py --gpus 1 --virtual --systems static:tp1 stock:tp1 --rate 20 --input 128 \
        --output 48 --seconds 30 --tier strict:1:400:30 --tier loose:1:2000:80 --reject strict --json goodput_cpu.json

Two GPUs, Llama-3.1-8B shapes, Nitsum's targets, the first minute of the ServeGen windows at 1x, 2x and 4x
(MODELS/llama-3.1-8b has a config.json alone, TRACES is the folder of the traces):

    python benchmark/compare_goodput.py --gpus 2 --systems auto static:tp1 static:tp2 stock:tp1 stock:tp2 \
        split:strict=tp1@0/loose=tp1@1 --token-ids --vocab 100000 --times 1,2,4 --count 360 \
        --trace TRACES/servegen_code.csv TRACES/servegen_conversation.csv --longest 16384 \
        --tier strict:1:300:10 --tier loose:1:300:20 --reject strict --json goodput_2gpu.json --plots plots \
        -- --model-path MODELS/llama-3.1-8b --load-format dummy --skip-tokenizer-init --attention-backend triton \
        --sampling-backend pytorch --max-total-tokens 120000

With more cores than a server needs, clients have their own (`--server-cpus 0,1 --client-cpus 2-15`); what the server's
processes and the client took is in each run (`cpu_s`).

How near the simulator comes to the result: `python -m sglang_adapt.simulate --check RESULT.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench_goodput import (
    Load,
    Seen,
    add_load_flags,
    check_load,
    judge,
    loads_of,
    met,
    replay,
    requests_of,
    table,
)
from cpus import Cpus, add_cpu_flags, chosen_cpus, cpu_s, cpu_since, on_cpus
from goodput.plots import NoPlotsError, draw, require_matplotlib
from goodput.schedule import OtherComparisonError, Turn, left_s, runs_done, turns
from goodput.systems import AUTO, Common, Kind, ServerPlan, System, parse_system, servers_of, to_profile, urls_of
from goodput.timeline import timeline, watch_layout, watch_plans
from layouts import Layouts
from load import Request
from server import Server, environment, write_json
from sglang_adapt.demo import demo_model_path
from sglang_adapt.simulate.outcome import aligned

_DEMO = ("--model-path", str(demo_model_path()), "--dtype", "float32", "--max-total-tokens", "32768")
_WARM_UP_REQUESTS = 4


def main() -> None:
    parser, options, both = _parse()
    cpus = chosen_cpus(parser, options)
    try:
        systems = [parse_system(text, options.gpus, [tier.name for tier in options.tier]) for text in options.systems]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    result = json.loads(options.json.read_text()) if options.json.exists() else {}
    flags = {"both": both, "ours": options.ours_flags, "stock": options.stock_flags}
    asked = {"gpus": options.gpus, "virtual": options.virtual, "load": load_of(options), "flags": flags}
    asked["cpus"] = cpus.told()
    try:
        if options.plots is not None:
            require_matplotlib()
        done = runs_done(result, asked, options.json)
    except (OtherComparisonError, NoPlotsError) as error:
        parser.error(str(error))
    loads = {(load.name, load.times): load for load in loads_of(options)}
    todo = list(turns([system.name for system in systems], list(loads), options.repeats, done))
    result = {"environment": environment(), **asked, "systems": {}, **result}
    if done:
        left = sum(len(turn.loads) for turn in todo)
        print(f"{options.json}: goes on, {sum(map(len, done.values()))} runs are there, {left} are left", flush=True)
    with (
        on_cpus(cpus.client),
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Comparison(options, both, result, Path(folder), cpus)) as comparison,
    ):
        by_name = {system.name: system for system in systems}
        if any(by_name[turn.system].is_ours for turn in todo):
            comparison.profile()
        progress = Progress(sum(len(turn.loads) for turn in todo))
        for turn in todo:
            comparison.measure(by_name[turn.system], turn, [loads[name] for name in turn.loads], progress)
    print(overview(result))
    if options.plots is not None:
        for path in draw(result, options.plots):
            print(path)


class Progress:
    """Tells which run begins, and how long the others will take.

    Args:
        of: runs.
    """

    def __init__(self, of: int) -> None:
        self._of = of
        self._over = 0
        self._begun = time.monotonic()

    def begins(self, what: str) -> None:
        """A run begins."""
        left = ""
        if self._over:
            seconds = left_s(time.monotonic() - self._begun, self._over, self._of - self._over)
            left = f", about {seconds / 60:.0f} min left"
        self._over += 1
        print(f"[{self._over} of {self._of}{left}] {what}", flush=True)


class Comparison:
    """Starts servers, measures them, and writes the result after each run.

    Args:
        options: the command line.
        both: flags of ours and stock.
        result: what is known so far; grows.
        folder: for files of this run.
        cpus: where all that runs.
    """

    def __init__(
        self, options: argparse.Namespace, both: Sequence[str], result: dict[str, Any], folder: Path, cpus: Cpus
    ) -> None:
        self._options = options
        self._cpus = cpus
        self._result = result
        self._kept = contextlib.ExitStack()
        self._ours: Server | None = None
        self._logs = options.logs or folder
        self._logs.mkdir(parents=True, exist_ok=True)
        self._common = Common(
            options.gpus,
            (*(_DEMO if options.virtual else ()), *both),
            tuple(shlex.split(options.ours_flags)),
            tuple(shlex.split(options.stock_flags)),
            str(write_tiers(options, folder)),
            str(options.profile or folder / "profile.json"),
            options.virtual,
        )

    def profile(self) -> None:
        """Have a profile of ours at hand: the one that is given, that of the result, or a new one."""
        path = Path(self._common.profile)
        if self._options.profile is None and "profile" in self._result:
            path.write_text(json.dumps(self._result["profile"]))
        elif self._options.profile is None:
            longest = "512" if self._common.virtual else "16500"
            with self._server("profile", to_profile(self._common)) as server:
                command = [sys.executable, "-m", "sglang_adapt.profile", "--url", server.url, "--output", str(path)]
                sizes = ["--longest", longest, "--repeats", "3"]
                subprocess.run([*command, *sizes], check=True)
        self._result["profile"] = json.loads(path.read_text())
        write_json(self._options.json, self._result)

    def measure(self, system: System, turn: Turn, loads: Sequence[Load], progress: Progress) -> None:
        """Start a system, measure it under each load, end it."""
        # One GPU has one layout; a server that chooses among layouts does not start there.
        shared = system.may_share and self._options.one_server and self._options.gpus > 1
        plans = servers_of(AUTO if shared else system, self._common)
        told = self._result["systems"].setdefault(
            system.name, {"kind": system.kind, "layout": system.layout, "servers": [], "runs": []}
        )
        if system.kind is Kind.ABLATION:
            told["ablation"] = list(system.ablation.flags)
        told["servers"] = [" ".join([plan.module, *plan.flags]) for plan in plans]
        with contextlib.ExitStack() as stack:
            if shared:
                servers = [self._shared(plans[0], system.layout or AUTO.name)]
            else:
                self.close()
                names = [f"{system.name}_{plan.tier}_{turn.repeat}" for plan in plans]
                servers = [
                    stack.enter_context(self._server(name, plan)) for name, plan in zip(names, plans, strict=True)
                ]
            tiers = [tier.name for tier in self._options.tier]
            urls = urls_of(plans, [server.url for server in servers], tiers)
            if system.is_ours:
                told["engines"] = engines_of(servers[0].url)
            asyncio.run(_warm_up(urls, self._options))
            for load in loads:
                progress.begins(f"{system.name}, {load.name} at {load.times:g}x, repeat {turn.repeat + 1}")
                name = f"{system.name} {load.name} {load.times:g} {turn.repeat}"
                before, client_s = [cpu_s(server.pid) for server in servers], time.process_time()
                run = asyncio.run(_measure(system, urls, requests_of(load, self._options), self._options, name))
                spent = [cpu_since(server.pid, was) for server, was in zip(servers, before, strict=True)]
                run["cpu_s"] = {"client": round(time.process_time() - client_s, 3), "servers": spent}
                print(table(run["tiers"]), flush=True)
                told["runs"].append({"load": load.name, "times": load.times, "repeat": turn.repeat, **run})
                write_json(self._options.json, self._result)

    def _shared(self, plan: ServerPlan, layout: str) -> Server:
        """The one server of all systems of ours, which is started if need be, after it was told this layout."""
        if self._ours is None:
            self._ours = self._kept.enter_context(self._server("ours", plan))
        asyncio.run(_order(self._ours.url, layout))
        return self._ours

    def close(self) -> None:
        """End the server of all systems of ours, if it runs."""
        self._ours = None
        self._kept.close()

    def _server(self, name: str, plan: ServerPlan) -> Server:
        # On a CPU stock gets what ours sets itself: a thread a rank.
        variables = {"OMP_NUM_THREADS": "1"} if self._common.virtual else {}
        file = "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in name)
        log = self._logs / f"{file}.log"
        return Server(name, plan.module, list(plan.flags), log, variables, cpus=self._cpus.server)


async def _order(url: str, layout: str) -> None:
    async with aiohttp.ClientSession() as session:
        await Layouts(session, url).switch(layout)


async def _warm_up(urls: Mapping[str, str], options: argparse.Namespace) -> None:
    """A few requests through every server, which nobody counts."""
    requests = [Request(0.0, options.input, options.output)] * (_WARM_UP_REQUESTS * len(options.tier))
    for tier in options.tier:
        await replay(urls, "demo", requests, [tier], options.seed, options.vocab, options.token_ids)


async def _measure(
    system: System, urls: Mapping[str, str], requests: Sequence[Request], options: argparse.Namespace, name: str
) -> dict[str, Any]:
    """One run: the seconds in which requests arrived, figures by tier, and the timeline if the system is ours."""
    url = next(iter(urls.values()))
    layouts = asyncio.create_task(watch_layout(url)) if system.is_ours else None
    plans = asyncio.create_task(watch_plans(url)) if system.is_ours else None
    seen, seconds = await replay(
        urls, "demo", requests, options.tier, options.seed, options.vocab, options.token_ids, name
    )
    run: dict[str, Any] = {"seconds": round(seconds, 2), "tiers": judge(seen, options.tier, seconds)}
    if layouts is not None and plans is not None:
        layouts.cancel()
        plans.cancel()
        run["timeline"] = timeline(await layouts, await plans, [one.at_s for one in seen], _good(seen, options))
    return run


def _good(seen: Sequence[Seen], options: argparse.Namespace) -> list[bool]:
    tiers = {tier.name: tier for tier in options.tier}
    return [all(met(one, tiers[one.tier])) for one in seen]


def write_tiers(options: argparse.Namespace, folder: Path) -> Path:
    """The tiers of the load as a file for `--adapt-slo-config`."""
    tiers = [
        {
            "name": tier.name,
            "ttft_ms": tier.ttft_ms,
            "tpot_ms": tier.tpot_ms,
            "weight": options.weight.get(tier.name, 1.0),
            "when_infeasible": "reject" if tier.name in options.reject else "best_effort",
        }
        for tier in options.tier
    ]
    path = folder / "tiers.json"
    path.write_text(json.dumps({"default": options.tier[-1].name, "tiers": tiers}))
    return path


def load_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is sent, as `python -m sglang_adapt.simulate --check` reads it."""
    names = ("rate", "seconds", "input", "output", "count", "divide", "longest", "seed", "reject")
    return {
        "tiers": [asdict(tier) for tier in options.tier],
        "trace": [str(trace) for trace in options.trace],
        **{name: getattr(options, name) for name in names},
        **({"weight": options.weight} if options.weight else {}),
    }


def engines_of(url: str) -> dict[str, int]:
    """What a server says of its engines, likewise; `kv_tokens` are those of a GPU at the smallest TP size."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        said = json.load(answer)
    chunk = said["chunked_prefill_size"]
    return {
        "chunk": chunk if chunk and chunk > 0 else said["max_prefill_tokens"],
        "page": said["page_size"] or 1,
        "requests": said["max_running_requests"] or 4096,
        "kv_tokens": said["max_total_num_tokens"],
    }


def overview(result: Mapping[str, Any]) -> str:
    """A line a load and rate: goodput in all, in requests/s, of each system, the mean of its repeats."""
    systems = result["systems"]
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for name, system in systems.items():
        for run in system["runs"]:
            row = found.setdefault((run["load"], run["times"]), {})
            row.setdefault(name, []).append(run["tiers"]["total"]["goodput_rps"])
    rows = [("load", "times", *systems)]
    for (load, times), row in sorted(found.items()):
        means = (f"{sum(row[name]) / len(row[name]):.3f}" if name in row else "-" for name in systems)
        rows.append((load, f"{times:g}", *means))
    return aligned(rows)


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if weight <= 0:
        raise argparse.ArgumentTypeError(f"{text}: write name:weight, with a weight above 0")
    return name, weight


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="that each system has; all that are visible")
    parser.add_argument("--systems", nargs="+", required=True, metavar="SYSTEM", help="what is compared (above)")
    parser.add_argument("--repeats", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--virtual", action="store_true", help="on virtual GPUs, the demo model")
    parser.add_argument("--reject", nargs="*", default=[], help="tiers that refuse what cannot meet its targets")
    parser.add_argument(
        "--weight", type=_weight, nargs="*", default=[], help="name:weight, of tiers that are not worth 1 (ours)"
    )
    parser.add_argument("--profile", type=Path, help="a profile that was measured before")
    parser.add_argument(
        "--one-server",
        action="store_true",
        help="one server for all systems of ours that follow each other, its layout is ordered; saves starts",
    )
    parser.add_argument("--ours-flags", default="", help="further flags for ours alone, as one string")
    parser.add_argument("--stock-flags", default="", help="further flags for stock alone, as one string")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", type=Path, required=True, help="the result; what is in it is not measured again")
    parser.add_argument("--plots", type=Path, help="draw the result into this folder")
    add_cpu_flags(parser)
    add_load_flags(parser)
    own, both = sys.argv[1:], []
    if "--" in own:
        own, both = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    check_load(parser, options)
    if options.repeats < 1:
        parser.error("--repeats is at least 1")
    options.weight = dict(options.weight)
    names = [tier.name for tier in options.tier]
    for name in options.weight:
        if name not in names:
            parser.error(f"--weight {name}: there is no such tier; there are {', '.join(names)}")
    return parser, options, both


if __name__ == "__main__":
    main()
