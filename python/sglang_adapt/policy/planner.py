"""Which layout should serve next, and is it worth the switch? A pure decision over frozen data.

The layouts that are compared: the one that serves, each TP size on all GPUs, one wide engine beside narrow ones, and
what the weighted greedy of `assign` gives the tiers. The best of them by `worth` wins, under three conditions that go
before any gain, in this order: a tier that has waited `STARVED` windows for an engine that meets its targets gets one;
the longest request that is there, or was within the last `LINGER` windows, has an engine that holds it; as many tiers
as possible have an engine that meets their targets. So a tier with requests is without such an engine for at most
`STARVED` windows and one for each tier, if any layout has one for it. One thing goes before all of them: a request that
an engine has is never planned onto one that does not hold it.

Beside the papers (Nitsum, 3.3.1; Flying Serving, 2.3): a switch has a price. It is made when its gain over the next
windows, or over those in which it has been missed, is above what it costs now, and above a margin, and, unless load is
left behind, when it has been wanted for `CALM` windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.policy.assign import composed, count, greedy, place, tiers_of, with_one
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.efficiency import Speed, estimate
from sglang_adapt.policy.pausing import strategy_for
from sglang_adapt.policy.price import Bill, Price, Running, bill
from sglang_adapt.policy.split import Split, roles_rps, split, together
from sglang_adapt.policy.worth import QUICK, Appraiser, Counts, Row, Worth

STARVED = 5
"""Windows that a tier waits for an engine that meets its targets, while another layout is worth more."""
CALM = 3
"""Windows in a row, at most, that a layout has to be wanted if the one that serves carries the load as well."""
MARGIN = 0.05
"""A layout that serves is left for one that is worth at least this part more."""
BEHIND = 0.02
"""Load is left behind if more than this part of it is not carried; then this is the margin."""
LINGER = 5
"""Windows that an engine which was bound for a long request stays after the last one has ended."""
IDLE_RPS = 0.05
"""The load of every tier while nobody asks for anything: the layout is made ready for the next request."""


class Trigger(StrEnum):
    """Why the layout is changed.

    LOAD: another one carries more, or answers sooner.
    PRIORITY: a tier has requests whose targets only another one meets.
    LONG_CONTEXT: a request is there that only another one can hold.
    OPERATOR: somebody asked for it.
    """

    LOAD = "load"
    PRIORITY = "priority"
    LONG_CONTEXT = "long_context"
    OPERATOR = "operator"


@dataclass(frozen=True)
class History:
    """What one plan hands to the next.

    Attributes:
        waited: by tier, windows with requests and without an engine that meets their targets.
        wanted: the layout that was wanted last.
        windows: how often in a row it was.
        longest: tokens of the longest request that was there last which not every engine holds; 0 if that is long ago.
        since: windows since then.
    """

    waited: Mapping[str, int] = field(default_factory=dict)
    wanted: str = ""
    windows: int = 0
    longest: int = 0
    since: int = 0


@dataclass(frozen=True)
class Situation:
    """All that a plan depends on.

    Attributes:
        demands: by tier; a deployment without tiers has one.
        speeds: of each TP size, ascending.
        gpus: of the deployment.
        layout: that serves.
        running: what its engines have, by name.
        price: of a switch.
        longest_tokens: of the longest request that is there and that not every engine holds; 0 if there is none.
        horizon_s: time over which a gain counts, or for which it has been missed, if that is longer.
        window_s: time from one plan to the next.
        history: of the plan before.
        asked: somebody has asked for something since the start; before that no layout is known to be better.
        calm: windows in a row that a layout has to be wanted if the one that serves carries the load as well.
    """

    demands: tuple[Demand, ...]
    speeds: tuple[Speed, ...]
    gpus: int
    layout: Layout
    running: Mapping[str, Running]
    price: Price
    longest_tokens: int = 0
    horizon_s: float = 5.0
    window_s: float = 1.0
    history: History = History()
    asked: bool = True
    calm: int = CALM


@dataclass(frozen=True)
class Option:
    """A layout that was compared: engines by TP size, and what they are worth; `roles`: in those that they have now."""

    counts: Counts
    worth: Worth
    roles: bool = False

    def __str__(self) -> str:
        text = " + ".join(f"{number} x TP {tp}" for tp, number in sorted(self.counts.items(), reverse=True))
        return f"{text} in roles" if self.roles else text


@dataclass(frozen=True)
class Plan:
    """The decision.

    Attributes:
        layout: that should serve next; the one that serves, unless `move`.
        move: switch now.
        wanted: the best layout, whether or not it is worth a switch now.
        trigger: why; None if nothing better is known.
        reason: in words, also for staying.
        tiers: by engine of `wanted`, the tiers that it is there for.
        serving: the same, by engine of `layout`.
        strategy: how the switch treats what runs.
        rows: the table of estimates.
        options: all that was compared, the best first.
        bill: of a switch to `wanted`.
        split: whether roles of prefill and decode would carry more than the best layout's engines as mixed ones; only
            for several engines of one TP size and one tier that is asked for.
        history: for the next plan.
    """

    layout: Layout
    move: bool
    wanted: Layout
    trigger: Trigger | None
    reason: str
    tiers: Mapping[str, tuple[str, ...]]
    serving: Mapping[str, tuple[str, ...]]
    strategy: Strategy
    rows: tuple[Row, ...]
    options: tuple[Option, ...]
    bill: Bill
    history: History
    split: Split | None = None


def plan(now: Situation) -> Plan:
    """Decide. The same situation gives the same plan."""
    speeds = {speed.tp: speed for speed in now.speeds}
    rows = _rows(now)
    appraiser = Appraiser(rows, speeds)
    current = count(now.layout)
    own = greedy(rows, tuple(speeds), now.gpus)
    waited = {
        row.tier: now.history.waited.get(row.tier, 0) + 1 for row in rows if row.sizes and not _meets(row, current)
    }
    overdue = max(
        (row for row in rows if waited.get(row.tier, 0) >= STARVED),
        key=lambda row: (waited[row.tier], row.tier),
        default=None,
    )

    longest, since = _longest(now)
    reads = _reading(now.layout)

    def holds_most(counts: Counts) -> int:
        # The planner's own layouts have no roles.
        return _holds(reads if counts == current else counts, speeds)

    # An engine that was bound for what has ended is kept for a while, but none is bound for it.
    kept = longest if holds_most(current) >= longest else now.longest_tokens

    def musts(counts: Counts) -> tuple[bool, bool, int]:
        holds = holds_most(counts) >= kept
        return overdue is None or _meets(overdue, counts), holds, sum(_meets(row, counts) for row in rows)

    # What runs and is too long for any engine of a layout cannot go over to it.
    runs = max((one.longest_tokens for one in now.running.values()), default=0)
    options = [
        Option(counts, appraiser.worth(counts))
        for counts in _candidates(current, own, now)
        if counts == current or _holds(counts, speeds) >= runs
    ]
    if now.layout.roles:
        options.insert(0, _in_roles(now, rows, speeds, options[0]))
    # Of equal ones the first, which is the one that serves.
    options.sort(key=lambda option: (*musts(option.counts), round(option.worth.value, 9)), reverse=True)
    held = bool(now.layout.roles)
    best = options[0]
    serving = next(option for option in options if option.counts == current and option.roles is held)
    better = musts(best.counts) > musts(current)
    behind = _left_behind(rows, serving)
    wanted, margin = now.layout, BEHIND if behind else MARGIN
    if best is not serving and (better or best.worth.value > (1 + margin) * serving.worth.value):
        busy = {name: one.kv_bytes for name, one in now.running.items()}
        bound = [name for name, one in now.running.items() if one.longest_tokens]
        # Engines that are the best as they are, but without their roles, stay.
        wanted = (
            Layout(now.layout.engines)
            if best.counts == current
            else place(best.counts, now.gpus, now.layout, busy, bound)
        )
    stuck = _too_long(now, wanted, speeds) if now.asked else "no requests yet: the layout stays as it is"
    if stuck is not None:
        wanted = now.layout
    cost = bill(now.price, now.layout, wanted, now.running)
    named = str(wanted)
    windows = now.history.windows + 1 if named == now.history.wanted else 1
    move, trigger, strategy, reason = (
        False,
        None,
        Strategy.AUTO,
        stuck or f"{serving} is the best that is known, or nearly",
    )
    if wanted != now.layout:
        trigger, why, row = _why(rows, best, serving, now, speeds)
        if row is not None:
            strategy = strategy_for(row, now.layout, wanted, now.running, speeds, now.horizon_s)
        lost = _lost(rows, cost)
        # What runs makes the price, so who waits for a cheap moment may wait as long as the load lasts.
        counts_s = max(now.horizon_s, windows * now.window_s)
        gain = (best.worth.value - serving.worth.value) * counts_s
        if not better and gain <= lost:
            reason = f"{why}; but a switch would cost {lost:.3g} and gain {gain:.3g} in {counts_s:g} s"
        elif not better and not behind and windows < now.calm:
            reason = f"{why}; for {windows} of {now.calm} windows"
        else:
            move, reason = True, why
    served = wanted if move else now.layout
    history = History(waited, named, windows, longest, since)
    tiers = tiers_of(wanted, rows)
    of_served = tiers if served == wanted else tiers_of(served, rows)
    return Plan(
        served,
        move,
        wanted,
        trigger,
        reason,
        tiers,
        of_served,
        strategy,
        rows,
        tuple(options),
        cost,
        history,
        _split(best, rows, speeds),
    )


def _in_roles(now: Situation, rows: Sequence[Row], speeds: Mapping[int, Speed], mixed: Option) -> Option:
    """The layout that serves in its roles: what it does as mixed engines, by how much more or less it carries."""
    offered = sum(row.offered_rps for row in rows)
    carried = sum(mixed.worth.carried_rps.values())
    most = roles_rps(together([row.demand for row in rows]), now.layout.role_of, speeds)
    # If mixed engines carry nothing, those in roles are worth what they carry.
    share = min(offered, most) / carried if carried > 0 else 0.0
    value = mixed.worth.value * share if carried > 0 else min(offered, most)
    parts = {
        row.tier: mixed.worth.carried_rps[row.tier] * share
        if carried > 0
        else min(offered, most) * row.offered_rps / max(offered, 1e-9)
        for row in rows
    }
    return Option(mixed.counts, Worth(value, parts, mixed.worth.time_ms), roles=True)


def _split(best: Option, rows: Sequence[Row], speeds: Mapping[int, Speed]) -> Split | None:
    """For a layout of engines of one size and requests of one tier; else roles are not thought of."""
    sizes = [tp for tp, number in best.counts.items() if number]
    if len(sizes) != 1 or len(rows) != 1 or best.counts[sizes[0]] < 2:
        return None
    return split(rows[0].demand, speeds[sizes[0]], best.counts[sizes[0]])


def _longest(now: Situation) -> tuple[int, int]:
    """(tokens, windows since it was there) of the longest request of the last windows; 0 tokens if there was none."""
    before = now.history
    if now.longest_tokens and now.longest_tokens >= before.longest:
        return now.longest_tokens, 0
    if before.since < LINGER and before.longest:
        return before.longest, before.since + 1
    return now.longest_tokens, 0


def _holds(counts: Counts, speeds: Mapping[int, Speed]) -> int:
    """Tokens of the longest request that a layout holds."""
    return max((speeds[tp].request_tokens for tp, number in counts.items() if number), default=0)


def _reading(layout: Layout) -> Counter[int]:
    """Engines of a layout that read prompts, by TP size: a request has to fit into one of them."""
    if not layout.roles:
        return count(layout)
    return Counter(spec.tp for spec, role in layout.role_of.items() if role is not Role.DECODE)


def _too_long(now: Situation, wanted: Layout, speeds: Mapping[int, Speed]) -> str | None:
    """Why a layout cannot be gone over to: an engine that leaves has a request that none holds which enters."""
    long = {name: one.longest_tokens for name, one in now.running.items() if one.longest_tokens}
    if not long:
        return None
    serving, next_ones = set(now.layout.engines), set(wanted.engines)
    entering = max((speeds[engine.tp].request_tokens for engine in next_ones - serving), default=0)
    for engine in now.layout.engines:
        tokens = long.get(engine.name, 0)
        if tokens > entering and engine not in next_ones:
            return f"{engine} stays while it has a request of {tokens} tokens, which {wanted} would not take over"
    return None


def _rows(now: Situation) -> tuple[Row, ...]:
    """The tiers that are asked for, with their load; all of them, with next to none, if nobody asks for any."""
    asked = [demand for demand in now.demands if demand.is_there]
    rows = []
    for demand in asked or now.demands:
        estimates = {speed.tp: estimate(demand, speed) for speed in now.speeds}
        slowest = max(one.alone_ms for one in estimates.values())
        offered = demand.offered_rps(slowest, now.horizon_s) if asked else IDLE_RPS
        rows.append(Row(demand, offered, estimates))
    return tuple(rows)


def _meets(row: Row, counts: Counts) -> bool:
    """Is there an engine on which the tier's targets can be met?"""
    return any(row.estimates[tp].capacity_rps > 0 for tp, number in counts.items() if number)


def _candidates(current: Counter[int], own: Mapping[str, Counter[int]], now: Situation) -> Iterator[Counter[int]]:
    """The layouts that are compared, each once, the one that serves first."""
    sizes = [speed.tp for speed in now.speeds]
    total: Counter[int] = sum(own.values(), Counter())
    found = [current, total] + [composed(tp, sizes, now.gpus) for tp in sizes]
    found += [with_one(wide, rest, sizes, now.gpus) for rest in sizes for wide in sizes if wide > rest]
    seen: set[frozenset[tuple[int, int]]] = set()
    for counts in found:
        key = frozenset(counts.items())
        if key not in seen and sum(tp * number for tp, number in counts.items()) == now.gpus:
            seen.add(key)
            yield counts


def _left_behind(rows: Sequence[Row], option: Option) -> bool:
    return any(row.sizes and option.worth.carried_rps[row.tier] < (1 - BEHIND) * row.offered_rps for row in rows)


def _lost(rows: Sequence[Row], cost: Bill) -> float:
    """What a switch costs, in the unit of `Worth.value` times seconds.

    The requests that are paused lose the pause, each a share of its own time; so do those that would have been
    carried by then.
    """
    pause_s = cost.pause_ms / 1e3
    offered = sum(row.offered_rps for row in rows)
    if not offered:
        return 0.0
    weight = sum(row.weight * row.offered_rps for row in rows) / offered
    alone_s = sum(row.alone_ms * row.offered_rps for row in rows) / offered / 1e3
    return weight * (1 + QUICK) * pause_s * (cost.requests / max(alone_s, pause_s, 1e-6) + offered)


def _why(
    rows: Sequence[Row], best: Option, serving: Option, now: Situation, speeds: Mapping[int, Speed]
) -> tuple[Trigger, str, Row | None]:
    """The trigger of a change, its reason in words, and, if it is for a tier, which."""
    holds = _holds(_reading(now.layout), speeds)
    idle = not any(row.demand.is_there for row in rows)
    if now.longest_tokens > holds:
        why = f"a request of {now.longest_tokens} tokens is there, {serving} holds {holds}"
        return Trigger.LONG_CONTEXT, why, None
    for row in rows:
        if not _meets(row, serving.counts) and _meets(row, best.counts):
            terms = row.demand.terms
            named, whose = f"tier {terms.tier}", ""
            if terms.ttft_ms is not None and terms.tpot_ms is not None:
                named, whose = f"{named} ({terms.ttft_ms:g} / {terms.tpot_ms:g} ms)", " within its targets"
            has = "has no requests now, and the next one" if idle else "has requests, which"
            why = f"{named} {has} {serving} cannot serve{whose}"
            return Trigger.PRIORITY, why, row
    if idle:
        times = [_duration(_mean_ms(option, rows)) for option in (serving, best)]
        return Trigger.LOAD, f"no requests now; the next one takes {times[0]} on {serving}, {times[1]} on {best}", None
    load = sum(row.offered_rps for row in rows)
    told = [_carries(option, rows, load) for option in (serving, best)]
    return Trigger.LOAD, f"load {load:.3g} req/s: {told[0]}, {told[1]}", None


def _carries(option: Option, rows: Sequence[Row], load: float) -> str:
    """What an option does of a load in requests/s; the time of requests where it keeps up, as else they queue."""
    carried = sum(option.worth.carried_rps.values())
    if carried < (1 - BEHIND) * load:
        return f"{option} carries {carried:.3g} of it"
    return f"{option} carries it in {_duration(_mean_ms(option, rows))} a request"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1e3:.0f} s"


def _mean_ms(option: Option, rows: Sequence[Row]) -> float:
    carried = option.worth.carried_rps
    total = sum(carried.values())
    return (
        sum(carried[row.tier] * option.worth.time_ms[row.tier] for row in rows if carried[row.tier]) / total
        if total
        else 0.0
    )
