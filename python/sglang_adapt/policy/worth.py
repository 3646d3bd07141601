"""What a layout is worth under a demand: how many requests it ends within their targets, and how soon.

A layout counts by how many engines of each TP size it has. Tiers are spread over them as the router does: the tightest
first, each over all engines on which its targets can be met, in proportion to what these have left. So any layout can
be compared with any other, the one that serves included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang_adapt.policy.admission import guarded_by_ms
from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.efficiency import Estimate, Speed, estimate
from sglang_adapt.policy.limits import SAFETY

QUICK = 0.5
"""A request that ends within its targets is worth its tier's weight, and up to this part of it more, the nearer its
time is to the least that is possible here. So a layout that carries more is preferred to one that is quicker."""

Counts = Mapping[int, int]
"""Engines by TP size; one with none may be missing."""


@dataclass(frozen=True)
class Row:
    """A tier in the planner's table.

    Attributes:
        demand: of the tier.
        offered_rps: its load.
        estimates: by TP size.
    """

    demand: Demand
    offered_rps: float
    estimates: Mapping[int, Estimate]

    @property
    def tier(self) -> str:
        return self.demand.terms.tier

    @property
    def weight(self) -> float:
        return self.demand.terms.weight

    @property
    def sizes(self) -> tuple[int, ...]:
        """TP sizes at which its targets can be met."""
        return tuple(tp for tp, one in self.estimates.items() if one.capacity_rps > 0)

    @property
    def alone_ms(self) -> float:
        """The least time of a request."""
        return min(one.alone_ms for one in self.estimates.values())

    def efficiency(self, tp: int) -> float:
        """Requests/s within the targets that a GPU gives at a TP size: goodput efficiency, capped by the load."""
        return min(self.estimates[tp].capacity_rps, self.offered_rps) / tp


@dataclass(frozen=True)
class Worth:
    """What a layout does.

    Attributes:
        value: weighted requests/s, see `QUICK`.
        carried_rps: by tier.
        time_ms: mean time of a request, by tier; infinite if none is carried.
    """

    value: float
    carried_rps: Mapping[str, float]
    time_ms: Mapping[str, float]


@dataclass
class Appraiser:
    """Values layouts under one demand.

    Args:
        rows: the tiers that are asked for.
        speeds: by TP size.
    """

    rows: Sequence[Row]
    speeds: Mapping[int, Speed]
    _shared: dict[tuple[str, int], tuple[Estimate, float, float] | None] = field(default_factory=dict)
    _blends: dict[tuple[str, int, int, int], Estimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = sorted(self.rows, key=lambda row: (len(row.sizes), row.demand.terms.tpot_ms or math.inf, row.tier))

    def worth(self, counts: Counts) -> Worth:
        """Value a layout."""
        free = {tp: float(count) for tp, count in counts.items() if count}
        given: list[tuple[Row, list[tuple[int, Estimate, float]]]] = []
        for row in self.order:
            room = [
                (tp, one, left * one.capacity_rps) for tp, left in free.items() if (one := self.on(row, tp, counts))
            ]
            total = sum(rate for _, _, rate in room)
            filled = min(1.0, row.offered_rps / total) if total > 0 else 0.0
            given.append((row, [(tp, one, filled * rate) for tp, one, rate in room]))
            for tp, one, _ in room:
                if one.capacity_rps > 0:
                    free[tp] *= 1 - filled
        value, carried, times = 0.0, {}, {}
        for row, parts in given:
            rate = sum(part for _, _, part in parts)
            carried[row.tier], times[row.tier] = rate, math.inf
            if rate > 0:
                busy = sum(part * one.time_ms(1 - free[tp] / counts[tp]) for tp, one, part in parts if part > 0)
                times[row.tier] = busy / rate
                value += row.weight * rate * (1 + QUICK * min(1.0, row.alone_ms / times[row.tier]))
        return Worth(value, carried, times)

    def on(self, row: Row, tp: int, counts: Counts) -> Estimate:
        """A tier's estimate where a tighter one is: as in admission, it leaves room for that one on a part of the
        engines (`reserve.guards`). Its first tokens may come as late as its own target says."""
        alone = row.estimates[tp]
        if not alone.capacity_rps:
            return alone
        key = (row.tier, tp)
        if key not in self._shared:
            self._shared[key] = self._beside_tighter(row, tp)
        shared = self._shared[key]
        if shared is None:
            return alone
        guarded, looser, asked = shared
        count = counts[tp]
        open_ones = min(count - 1, math.floor(count * looser / asked)) if asked > 0 else 0
        blend = (row.tier, tp, open_ones, count)
        if blend not in self._blends:
            self._blends[blend] = _blended(guarded, alone, open_ones / count)
        return self._blends[blend]

    def _beside_tighter(self, row: Row, tp: int) -> tuple[Estimate, float, float] | None:
        """A tier's estimate on an engine that leaves room for a tighter one, and what is asked for there by weight:
        what is looser than the tightest, and all; None if no tier there is tighter."""
        own, alone = row.demand.terms, row.estimates[tp]
        there = [other for other in self.order if other.estimates[tp].capacity_rps > 0]
        tightest = min((tpot_ms_of(other) for other in there), default=math.inf)
        if tightest >= tpot_ms_of(row):
            return None
        speed = self.speeds[tp]
        most = min(guarded_by_ms(tightest, speed.times.decode_ms(1, 1.0)) / SAFETY, tpot_ms_of(row))
        guarded = estimate(row.demand, speed, own.ttft_ms, most, own=False) if math.isfinite(most) else alone
        asked = sum(other.weight * other.offered_rps for other in there)
        looser = sum(other.weight * other.offered_rps for other in there if tpot_ms_of(other) > tightest)
        return guarded, looser, asked


def tpot_ms_of(row: Row) -> float:
    """A tier's target; infinite without one."""
    tpot_ms = row.demand.terms.tpot_ms
    return math.inf if tpot_ms is None else tpot_ms


def _blended(first: Estimate, second: Estimate, share: float) -> Estimate:
    """The mean engine of which this share is as the second one: with the times of the one that most are like."""
    most = second if share >= 0.5 or not first.capacity_rps else first
    rps = first.capacity_rps + share * (second.capacity_rps - first.capacity_rps)
    if rps == most.capacity_rps or not most.capacity_rps:
        return most
    return replace(most, capacity_rps=rps, rates_rps=tuple(rate * rps / most.capacity_rps for rate in most.rates_rps))
