"""Goodput of ours, with a profile measured on the spot, and of stock sglang, one after the other under the same load.

Commands are in `bench_goodput.py`. Ours is started without tiers, to measure its profile, and again with them; stock
once, as `--dp-size N` of engines at the layout's TP size. What both get stands after `--`. How near the simulator
comes to the result: `python -m sglang_adapt.simulate --check RESULT.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_goodput import add_load_flags, check_load, measure
from server import Server, environment, write_json
from sglang_adapt.demo import demo_model_path

_DEMO = ["--model-path", str(demo_model_path()), "--dtype", "float32", "--max-total-tokens", "32768"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp1@0,tp1@1", help="of ours; all engines of one TP size")
    parser.add_argument("--virtual", action="store_true", help="on virtual GPUs, the demo model")
    parser.add_argument("--reject", nargs="*", default=[], help="tiers that refuse what cannot meet its targets")
    parser.add_argument("--profile", type=Path, help="a profile that was measured before")
    parser.add_argument("--ours-flags", default="", help="further flags for ours alone, as one string")
    parser.add_argument("--systems", nargs="+", default=["ours", "stock"], choices=["ours", "stock"])
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", type=Path, required=True)
    add_load_flags(parser)
    own, both = sys.argv[1:], []
    if "--" in own:
        own, both = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    check_load(parser, options)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        result: dict[str, object] = {
            "environment": environment(),
            "layout": options.layout,
            "load": load_of(options),
        }
        for system in options.systems:
            flags = ours(options, both, Path(folder), logs) if system == "ours" else stock(options, both)
            module = "sglang_adapt.launch_server" if system == "ours" else "sglang.launch_server"
            with Server(system, module, flags, logs / f"{system}.log", _variables(options)) as server:
                if system == "ours":
                    result["engines"] = engines_of(server.url)
                result[system] = measure(system, server.url, "demo", options)
            write_json(options.json, result)
        if "ours" in options.systems:
            result["profile"] = json.loads((options.profile or Path(folder) / "profile.json").read_text())
            write_json(options.json, result)


def load_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is sent, as `python -m sglang_adapt.simulate --check` reads it."""
    names = ("rate", "seconds", "input", "output", "count", "divide", "longest", "seed", "reject")
    return {
        "tiers": [asdict(tier) for tier in options.tier],
        "trace": [str(trace) for trace in options.trace],
        **{name: getattr(options, name) for name in names},
    }


def engines_of(url: str) -> dict[str, int]:
    """What a server says of its engines, likewise; all engines have the same TP size, which counts as the smallest."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        said = json.load(answer)
    chunk = said["chunked_prefill_size"]
    return {
        "chunk": chunk if chunk and chunk > 0 else said["max_prefill_tokens"],
        "page": said["page_size"] or 1,
        "requests": said["max_running_requests"] or 4096,
        "kv_tokens": said["max_total_num_tokens"],
    }


def ours(options: argparse.Namespace, both: list[str], folder: Path, logs: Path) -> list[str]:
    """Flags of ours with tiers and a profile, which is measured first if there is none."""
    gpus, tp = _shape(options.layout)
    flags = [*both, "--adapt-layout", options.layout, "--adapt-tp-sizes", str(tp), *shlex.split(options.ours_flags)]
    if options.virtual:
        flags += ["--adapt-virtual-gpus", str(gpus)]
    profile = options.profile
    if profile is None:
        profile = folder / "profile.json"
        with Server("ours, to be profiled", "sglang_adapt.launch_server", flags, logs / "profile.log") as server:
            command = [sys.executable, "-m", "sglang_adapt.profile", "--url", server.url, "--output", str(profile)]
            subprocess.run(
                [*command, *(["--longest", "512", "--repeats", "3"] if options.virtual else ["--longest", "8192"])],
                check=True,
            )
    tiers = [
        {
            "name": tier.name,
            "ttft_ms": tier.ttft_ms,
            "tpot_ms": tier.tpot_ms,
            "when_infeasible": "reject" if tier.name in options.reject else "best_effort",
        }
        for tier in options.tier
    ]
    config = folder / "tiers.json"
    config.write_text(json.dumps({"default": options.tier[-1].name, "tiers": tiers}))
    log = ["--adapt-request-log", str(options.logs / "requests.jsonl")] if options.logs is not None else []
    return [*flags, "--adapt-slo-config", str(config), "--adapt-profile", str(profile), *log]


def stock(options: argparse.Namespace, both: list[str]) -> list[str]:
    """Flags of stock with as many engines of the same TP size."""
    gpus, tp = _shape(options.layout)
    flags = [*(_DEMO if options.virtual else []), *both, "--tp-size", str(tp), "--sleep-on-idle"]
    return flags + (["--dp-size", str(gpus // tp)] if gpus > tp else [])


def _variables(options: argparse.Namespace) -> dict[str, str]:
    # On a CPU stock gets what ours sets itself: a thread a rank.
    return {"OMP_NUM_THREADS": "1"} if options.virtual else {}


def _shape(layout: str) -> tuple[int, int]:
    """(GPUs, TP size) of a layout of engines of one size."""
    sizes = [int(size) for size in re.findall(r"tp(\d+)@", layout)]
    if not sizes or len(set(sizes)) != 1:
        raise SystemExit(f"error: --layout {layout}: give engines of one TP size, as stock has them")
    return sum(sizes), sizes[0]


if __name__ == "__main__":
    main()
