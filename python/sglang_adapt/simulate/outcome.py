"""What became of the requests of a run, by tier, as `benchmark/bench_goodput.py` tells it, and which layouts served."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_adapt.core.layout import Layout
from sglang_adapt.core.slo import SloConfig, Tier
from sglang_adapt.policy.division import division_of
from sglang_adapt.simulate.control import SwitchMade
from sglang_adapt.simulate.engine import Request
from sglang_adapt.simulate.node import SimulationError

COLUMNS: tuple[str, ...] = ("sent", "refused", "missed", "met_ttft", "met_tpot", "good", "goodput_rps", "attainment")
COLUMNS += ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p90", "tpot_ms_p99")

Judged = dict[str, dict[str, float | int | None]]


def judge(requests: Sequence[Request], config: SloConfig, seconds: float) -> Judged:
    """By tier and in `total`; a request is good if it met both targets of its tier.

    Args:
        requests: all, ended or refused.
        config: their tiers.
        seconds: in which they arrived.

    Raises:
        SimulationError: good, missed and refused ones are not all that were sent.
    """
    tiers = {tier.name: tier for tier in config.tiers}
    groups: dict[str, list[Request]] = {name: [] for name in tiers}
    for request in requests:
        groups[request.arrival.tier].append(request)
    groups["total"] = list(requests)
    return {name: _judged(name, group, tiers, seconds) for name, group in groups.items()}


def met(request: Request, tier: Tier) -> tuple[bool, bool]:
    """(TTFT, TPOT) of a request that has ended: is its target met? Of one that was refused neither is."""
    if request.refused or not request.done:
        return False, False
    in_time = request.first_ms - request.arrival.at_ms <= (tier.ttft_ms or math.inf)
    given = request.given - 1
    return in_time, not given or (request.last_ms - request.first_ms) / given <= (tier.tpot_ms or math.inf)


def _judged(
    name: str, group: Sequence[Request], tiers: Mapping[str, Tier], seconds: float
) -> dict[str, float | int | None]:
    met_ttft = met_tpot = good = missed = refused = 0
    ttfts, tpots = [], []
    for one in group:
        if one.refused:
            refused += 1
            continue
        if not one.done or math.isnan(one.first_ms):
            continue
        in_time, quick = met(one, tiers[one.arrival.tier])
        ttfts.append(one.first_ms - one.arrival.at_ms)
        if one.given > 1:
            tpots.append((one.last_ms - one.first_ms) / (one.given - 1))
        met_ttft += in_time
        met_tpot += quick
        good += in_time and quick
        missed += not (in_time and quick)
    if good + missed + refused != len(group):
        raise SimulationError(f"{name}: {len(group)} sent, but {good} met, {missed} missed and {refused} refused")
    return {
        "sent": len(group),
        "refused": refused,
        "missed": missed,
        "met_ttft": met_ttft,
        "met_tpot": met_tpot,
        "good": good,
        "goodput_rps": round(good / seconds, 3),
        "attainment": round(good / len(group), 4) if group else None,
        **_percentiles("ttft_ms", ttfts),
        **_percentiles("tpot_ms", tpots),
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    if len(values) < 2:
        return {f"{name}_p{percent}": round(values[0], 2) if values else None for percent in (50, 90, 99)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p{percent}": round(cuts[percent - 1], 2) for percent in (50, 90, 99)}


def table(judged: Judged) -> str:
    """A line a tier."""
    rows: list[tuple[str, ...]] = [("tier", *COLUMNS)]
    rows += [(name, *(_shown(one[column]) for column in COLUMNS)) for name, one in judged.items()]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def counted(layout: Layout) -> str:
    """A layout by numbers of engines and their roles: `2 x TP 4 + 8 x TP 1`, `1 x TP 2 prefill + 2 x TP 1 decode`."""
    return str(division_of(layout))


def timeline(first: Layout, switches: Sequence[SwitchMade]) -> list[dict[str, Any]]:
    """Layouts over time, the first one at 0 s."""
    found: list[dict[str, Any]] = [{"at_s": 0.0, "layout": counted(first)}]
    for one in switches:
        found.append(
            {
                "at_s": round(one.at_s, 3),
                "layout": counted(one.after),
                "trigger": one.trigger,
                "pause_ms": round(one.pause_ms, 1),
                "requests": one.requests,
                "recomputed": one.recomputed,
            }
        )
    return found
