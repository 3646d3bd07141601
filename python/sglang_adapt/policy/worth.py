"""What a layout is worth under a demand: how many requests it ends within their targets, and how soon.

A layout counts by how many engines of each TP size it has. Tiers are spread over them as the router does: the tightest
first, each over all engines on which its targets can be met, in proportion to what these have left. So any layout can
be compared with any other, the one that serves included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sglang_adapt.policy.admission import guarded_by_ms
from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.efficiency import Estimate, Speed, estimate, with_shorter_prompts
from sglang_adapt.policy.limits import SAFETY

QUICK = 0.5
"""A request that ends within its targets is worth its tier's weight, and up to this part of it more, the nearer its
time is to the least that is possible here. So a layout that carries more is preferred to one that is quicker."""

BEHIND = 0.02
"""Load is left behind if more than this part of it is not carried."""
SLOW = 0.1
"""Where so much of the load is left behind, being quick is worth nothing more: what counts is how much is carried."""

Counts = Mapping[int, int]
"""Engines by TP size; one with none may be missing."""
_Place = tuple[int, bool]
"""Engines of a TP size that leave room for the tightest tier there (False), or that need not (True)."""
_CHOICE = 1.2
"""Under more load than there is room for, the mean prompt that is let in is shorter than the mean by this times the
part that is left out times the spread of prompts (`Demand.prompt_spread`): so it was for 14B shapes on two traces, with
spreads of 0.5 and 1.0 and 20 to 80 % left out."""
_PARTS = (0.65, 0.3)
"""Of the mean prompt, the means for which rates are estimated."""


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

    @cached_property
    def tier(self) -> str:
        return self.demand.terms.tier

    @cached_property
    def weight(self) -> float:
        return self.demand.terms.weight

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """TP sizes at which its targets can be met."""
        return tuple(tp for tp, one in self.estimates.items() if one.capacity_rps > 0)

    @cached_property
    def alone_ms(self) -> float:
        """The least time of a request."""
        return min(one.alone_ms for one in self.estimates.values())

    def efficiency(self, tp: int) -> float:
        """Requests/s within the targets that a GPU gives at a TP size: goodput efficiency, capped by the load."""
        return min(self.estimates[tp].capacity_rps, self.offered_rps) / tp


@dataclass(frozen=True)
class _Beside:
    """A tier and a TP size where a tighter tier is.

    Attributes:
        guarded: its estimate on an engine that leaves room for the tighter one.
        tpot_ms: the target that it has there; None if there is none.
        looser, asked: what is asked for there by weight: what is looser than the tightest, and all.
    """

    guarded: Estimate
    tpot_ms: float | None
    looser: float
    asked: float


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
    _shared: dict[tuple[str, int], _Beside | None] = field(default_factory=dict)
    _blends: dict[tuple[str, int, int, int], Estimate] = field(default_factory=dict)
    _shorter: dict[tuple[str, _Place, float], Estimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = sorted(self.rows, key=lambda row: (len(row.sizes), row.demand.terms.tpot_ms or math.inf, row.tier))

    def worth(self, counts: Counts) -> Worth:
        """Value a layout."""
        whole = {
            place: float(number) for tp, count in counts.items() if count for place, number in self._places(tp, count)
        }
        free = dict(whole)
        given: list[tuple[Row, list[tuple[_Place, Estimate, float]]]] = [(row, []) for row in self.order]
        for first in (True, False):
            for row, parts in given:
                room = [
                    (place, one, left * one.capacity_rps)
                    for place, left in free.items()
                    if left > 0 and (one := self._at(row, place)).capacity_rps > 0
                    if not first or self._comes_first(row, place)
                ]
                total = sum(rate for _, _, rate in room)
                missing = row.offered_rps - sum(rate for _, _, rate in parts)
                if 0 < total < missing:
                    room = self._let_in(row, room, free, missing)
                    total = sum(rate for _, _, rate in room)
                filled = min(1.0, missing / total) if total > 0 and missing > 0 else 0.0
                if filled:
                    parts += [(place, one, filled * rate) for place, one, rate in room]
                    for place, _, _ in room:
                        free[place] *= 1 - filled
        value, carried, times = 0.0, {}, {}
        quick = self._quick(given)
        for row, parts in given:
            rate = sum(part for _, _, part in parts)
            carried[row.tier], times[row.tier] = rate, math.inf
            if rate > 0:
                busy = sum(part * one.time_ms(1 - free[place] / whole[place]) for place, one, part in parts)
                times[row.tier] = busy / rate
                value += row.weight * rate * (1 + quick * min(1.0, row.alone_ms / times[row.tier]))
        return Worth(value, carried, times)

    def _let_in(
        self, row: Row, room: Sequence[tuple[_Place, Estimate, float]], free: Mapping[_Place, float], missing: float
    ) -> list[tuple[_Place, Estimate, float]]:
        """The same room under more load than it has: filled with short prompts more than with long ones.

        A short prompt finds its target kept where a long one does not, so what is let in is less work a request than
        what comes, and more requests are: the more, the more prompts differ.
        """
        slope = _CHOICE * row.demand.prompt_spread

        def off(rates: Sequence[tuple[_Place, Estimate, float]], part: float) -> float:
            """How far the mean prompt that is let in is above `part` of all, if so many are let in as `rates` say."""
            return 1 - slope * (missing - sum(rate for _, _, rate in rates)) / row.offered_rps - part

        longer = list(room)
        above = off(longer, 1.0)
        if above >= 0:
            return longer
        for part in _PARTS:
            found = [(place, self._with_shorter_prompts(row, place, part)) for place, _, _ in room]
            shorter = [(place, one, free[place] * one.capacity_rps) for place, one in found]
            below = off(shorter, part)
            if below >= 0:
                # The mean is in between, and rates are about on a straight line.
                share = above / (above - below)
                return [
                    (place, one if share >= 0.5 else other, rate + share * (less - rate))
                    for (place, other, rate), (_, one, less) in zip(longer, shorter, strict=True)
                ]
            longer, above = shorter, below
        return longer

    def _quick(self, given: Sequence[tuple[Row, Sequence[tuple[_Place, Estimate, float]]]]) -> float:
        """What being quick is worth: less, the more of the load is left behind (`SLOW`)."""
        asked = sum(row.weight * row.offered_rps for row, _ in given)
        carried = sum(row.weight * rate for row, parts in given for _, _, rate in parts)
        left = 1 - carried / asked if asked > 0 else 0.0
        return QUICK * max(0.0, 1 - left / SLOW)

    def on(self, row: Row, tp: int, counts: Counts) -> Estimate:
        """A tier's estimate where a tighter one is: as in admission, it leaves room for that one on a part of the
        engines (`reserve.guards`). Its first tokens may come as late as its own target says."""
        alone, shared = row.estimates[tp], self._beside(row, tp)
        if not alone.capacity_rps or shared is None:
            return alone
        guarded = shared.guarded
        count = counts[tp]
        open_ones = _open_ones(count, shared)
        blend = (row.tier, tp, open_ones, count)
        if blend not in self._blends:
            self._blends[blend] = _blended(guarded, alone, open_ones / count)
        return self._blends[blend]

    def _places(self, tp: int, count: int) -> list[tuple[_Place, int]]:
        """A size's engines: those that leave room for the tightest tier there, and the others, which need not
        (`reserve.guards`)."""
        for row in self.order:
            shared = self._beside(row, tp) if row.estimates[tp].capacity_rps > 0 else None
            if shared is not None and (open_ones := _open_ones(count, shared)):
                return [((tp, False), count - open_ones), ((tp, True), open_ones)]
        return [((tp, False), count)]

    def _at(self, row: Row, place: _Place) -> Estimate:
        tp, is_open = place
        shared = None if is_open else self._beside(row, tp)
        return row.estimates[tp] if shared is None else shared.guarded

    def _with_shorter_prompts(self, row: Row, place: _Place, part: float) -> Estimate:
        """The same, of prompts that have in the mean this part of the tokens of all."""
        key = (row.tier, place, part)
        if key not in self._shorter:
            tp, is_open = place
            shared, asked = None if is_open else self._beside(row, tp), row.demand
            shorter = replace(asked, prompt_tokens=part * asked.prompt_tokens, prompt_spread=part * asked.prompt_spread)
            target_ms = asked.terms.tpot_ms if shared is None else shared.tpot_ms
            self._shorter[key] = with_shorter_prompts(self._at(row, place), shorter, self.speeds[tp], target_ms)
        return self._shorter[key]

    def _comes_first(self, row: Row, place: _Place) -> bool:
        """The tightest tier does where room is left for it, the others where none is. What one of them leaves is
        anybody's: that a burst of the tightest one takes all engines is not what admission does."""
        tp, is_open = place
        return is_open == (self._beside(row, tp) is not None)

    def _beside(self, row: Row, tp: int) -> _Beside | None:
        key = (row.tier, tp)
        if key not in self._shared:
            self._shared[key] = self._beside_tighter(row, tp)
        return self._shared[key]

    def _beside_tighter(self, row: Row, tp: int) -> _Beside | None:
        """None if no tier there is tighter."""
        own, alone = row.demand.terms, row.estimates[tp]
        there = [other for other in self.order if other.estimates[tp].capacity_rps > 0]
        tightest = min((tpot_ms_of(other) for other in there), default=math.inf)
        if tightest >= tpot_ms_of(row):
            return None
        speed = self.speeds[tp]
        most = min(guarded_by_ms(tightest, speed.times.decode_ms(1, 1.0)) / SAFETY, tpot_ms_of(row))
        finite = math.isfinite(most)
        guarded = estimate(row.demand, speed, own.ttft_ms, most, own=False) if finite else alone
        asked = sum(other.weight * other.demand.rate_rps for other in there)
        looser = sum(other.weight * other.demand.rate_rps for other in there if tpot_ms_of(other) > tightest)
        return _Beside(guarded, most if finite else own.tpot_ms, looser, asked)


def longest_held(counts: Counts, speeds: Mapping[int, Speed]) -> int:
    """Tokens of the longest request that a layout holds."""
    return max((speeds[tp].request_tokens for tp, number in counts.items() if number), default=0)


def tpot_ms_of(row: Row) -> float:
    """A tier's target; infinite without one."""
    tpot_ms = row.demand.terms.tpot_ms
    return math.inf if tpot_ms is None else tpot_ms


def _open_ones(count: int, beside: _Beside) -> int:
    """Of `count` engines, those that leave no room for the tightest tier: the looser ones' share."""
    if beside.asked <= 0:
        return 0
    return min(count - 1, math.floor(count * beside.looser / beside.asked + 0.5))


def _blended(first: Estimate, second: Estimate, share: float) -> Estimate:
    """The mean engine of which this share is as the second one: with the times of the one that most are like."""
    most = second if share >= 0.5 or not first.capacity_rps else first
    rps = first.capacity_rps + share * (second.capacity_rps - first.capacity_rps)
    if rps == most.capacity_rps or not most.capacity_rps:
        return most
    return replace(most, capacity_rps=rps, rates_rps=tuple(rate * rps / most.capacity_rps for rate in most.rates_rps))
