"""Simulated beside measured: the runs of a result of `benchmark/compare_goodput.py`, simulated with its own profile."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_adapt.core.ablation import Ablation
from sglang_adapt.core.layout import LayoutError, parse_layout
from sglang_adapt.core.profile import Profile
from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible
from sglang_adapt.front.flags import ablation_of, add_ablation_flags
from sglang_adapt.simulate.hardware import Shape, of_profile
from sglang_adapt.simulate.load import Arrival, Cut, LoadError, faster, poisson, read_trace, with_tiers
from sglang_adapt.simulate.outcome import aligned
from sglang_adapt.simulate.systems import System, run

GOODPUT = "goodput_rps"
PERCENTILES = ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p90", "tpot_ms_p99")


class CheckError(ValueError):
    """There is nothing to compare with; the text names the file and what it lacks."""


class SentTier(msgspec.Struct, frozen=True):
    """A tier of the load, as `compare_goodput.py` writes it."""

    name: str
    share: float
    ttft_ms: float
    tpot_ms: float


class Sent(msgspec.Struct, frozen=True):
    """The load: its flags."""

    tiers: tuple[SentTier, ...]
    seconds: float
    input: int
    output: int
    divide: int
    longest: int
    seed: int
    count: int | None = None
    rate: float | None = None
    trace: tuple[str, ...] = ()
    reject: tuple[str, ...] = ()
    weight: dict[str, float] = msgspec.field(default_factory=dict)


class Engines(msgspec.Struct, frozen=True):
    """What the server said of its engines: as `Shape`, and the KV of a GPU."""

    chunk: int
    page: int
    requests: int
    kv_tokens: int


class MeasuredRun(msgspec.Struct, frozen=True):
    """One run: by tier and in total, the figures of `bench_goodput.judge`."""

    load: str
    times: float
    seconds: float
    tiers: dict[str, dict[str, float | None]]


class MeasuredSystem(msgspec.Struct, frozen=True):
    """A system and its runs; ours also says what its engines are, and by which flags mechanisms are switched off."""

    kind: str
    layout: str
    runs: tuple[MeasuredRun, ...]
    engines: Engines | None = None
    ablation: tuple[str, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    """A result of `compare_goodput.py`."""

    gpus: int
    load: Sent
    systems: dict[str, MeasuredSystem]
    profile: Profile | None = None


def check(path: Path, within: str = "0.10:0.15") -> tuple[str, dict[str, Any]]:
    """Simulate all runs of a result and compare.

    Args:
        path: of the result.
        within: relative errors of goodput and of percentiles that are right.

    Returns:
        A table, with the worst errors and whether they are right, and the same as data.

    Raises:
        CheckError: the file is no such result, or `within` no two numbers.
        LoadError: its trace cannot be read.
    """
    try:
        most_goodput, most_percentile = (float(part) for part in within.split(":"))
    except ValueError:
        raise CheckError(f"--within {within}: write GOODPUT:PERCENTILES, e.g. 0.10:0.15") from None
    known = _read(path)
    rows: list[tuple[str, ...]] = [("system", "load", "times", "tier", "figure", "measured", "simulated", "error")]
    found: list[dict[str, Any]] = []
    for system, one, simulated in _simulated(path, known):
        for tier, figures in one.tiers.items():
            for figure in (GOODPUT, *PERCENTILES):
                real, ours = figures.get(figure), simulated[tier][figure]
                if real is None and ours is None:
                    continue
                error = _error(real, ours)
                what = {"system": system, "load": one.load, "times": one.times, "tier": tier, "figure": figure}
                found.append({**what, "measured": real, "simulated": ours, "error": error})
                shown = (f"{real:g}" if real is not None else "-", f"{ours:g}" if ours is not None else "-")
                rows.append((system, one.load, f"{one.times:g}", tier, figure, *shown, f"{error:+.0%}"))
    if not found:
        raise CheckError(f"{path} has no run of a system with one layout; those alone are simulated")
    goodput = [abs(one["error"]) for one in found if one["figure"] == GOODPUT]
    percentiles = [abs(one["error"]) for one in found if one["figure"] != GOODPUT]
    right = sum(error <= most_goodput for error in goodput) + sum(error <= most_percentile for error in percentiles)
    summary = {
        "worst_goodput": max(goodput),
        "worst_percentile": max(percentiles, default=0.0),
        "right": right,
        "of": len(found),
    }
    text = (
        f"{aligned(rows)}\ngoodput is off by at most {summary['worst_goodput']:.0%}, percentiles "
        f"by {summary['worst_percentile']:.0%}; {right} of {len(found)} figures are within {most_goodput:.0%} "
        f"(goodput) and {most_percentile:.0%} (percentiles)"
    )
    return text, {"measured": path.name, "within": within, "summary": summary, "figures": found}


def _read(path: Path) -> Measured:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise CheckError(f"--check {path} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise CheckError(
            f"--check {path} is no result of benchmark/compare_goodput.py as it is now ({error})"
        ) from None


def _simulated(path: Path, known: Measured) -> Iterator[tuple[str, MeasuredRun, dict[str, dict[str, Any]]]]:
    """Runs of systems with one layout: what follows the traffic, or is made of several servers, is not simulated."""
    engines = next((system.engines for system in known.systems.values() if system.engines is not None), None)
    if known.profile is None or engines is None:
        raise CheckError(f"{path} has no system of ours, whose profile would be needed")
    sizes = tuple(sorted(size.tp for size in known.profile.sizes))
    shape = Shape(engines.chunk, engines.page, engines.requests, engines.kv_tokens)
    hardware = of_profile(known.profile, path.name, sizes, shape, 0)
    config = SloConfig(
        tuple(
            Tier(
                tier.name,
                tier.ttft_ms,
                tier.tpot_ms,
                weight=known.load.weight.get(tier.name, 1.0),
                when_infeasible=WhenInfeasible.REJECT if tier.name in known.load.reject else WhenInfeasible.BEST_EFFORT,
            )
            for tier in known.load.tiers
        ),
        known.load.tiers[-1].name,
    )
    for name, measured in known.systems.items():
        if not measured.layout:
            continue
        try:
            layout = parse_layout(measured.layout, sizes, known.gpus)
        except LayoutError as error:
            raise CheckError(f"{path}: {name}: {error}") from None
        for one in measured.runs:
            arrivals = arrivals_of(known.load, one)
            admission = measured.kind in ("static", "ablation")
            system = System(hardware, known.gpus, layout, admission, ablation=switched_off(measured.ablation))
            simulated = run(system, arrivals, config)
            yield name, one, simulated.judged


def switched_off(flags: Sequence[str]) -> Ablation:
    """What these flags of the server switch off."""
    parser = argparse.ArgumentParser()
    add_ablation_flags(parser)
    return ablation_of(parser.parse_args(flags))


def arrivals_of(load: Sent, one: MeasuredRun) -> list[Arrival]:
    """The requests that were sent, with the tiers that were drawn for them."""
    if load.rate is not None:
        rate = load.rate
        made = poisson(rate * one.times, load.seconds, load.input, load.output, load.seed)
    else:
        path = next((Path(trace) for trace in load.trace if Path(trace).stem == one.load), None)
        if path is None:
            raise LoadError(f"the run of {one.load} is of no trace that the result names")
        end_s = load.seconds * one.times if load.count is None else float("inf")
        cut = Cut(end_s=end_s, count=load.count, divide=load.divide, longest=load.longest)
        made = faster(read_trace(path, cut), one.times)
    return with_tiers(made, {tier.name: tier.share for tier in load.tiers}, load.seed)


def _error(real: float | None, simulated: float | None) -> float:
    """Relative; where one of them is nothing, all of it."""
    if real is None or simulated is None:
        return 1.0
    if real == simulated:
        return 0.0
    return (simulated - real) / real if real else 1.0
