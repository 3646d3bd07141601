r"""A deployment in simulated time: the router's own decisions on a profile instead of engines.

    python -m sglang_adapt.simulate --model llama-3.1-8b --card H100 --gpus 4 --tp-sizes 1,2,4 --layout auto \
        --trace strict=servegen_code.csv loose=servegen_conversation.csv --tier strict:1:400:15 --tier loose:1:1000:30 \
        --reject strict --rate-scale 2 --json out.json
    python -m sglang_adapt.simulate --profile profile.json --kv-tokens 200000 --gpus 2 --layout tp1@0,tp1@1 \
        --trace azure_code_2023.csv --window 0:600 --tiers tiers.yaml

Prints, by tier, what was sent, refused, missed and met, goodput and percentiles, and the layouts over time; progress
goes to stderr. The same input and seed give the same result. What is simpler than in reality is said in
docs/simulation.md, with what it has shown.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation, AblationError, check_tier_engines, engines_text
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.digits import number, whole
from sglang_adapt.core.files import replace_file
from sglang_adapt.core.layout import Layout, LayoutError, parse_layout
from sglang_adapt.core.slo_file import SloFileError
from sglang_adapt.front.flags import ablation_of, add_ablation_flags, add_roles_flag, sp_threshold
from sglang_adapt.policy.price import GPU_PRICE, first_gpu_price
from sglang_adapt.simulate.check import CheckError, check
from sglang_adapt.simulate.flags import AUTO, FlagError, layout_of, setting_of
from sglang_adapt.simulate.hardware import HardwareError
from sglang_adapt.simulate.load import LoadError
from sglang_adapt.simulate.outcome import table
from sglang_adapt.simulate.study import STUDIES, Setting, StudyError
from sglang_adapt.simulate.systems import RELOAD_S, Run, System, priced, run, split
from sglang_adapt.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.check is not None:
            text, result = check(options.check, options.within)
        elif options.study is not None:
            text, result = STUDIES[options.study](setting_of(options), _say if not options.quiet else lambda line: None)
        else:
            text, result = _one(options)
    except (
        CheckError,
        FlagError,
        HardwareError,
        LayoutError,
        LoadError,
        SloFileError,
        StudyError,
    ) as error:
        parser.error(str(error))
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        made = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python -m sglang_adapt.simulate " + shlex.join([*(sys.argv[1:] if argv is None else argv)]),
            "version": __version__,
        }
        replace_file(options.json, json.dumps({**made, **result}, indent=1).encode() + b"\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_adapt.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what arrives")
    what.add_argument(
        "--trace", nargs="+", default=[], metavar="[TIER=]CSV", help="traces, all at once; a tier for each"
    )
    what.add_argument("--window", default="", metavar="START:END", help="seconds of the traces to take (default: all)")
    what.add_argument("--count", type=whole, help="requests of each trace at most")
    what.add_argument("--divide", type=whole, default=1, help="divide lengths by this (default: 1)")
    what.add_argument("--longest", type=whole, help="leave out requests of more tokens, prompt and output")
    what.add_argument(
        "--rate-scale", type=number, default=1.0, help="requests arrive so many times as fast (default: 1)"
    )
    what.add_argument("--repeat", type=whole, default=1, help="the traces so many times in a row (default: 1)")
    what.add_argument(
        "--phase",
        action="append",
        default=[],
        metavar="SECONDS:TIER=RATE,...",
        help="lengths of the traces, but Poisson arrivals at these rates a second; several phases take turns for "
        "--seconds",
    )
    what.add_argument("--rate", type=number, help="Poisson arrivals a second, in place of --trace")
    what.add_argument("--seconds", type=number, default=60.0, help="of Poisson arrivals and of phases (default: 60)")
    what.add_argument("--input", type=whole, default=1024, help="prompt tokens of these, about (default: 1024)")
    what.add_argument("--output", type=whole, default=128, help="output tokens of these, about (default: 128)")
    what.add_argument("--seed", type=whole, default=0, help="of arrivals and of tiers that are drawn (default: 0)")
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument("--tiers", metavar="FILE", help="as --adapt-slo-config of the server, or built-in")
    tiers.add_argument(
        "--tier", action="append", default=[], metavar="NAME:SHARE:TTFT:TPOT", help="in place of a file; targets in ms"
    )
    tiers.add_argument("--reject", nargs="*", default=[], help="of these: that refuse what cannot meet its targets")
    tiers.add_argument(
        "--share", nargs="*", default=[], metavar="NAME:SHARE", help="of tiers of a file (default: equal)"
    )
    tiers.add_argument("--target-scale", type=number, default=1.0, help="multiply all targets by this (default: 1)")
    speed = parser.add_argument_group("engines")
    speed.add_argument("--profile", type=Path, help="as measured by python -m sglang_adapt.profile; needs --kv-tokens")
    speed.add_argument("--model", default="llama-3.1-8b", help="to reckon without a profile (default: llama-3.1-8b)")
    speed.add_argument("--card", default="H100", help="likewise (default: H100)")
    speed.add_argument(
        "--link",
        type=number,
        metavar="BYTES_PER_S",
        help="reckon also what the sums of wide engines send, at this speed a GPU (default: it takes no time)",
    )
    speed.add_argument("--gpus", type=whole, default=4, help="default: 4")
    speed.add_argument("--tp-sizes", default="", help="e.g. 1,2,4 (default: all of the profile, or 1,2,4)")
    speed.add_argument(
        "--sp",
        metavar="auto|off|N",
        type=sp_threshold,
        help="as --adapt-sp of the server, with a --profile of both ways to run a batch (default: off)",
    )
    speed.add_argument("--kv-tokens", type=whole, help="that a GPU holds at the smallest TP size (default: reckoned)")
    speed.add_argument("--chunk", type=whole, default=8192, help="prompt tokens of an iteration (default: 8192)")
    speed.add_argument("--page", type=whole, default=16, help="tokens of a page at the smallest TP size (default: 16)")
    speed.add_argument("--requests", type=whole, default=2048, help="that an engine runs at a time (default: 2048)")
    system = parser.add_argument_group("system")
    system.add_argument("--layout", default=AUTO, help="as of the server, tpN for all GPUs, or auto (default)")
    system.add_argument(
        "--system",
        choices=("ours", "stock", "split"),
        default="ours",
        help="ours; stock: nothing refused, least load; split: stock, a part for each tier at its best TP size",
    )
    system.add_argument("--interval", type=number, default=1.0, help="seconds between plans (default: 1)")
    system.add_argument(
        "--price",
        metavar="MS:BYTES_PER_S",
        help="of a switch: fixed, and of the KV it copies "
        f"(default: {GPU_PRICE.fixed_ms:g}:{GPU_PRICE.bytes_per_s:g}; staged, without peer access: "
        f"{first_gpu_price(CopyPath.STAGED).bytes_per_s:.2g}; a copy a page: 3.2e9; a stop and start: 57000)",
    )
    system.add_argument(
        "--reload",
        type=number,
        default=RELOAD_S,
        metavar="SECONDS",
        help="of a switch with --adapt-ablate-reload-weights (default: %(default)g, a stop and a start on 2 H200)",
    )
    add_roles_flag(system)
    add_ablation_flags(parser)
    more = parser.add_argument_group("series and checks")
    more.add_argument("--study", choices=tuple(STUDIES), help="a series of runs, see docs/simulation.md")
    more.add_argument(
        "--check", type=Path, metavar="JSON", help="simulate what compare_goodput.py measured, and compare"
    )
    more.add_argument(
        "--within",
        default="0.10:0.15",
        metavar="GOODPUT:PERCENTILES",
        help="errors that are right (default: 0.10:0.15)",
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _one(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    setting = setting_of(options)
    began, told = time.monotonic(), [0.0]

    def progress(ended: int, of: int, now_ms: float) -> None:
        if not options.quiet and time.monotonic() - told[0] > 1.0:
            told[0] = time.monotonic()
            took = told[0] - began
            _say(f"{ended} of {of} requests ended, {now_ms / 1e3:.0f} s simulated in {took:.0f} s")

    ablation = ablation_of(options)
    if options.system != "ours" and ablation != NOTHING_OFF:
        raise FlagError(f"{ablation.flags[0]} switches a mechanism of ours off; leave --system {options.system} out")
    if options.system == "split":
        found = split(setting.hardware, setting.gpus, setting.arrivals, setting.config)
    else:
        auto = options.layout == AUTO
        if auto and options.system == "stock":
            raise FlagError("--layout auto: stock has a layout that stays; give one, e.g. tp1")
        if ablation.tier_engines:
            layout, auto = _layout_of_tiers(ablation, options.layout, setting), False
        else:
            layout = layout_of(options.layout, setting)
        system = System(
            setting.hardware,
            setting.gpus,
            layout,
            admission=options.system == "ours",
            interval_s=setting.interval_s if auto else None,
            price=priced(setting.price, ablation, setting.reload_s),
            ablation=ablation,
            gives_roles=setting.gives_roles,
        )
        found = run(system, setting.arrivals, setting.config, progress)
    result = {"setting": setting.report(), "system": options.system, "layout": options.layout, **found.report()}
    return _told(found, setting), result


def _layout_of_tiers(ablation: Ablation, text: str, setting: Setting) -> Layout:
    """The engines of all tiers, as the server makes its layout of them. Raises FlagError, LayoutError."""
    if text != AUTO:
        raise FlagError("--adapt-ablate-tier-engines names all engines of the layout; leave --layout out")
    layout = parse_layout(engines_text(ablation.tier_engines), setting.hardware.tp_sizes, setting.gpus)
    try:
        check_tier_engines(
            ablation.tier_engines,
            [tier.name for tier in setting.config.tiers],
            [engine.name for engine in layout.engines],
        )
    except AblationError as error:
        raise FlagError(str(error)) from None
    return layout


def _told(found: Run, setting: Setting) -> str:
    layouts = found.report()["layouts"]
    lines = [
        f"{setting.hardware.source}; {setting.gpus} GPUs, {len(setting.arrivals)} requests in {found.seconds:.1f} s"
    ]
    lines.append(table(found.judged))
    if found.notes:
        lines.append(found.notes)
    for one in layouts[:20]:
        why = (
            f", {one['trigger']}, pause {one['pause_ms']:g} ms, {one['requests']} requests" if "trigger" in one else ""
        )
        lines.append(f"{one['at_s']:9.2f} s  {one['layout']}{why}")
    if len(layouts) > 20:
        lines.append(f"... and {len(layouts) - 20} more switches")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
