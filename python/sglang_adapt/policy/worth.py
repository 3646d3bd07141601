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
from sglang_adapt.policy.reserve import FILL, NO_ROOM, open_ones

QUICK = 0.5
"""A request that ends within its targets is worth its tier's weight, and up to this part of it more, the nearer its
time is to the least that is possible here. So a layout that carries more is preferred to one that is quicker."""

BEHIND = 0.02
"""Load is left behind if more than this part of it is not carried."""
SLOW = 0.1
"""Where so much of the load is left behind, being quick is worth nothing more: what counts is how much is carried."""

Counts = Mapping[int, int]
"""Engines by TP size; one with none may be missing."""
_Place = tuple[int, float | None]
"""Engines of a TP size: how far looser work fills what the tightest target leaves there (`reserve.guards`); None: these
are looser work's own."""
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
        guarded: its estimate on an engine of the tighter one.
        tpot_ms: the target that it has there; None if there is none.
    """

    guarded: Estimate
    tpot_ms: float | None


@dataclass(frozen=True)
class _Shares:
    """What is asked for at a TP size.

    Attributes:
        tightest_ms: least TPOT target; infinite if there is none.
        looser, asked: by weight, what is looser than that, and all.
    """

    tightest_ms: float
    looser: float
    asked: float

    def open_ones(self, count: int) -> int:
        """Of `count` engines, those that are looser work's own: its share."""
        return open_ones(count, self.looser, self.asked)

    def fill(self, count: int) -> float:
        """How far looser work goes on the others."""
        return FILL if self.open_ones(count) else NO_ROOM


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
    _shared: dict[tuple[str, int, float], _Beside | None] = field(default_factory=dict)
    _shares: dict[int, _Shares] = field(default_factory=dict)
    _found: dict[tuple[str, _Place], Estimate] = field(default_factory=dict)
    _firsts: dict[tuple[str, _Place], float] = field(default_factory=dict)
    _fair: dict[_Place, dict[str, float]] = field(default_factory=dict)
    _blends: dict[tuple[str, int, int], Estimate] = field(default_factory=dict)
    _shorter: dict[tuple[str, int, float | None, float], Estimate] = field(default_factory=dict)
    _shorter_at: dict[tuple[str, _Place, float], Estimate] = field(default_factory=dict)

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
                missing = row.offered_rps - (sum([rate for _, _, rate in parts]) if parts else 0.0)
                if missing <= 0:
                    continue
                mine, room = {}, []
                for place, here in free.items():
                    if first:
                        share = self._first_share(row, place)
                        if not share:
                            continue
                        here = min(here, whole[place] * share)
                    if here > 0 and (one := self._at(row, place)).capacity_rps > 0:
                        mine[place] = here
                        room.append((place, one, here * one.capacity_rps))
                total = sum([rate for _, _, rate in room])
                if 0 < total < missing:
                    room = self._let_in(row, room, mine, missing)
                    total = sum([rate for _, _, rate in room])
                if total > 0:
                    filled = min(1.0, missing / total)
                    parts += [(place, one, filled * rate) for place, one, rate in room]
                    for place, _, _ in room:
                        free[place] -= filled * mine[place]
        value, carried, times = 0.0, {}, {}
        quick = self._quick(given)
        for row, parts in given:
            rate = sum([part for _, _, part in parts])
            carried[row.tier], times[row.tier] = rate, math.inf
            if rate > 0:
                busy = sum([part * one.time_ms(1 - free[place] / whole[place]) for place, one, part in parts])
                times[row.tier] = busy / rate
                value += row.weight * rate * (1 + quick * min(1.0, row.alone_ms / times[row.tier]))
        return Worth(value, carried, times)

    def _first_share(self, row: Row, place: _Place) -> float:
        """The part of engines that a tier may take before the others; 0 where it does not come first."""
        key = (row.tier, place)
        share = self._firsts.get(key)
        if share is None:
            share = self._firsts[key] = self._fair_share(row, place) if self._comes_first(row, place) else 0.0
        return share

    def _fair_share(self, row: Row, place: _Place) -> float:
        """The part of engines that a tier has where none leaves room for another one: as much as it asks for, by
        weight. Elsewhere all is there for who comes first."""
        if place[1] != NO_ROOM:
            return 1.0
        if place not in self._fair:
            asked = {
                other.tier: other.weight * other.offered_rps / one.capacity_rps
                for other in self.order
                if (one := self._at(other, place)).capacity_rps > 0
            }
            whole = sum(asked.values())
            self._fair[place] = {tier: part / whole for tier, part in asked.items() if whole > 0}
        return self._fair[place].get(row.tier, 1.0)

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
            return 1 - slope * (missing - sum([rate for _, _, rate in rates])) / row.offered_rps - part

        longer = list(room)
        above = off(longer, 1.0) if slope > 0 else 0.0
        if above >= 0:
            return longer
        for part in _PARTS:
            shorter = []
            for place, _, _ in room:
                one = self._with_shorter_prompts(row, place, part)
                shorter.append((place, one, free[place] * one.capacity_rps))
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
        """A tier's estimate where a tighter one is: as in admission, it keeps to that one's target on a part of the
        engines (`reserve.guards`). Its first tokens may come as late as its own target says."""
        alone = row.estimates[tp]
        if not alone.capacity_rps:
            return alone
        count, shares = counts[tp], self._shares_of(tp)
        shared = self._beside(row, tp, shares.fill(count))
        if shared is None:
            return alone
        blend = (row.tier, tp, count)
        if blend not in self._blends:
            self._blends[blend] = _blended(shared.guarded, alone, shares.open_ones(count) / count)
        return self._blends[blend]

    def _places(self, tp: int, count: int) -> list[tuple[_Place, int]]:
        """A size's engines: those of the tightest tier there, and looser work's own (`reserve.guards`)."""
        shares = self._shares_of(tp)
        own: _Place = (tp, shares.fill(count))
        open_ones = shares.open_ones(count)
        return [(own, count - open_ones), ((tp, None), open_ones)] if open_ones else [(own, count)]

    def _at(self, row: Row, place: _Place) -> Estimate:
        key = (row.tier, place)
        found = self._found.get(key)
        if found is None:
            tp, fill = place
            shared = None if fill is None else self._beside(row, tp, fill)
            found = self._found[key] = row.estimates[tp] if shared is None else shared.guarded
        return found

    def _with_shorter_prompts(self, row: Row, place: _Place, part: float) -> Estimate:
        """The same, of prompts that have in the mean this part of the tokens of all."""
        there = (row.tier, place, part)
        if there in self._shorter_at:
            return self._shorter_at[there]
        (tp, fill), asked = place, row.demand
        shared = None if fill is None else self._beside(row, tp, fill)
        target_ms = asked.terms.tpot_ms if shared is None else shared.tpot_ms
        key = (row.tier, tp, target_ms, part)
        if key not in self._shorter:
            shorter = replace(asked, prompt_tokens=part * asked.prompt_tokens, prompt_spread=part * asked.prompt_spread)
            self._shorter[key] = with_shorter_prompts(self._at(row, place), shorter, self.speeds[tp], target_ms)
        found = self._shorter_at[there] = self._shorter[key]
        return found

    def _comes_first(self, row: Row, place: _Place) -> bool:
        """The tightest tier does on its own engines, the others on theirs, and all of them where none leaves room. What
        one of them leaves is anybody's: that a burst of the tightest one takes all engines is not what admission does.
        """
        tp, fill = place
        return fill == NO_ROOM or (fill is None) == (tpot_ms_of(row) > self._shares_of(tp).tightest_ms)

    def _beside(self, row: Row, tp: int, fill: float) -> _Beside | None:
        key = (row.tier, tp, fill)
        if key not in self._shared:
            self._shared[key] = self._beside_tighter(row, tp, fill)
        return self._shared[key]

    def _beside_tighter(self, row: Row, tp: int, fill: float) -> _Beside | None:
        """None if no tier there is tighter."""
        own, alone, tightest_ms = row.demand.terms, row.estimates[tp], self._shares_of(tp).tightest_ms
        if tightest_ms >= tpot_ms_of(row):
            return None
        speed = self.speeds[tp]
        most = min(guarded_by_ms(tightest_ms, speed.times.decode_ms(1, 1.0), fill) / SAFETY, tpot_ms_of(row))
        if not alone.capacity_rps or most >= tpot_ms_of(row):
            return _Beside(alone, own.tpot_ms)
        return _Beside(estimate(row.demand, speed, own.ttft_ms, most, own=False), most)

    def _shares_of(self, tp: int) -> _Shares:
        if tp not in self._shares:
            there = [row for row in self.order if row.estimates[tp].capacity_rps > 0]
            tightest_ms = min((tpot_ms_of(row) for row in there), default=math.inf)
            looser = [row for row in there if tpot_ms_of(row) > tightest_ms]
            self._shares[tp] = _Shares(
                tightest_ms,
                sum(row.weight * row.demand.rate_rps for row in looser),
                sum(row.weight * row.demand.rate_rps for row in there),
            )
        return self._shares[tp]


def longest_held(counts: Counts, speeds: Mapping[int, Speed]) -> int:
    """Tokens of the longest request that a layout holds."""
    return max((speeds[tp].request_tokens for tp, number in counts.items() if number), default=0)


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
