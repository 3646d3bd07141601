"""What a layout is worth under a demand: how many requests it ends within their targets, and how soon.

A layout counts by how many engines of each TP size it has. Tiers are spread over them as the router does: the tightest
first, each over all engines on which its targets can be met, in proportion to what these have left. So any layout can
be compared with any other, the one that serves included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.efficiency import Estimate, Speed, estimate

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
    _shared: dict[tuple[str, int], Estimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._order = sorted(
            self.rows, key=lambda row: (len(row.sizes), row.demand.terms.tpot_ms or math.inf, row.tier)
        )

    def worth(self, counts: Counts) -> Worth:
        """Value a layout."""
        free = {tp: float(count) for tp, count in counts.items() if count}
        given: list[tuple[Row, list[tuple[int, Estimate, float]]]] = []
        for row in self._order:
            room = [
                (tp, one, left * one.capacity_rps) for tp, left in free.items() if (one := self._on(row, tp, counts))
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

    def _on(self, row: Row, tp: int, counts: Counts) -> Estimate:
        """A tier's estimate: where there are fewer engines than tiers it shares one with the tightest of them."""
        there = [other.demand.terms for other in self._order if other.estimates[tp].capacity_rps > 0]
        if counts[tp] >= len(there) or not row.estimates[tp].capacity_rps:
            return row.estimates[tp]
        key = (row.tier, tp)
        if key not in self._shared:
            ttft = min((terms.ttft_ms for terms in there if terms.ttft_ms is not None), default=None)
            tpot = min((terms.tpot_ms for terms in there if terms.tpot_ms is not None), default=None)
            own = row.demand.terms
            self._shared[key] = (
                row.estimates[tp]
                if (ttft, tpot) == (own.ttft_ms, own.tpot_ms)
                else estimate(row.demand, self.speeds[tp], ttft, tpot, own=False)
            )
        return self._shared[key]
