"""The `--adapt-*` flags. The first process parses them as well, so that nothing heavy is imported here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from sglang_adapt.core.ablation import Ablation, AblationError, Scheduler, TierEngines, parse_tier_engines
from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.copy_path import AUTO, CopyPath
from sglang_adapt.core.digits import number, whole
from sglang_adapt.core.overheads import default_overheads_file
from sglang_adapt.core.slo_file import BUILT_IN_NAME
from sglang_adapt.kv.sizing import DEFAULT_PAGE_TOKENS

VIRTUAL_GPUS_DEFAULT = 2
VIRTUAL_GPUS_MAX = 32
VIRTUAL_MAX_TOTAL_TOKENS = 32768
VIRTUAL_PAGE_TOKENS = 8
"""Prompts of what a CPU serves are short, and whole pages of them only are reused."""


class SettingsError(ValueError):
    """The command line asks for something that cannot be served; the text says what and what would do."""


def add_adapt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--adapt-*` flags as a group of their own."""
    group = parser.add_argument_group(
        "sglang_adapt",
        "The parallel layout and what keeps it alive. With several TP sizes, stock's --max-total-tokens and "
        "--page-size count tokens at the smallest one: --max-total-tokens are those that the KV pool of one GPU holds "
        "(for an engine of t times that size it holds t times as many; default: what the memory plan leaves, on "
        f"virtual GPUs {VIRTUAL_MAX_TOTAL_TOKENS}) and bound the length of a request; --page-size "
        f"(default: {DEFAULT_PAGE_TOKENS}, on virtual GPUs {VIRTUAL_PAGE_TOKENS}) are those of a page.",
    )
    group.add_argument(
        "--adapt-tp-sizes",
        metavar="N,N,...",
        help="TP sizes whose engines are kept warm; of the weights a GPU has what an engine of the smallest one needs "
        "(default: powers of two up to the GPU count that the model's heads allow)",
    )
    group.add_argument(
        "--adapt-layout",
        metavar="LAYOUT",
        help="layout at start: engines that cover every GPU once, e.g. tp1@0,tp1@1 or tp2@0-1, with roles if wanted, "
        "e.g. tp1@0:prefill,tp1@1:decode (default: all GPUs at the smallest TP size, or at --tp-size if that is "
        "given, without roles)",
    )
    group.add_argument(
        "--adapt-policy",
        choices=[policy.value for policy in AdaptPolicy],
        default=AdaptPolicy.MANUAL.value,
        help="who decides on the layout. auto: a planner, by the traffic and for prompts that only a wider engine "
        "holds, until POST /adapt/layout orders one (layout auto gives it back); manual: POST /adapt/layout only; "
        "static: nobody (default: %(default)s, because a layout that moves by itself should be wanted, and auto is as "
        "good as --adapt-profile)",
    )
    group.add_argument(
        "--adapt-interval",
        metavar="SECONDS",
        type=number,
        default=1.0,
        help="how often the planner of --adapt-policy auto looks at the traffic, in seconds (default: 1)",
    )
    add_roles_flag(group)
    group.add_argument(
        "--adapt-virtual-gpus",
        metavar="N",
        type=whole,
        help=f"number of virtual GPUs on a machine without CUDA (default: {VIRTUAL_GPUS_DEFAULT})",
    )
    group.add_argument(
        "--adapt-restart-limit",
        metavar="N",
        type=whole,
        default=3,
        help="give an engine up when it has died more often than this within --adapt-restart-window, and end the "
        "server when a keeper has (default: 3)",
    )
    group.add_argument(
        "--adapt-restart-window",
        metavar="SECONDS",
        type=number,
        default=300.0,
        help="window of --adapt-restart-limit in seconds (default: 300)",
    )
    group.add_argument(
        "--adapt-drain-timeout",
        metavar="SECONDS",
        type=number,
        default=60.0,
        help="how long running requests may take after SIGTERM or Ctrl-C, in seconds (default: 60)",
    )
    group.add_argument(
        "--adapt-switch-timeout",
        metavar="SECONDS",
        type=number,
        default=60.0,
        help="how long a switch of layout waits for requests that have to end before it (strategy drain, and requests "
        "that cannot be moved), in seconds (default: 60)",
    )
    group.add_argument(
        "--adapt-start-method",
        choices=["forkserver", "spawn"],
        default="forkserver",
        help="forkserver: load sglang once and fork every process from there (default); spawn: load it in every "
        "process, which takes twice as long, for libraries that do not stand the fork",
    )
    group.add_argument(
        "--adapt-slo-config",
        metavar="FILE",
        help="tiers with latency targets, a YAML or JSON file (docs/tiers.md); requests are admitted and placed by "
        f"what their targets need. {BUILT_IN_NAME}: three tiers of ours (default: no tiers, all requests are alike)",
    )
    group.add_argument(
        "--adapt-profile",
        metavar="FILE",
        type=Path,
        help="how fast prefill and decode are here, as measured by `python -m sglang_adapt.profile` (default: reckoned "
        "from the sizes of model and GPU, and corrected as requests run)",
    )
    group.add_argument(
        "--adapt-sp",
        metavar="auto|off|N",
        type=sp_threshold,
        default=None,
        help="engines of several GPUs run a batch of N tokens and more sequence-parallel, its tokens shared out to the "
        "GPUs, instead of tensor-parallel, in the same KV layout and without further memory for weights; 0: every "
        "batch; auto: N by --adapt-profile, for each TP size. Each GPU works with the weights as an engine of the "
        "smallest of --adapt-tp-sizes, t, does, so an engine of P GPUs cuts tokens P / t ways and weights t ways: with "
        "1,4 as SP 4, with 2,4 as SP 2 x TP 2; engines of that size themselves run tensor-parallel (default: off, "
        "because it has not been measured on GPUs)",
    )
    group.add_argument(
        "--adapt-kv-copy",
        choices=[AUTO, *(path.value for path in CopyPath)],
        default=AUTO,
        help="how KV gets from one GPU to another, in a switch of layout and from prefill to decode. peer: the GPU "
        "that needs it reads the memory of the one that has it, for which all need peer access to each other (NVLink, "
        "or PCIe where the driver allows it); staged: through two buffers in host memory for each GPU, filled and "
        "emptied in turn, at about a twentieth of NVLink's speed; auto: peer if all have access, else staged, and the "
        "start says why (default: %(default)s)",
    )
    group.add_argument(
        "--adapt-request-log",
        metavar="FILE",
        type=Path,
        help="with tiers: a file to which a JSON object is added for each request that has ended: tier, outcome, "
        "times, forecasts",
    )
    group.add_argument(
        "--adapt-overheads-file",
        metavar="FILE",
        type=Path,
        default=default_overheads_file(),
        help="where it is kept what engines were seen to take of a GPU's memory beyond weights and KV; read for the "
        "memory plan, written when an engine starts that nothing disturbs (default: %(default)s)",
    )
    add_ablation_flags(parser)


def add_roles_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that lets the planner give engines roles."""
    group.add_argument(
        "--adapt-roles",
        choices=["keep", "auto"],
        default="keep",
        help="what the planner does with roles of prefill and decode. keep: it gives none, and leaves those that were "
        "ordered for as long as they carry as much as mixed engines; auto: it gives them where so more requests end "
        "within their targets. A server without --adapt-policy auto only tells so (GET /adapt/plan) "
        "(default: %(default)s, because a hand-over was seen to take 9 ms beyond a decode step on H200)",
    )


def add_ablation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that switch mechanisms off as a group of their own."""
    group = parser.add_argument_group(
        "sglang_adapt, for measurements",
        "Each switches one mechanism off, so that what it is worth can be measured (Nitsum, 4.2.1; "
        "benchmark/compare_goodput.py, ablation:1 to ablation:7). The start says what is off.",
    )
    group.add_argument(
        "--adapt-ablate-scheduler",
        choices=[scheduler.value for scheduler in Scheduler],
        default=Scheduler.SLO.value,
        help="slo: requests are admitted and placed, and iterations limited, by targets; batch-rule: a request goes to "
        "the engine with the least load if it is predicted to meet its own targets there, else it waits, and nothing "
        "is refused or limited; arrival: all go at once to the engine with the least load, tiers are only accounted "
        "for. The last two need --adapt-slo-config (default: %(default)s)",
    )
    group.add_argument(
        "--adapt-ablate-tier-engines",
        metavar="TIER=ENGINE,.../...",
        type=_tier_engines,
        default=(),
        help="each tier has engines of its own, e.g. strict=tp2@0-1/loose=tp1@2,tp1@3; the layout is these engines. "
        "With --adapt-policy static and without roles (default: tiers share all engines)",
    )
    group.add_argument(
        "--adapt-ablate-page-copies",
        action="store_true",
        help="KV moves with a copy for each page, layer, K and V, instead of with one launch for all of a GPU "
        "(default: off)",
    )
    group.add_argument(
        "--adapt-ablate-stop-copy",
        action="store_true",
        help="a switch of layout copies all KV while requests are paused, and none before (default: off)",
    )
    group.add_argument(
        "--adapt-ablate-reload-weights",
        action="store_true",
        help="in each switch engines that enter the layout read the checkpoint again and send their part of it to "
        "their GPU, while requests are paused; graphs and communicators stay, so a stop and a start takes longer. "
        "Not with --load-format dummy, which has no checkpoint (default: off)",
    )


def ablation_of(options: argparse.Namespace) -> Ablation:
    """What the flags of `add_ablation_flags` say."""
    return Ablation(
        Scheduler(options.adapt_ablate_scheduler),
        options.adapt_ablate_tier_engines,
        options.adapt_ablate_page_copies,
        options.adapt_ablate_stop_copy,
        options.adapt_ablate_reload_weights,
    )


def _tier_engines(text: str) -> TierEngines:
    try:
        return parse_tier_engines(text)
    except AblationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sp_threshold(text: str) -> str | int | None:
    """`auto`, a number of tokens, or None for off. Raises argparse.ArgumentTypeError."""
    if text in ("auto", "off"):
        return None if text == "off" else text
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give auto, off, or from how many tokens on, e.g. 2048")
    return int(text)


def tp_sizes_named(text: str) -> list[int]:
    """The numbers of `--adapt-tp-sizes`, whatever they are. Raises SettingsError."""
    try:
        return [whole(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"--adapt-tp-sizes {text!r}: write TP sizes separated by commas, e.g. 1,2") from None


def split_argv(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest of the command line for stock's parser.

    Raises:
        SettingsError: an unknown `--adapt-*` flag, or a bad value of one.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_adapt_flags(parser)
    try:
        ours, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise SettingsError(str(error)) from None
    unknown = [arg.split("=")[0] for arg in rest if arg.startswith("--adapt-")]
    if unknown:
        known = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in vars(ours)))
        raise SettingsError(f"{unknown[0]} is not a flag; sglang_adapt knows {known}")
    for name in ("adapt_restart_limit", "adapt_restart_window", "adapt_drain_timeout", "adapt_switch_timeout"):
        value = getattr(ours, name)
        if value < 0:
            raise SettingsError(f"--{name.replace('_', '-')} {value} is negative")
        if not math.isfinite(value):
            raise SettingsError(f"--{name.replace('_', '-')} {value} is not a number of seconds; give a finite one")
    if ours.adapt_tp_sizes is not None:
        tp_sizes_named(ours.adapt_tp_sizes)
    if ours.adapt_request_log is not None and ours.adapt_slo_config is None:
        raise SettingsError("--adapt-request-log tells how tiers fare; give --adapt-slo-config as well")
    _check_ablation(ours)
    if not 0.05 <= ours.adapt_interval <= 3600:
        raise SettingsError(f"--adapt-interval {ours.adapt_interval}: give 0.05 to 3600 seconds")
    gpus = ours.adapt_virtual_gpus
    if gpus is not None and not 1 <= gpus <= VIRTUAL_GPUS_MAX:
        raise SettingsError(
            f"--adapt-virtual-gpus {gpus}: give 1 to {VIRTUAL_GPUS_MAX}; each takes a process for every TP size"
        )
    return ours, rest


def _check_ablation(ours: argparse.Namespace) -> None:
    """Raises SettingsError where a mechanism is switched off that is not there, or that another flag needs."""
    by_tier = ours.adapt_ablate_tier_engines
    for flag, given in (
        (f"--adapt-ablate-scheduler {ours.adapt_ablate_scheduler}", ours.adapt_ablate_scheduler != Scheduler.SLO),
        ("--adapt-ablate-tier-engines", by_tier),
    ):
        if given and ours.adapt_slo_config is None:
            raise SettingsError(f"{flag} is about tiers; give --adapt-slo-config as well")
    if by_tier and ours.adapt_policy != AdaptPolicy.STATIC:
        raise SettingsError(
            "--adapt-ablate-tier-engines fixes the engines of each tier, so the layout has to stay; give "
            "--adapt-policy static as well"
        )
    if by_tier and ours.adapt_layout is not None:
        raise SettingsError("--adapt-ablate-tier-engines names all engines of the layout; leave --adapt-layout out")
    for flag in ("stop_copy", "reload_weights"):
        if getattr(ours, f"adapt_ablate_{flag}") and ours.adapt_policy == AdaptPolicy.STATIC:
            raise SettingsError(
                f"--adapt-ablate-{flag.replace('_', '-')} is about switches of layout, and --adapt-policy static makes "
                "none; give auto or manual"
            )
