"""Which layout should serve next, and is it worth the switch? A pure decision over frozen data.

The layouts that are compared: the one that serves, each TP size on all GPUs, one wide engine beside narrow ones, what
the weighted greedy of `assign` gives the tiers, and, where chance takes something of what the best of these carries,
engines that read prompts beside engines that decode (`division`). The best of them by `worth` wins, under three
conditions that go before any gain, in this order: a tier that has waited `STARVED` windows for an engine that meets its
targets gets one; the longest request that is there, or was within the last `LINGER` windows, has an engine that holds
it; as many tiers as possible have an engine that meets their targets. So a tier with requests is without such an engine
for at most `STARVED` windows and one for each tier, if any layout has one for it. One thing goes before all of them: a
request that an engine has is never planned onto one that does not hold it.

Beside the papers (Nitsum, 3.3.1; Flying Serving, 2.3): a switch has a price. It is made when its gain over the next
windows, or over those in which it has been missed, is above what it costs now, and above a margin, and, unless load is
left behind of which it carries much more, when it has been wanted for `CALM` windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.assign import composed, count, greedy, place, tiers_of, with_one
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.division import Divider, Division, division_of, divisions_to_try, with_roles
from sglang_adapt.policy.efficiency import Speed, estimate
from sglang_adapt.policy.pausing import strategy_for
from sglang_adapt.policy.price import Bill, bill
from sglang_adapt.policy.reasons import why_change
from sglang_adapt.policy.situation import History, Option, Plan, Roles, Situation
from sglang_adapt.policy.worth import BEHIND, QUICK, Appraiser, Row, longest_held

STARVED = 5
"""Windows that a tier waits for an engine that meets its targets, while another layout is worth more."""
MARGIN = 0.05
"""A layout that serves is left for one that is worth at least this part more; of `BEHIND`, if it leaves load behind."""
URGENT = 0.2
"""While load is left behind, a layout that is worth so much more is gone over to at once, any other after `CALM`
windows: estimates of two layouts that are both too small are not so good that one window tells which is better."""
LINGER = 5
"""Windows that an engine which was bound for a long request stays after the last one has ended."""
IDLE_RPS = 0.05
"""The load of every tier while nobody asks for anything: the layout is made ready for the next request."""


def plan(now: Situation) -> Plan:
    """Decide. The same situation gives the same plan."""
    speeds = {speed.tp: speed for speed in now.speeds}
    rows = _rows(now)
    appraiser = Appraiser(rows, speeds)
    divider = Divider(rows, speeds, appraiser, now.handover_ms)
    current, held = count(now.layout), division_of(now.layout)
    own = greedy(rows, tuple(speeds), now.gpus)
    waited = {
        row.tier: now.history.waited.get(row.tier, 0) + 1 for row in rows if row.sizes and not divider.meets(row, held)
    }
    overdue = max(
        (row for row in rows if waited.get(row.tier, 0) >= STARVED),
        key=lambda row: (waited[row.tier], row.tier),
        default=None,
    )

    longest, since = _longest(now)
    # An engine that was bound for what has ended is kept for a while, but none is bound for it.
    kept = longest if longest_held(held.prompts, speeds) >= longest else now.longest_tokens

    def musts(option: Option) -> tuple[bool, bool, int]:
        engines = option.engines
        return (
            overdue is None or divider.meets(overdue, engines),
            longest_held(engines.prompts, speeds) >= kept,
            sum(divider.meets(row, engines) for row in rows),
        )

    # What runs and is too long for any engine of a layout cannot go over to it.
    runs = max((one.longest_tokens for one in now.running.values()), default=0)
    options = [
        Option(counts, appraiser.worth(counts))
        for counts in _candidates(current, own, now)
        if counts == current or longest_held(counts, speeds) >= runs
    ]
    # Of equal ones the first, which is the one that serves.
    options.sort(key=lambda option: (*musts(option), round(option.worth.value, 9)), reverse=True)
    roles = None
    if held.has_roles or (now.gives_roles and any(row.demand.is_there for row in rows)):
        options, roles = _with_roles(options, held, now, rows, divider, max(runs, kept), musts)
    best = options[0]
    serving = next(option for option in options if option.engines == held)
    better = musts(best) > musts(serving)
    behind = _left_behind(rows, serving)
    wanted, margin = now.layout, BEHIND if behind else MARGIN
    if best is not serving and (better or best.worth.value > (1 + margin) * serving.worth.value):
        busy = {name: one.kv_bytes for name, one in now.running.items()}
        bound = [name for name, one in now.running.items() if one.longest_tokens]
        # Engines that are the best as they are, but in other roles, stay.
        wanted = (
            Layout(now.layout.engines)
            if best.counts == current
            else place(best.counts, now.gpus, now.layout, busy, bound)
        )
        if best.division is not None:
            wanted = with_roles(wanted, best.division, now.layout, busy)
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
        trigger, why, row = why_change(rows, best, serving, now, speeds, divider)
        if row is not None:
            strategy = strategy_for(row, now.layout, wanted, now.running, speeds, now.horizon_s)
        lost = _lost(rows, cost)
        # What runs makes the price, so who waits for a cheap moment may wait as long as the load lasts.
        counts_s = max(now.horizon_s, windows * now.window_s)
        # Roles are not given for a burst.
        divides = best.division is not None and not held.has_roles
        urgent = best.worth.value >= (1 + URGENT) * serving.worth.value
        gain = (best.worth.value - serving.worth.value) * counts_s
        if not better and gain <= lost:
            reason = f"{why}; but a switch would cost {lost:.3g} and gain {gain:.3g} in {counts_s:g} s"
        elif not better and windows < now.calm and (not behind or divides or not urgent):
            reason = f"{why}; for {windows} of {now.calm} windows"
        else:
            move, reason = True, why
    served = wanted if move else now.layout
    history = History(waited, named, windows, longest, since)
    tiers = tiers_of(wanted, rows, divider.can)
    of_served = tiers if served == wanted else tiers_of(served, rows, divider.can)
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
        roles,
    )


def _with_roles(
    options: list[Option],
    held: Division,
    now: Situation,
    rows: Sequence[Row],
    divider: Divider,
    holds_tokens: int,
    musts: Callable[[Option], tuple[bool, bool, int]],
) -> tuple[list[Option], Roles]:
    """Layouts with roles among those that were compared, and what is to be said of them.

    Mixed engines are the rule: divisions are tried where chance takes more than `BEHIND` of what is asked for from the
    best of them, or where they meet not all targets. Then what a division is worth is told by the value of the best
    mixed layout, so that it is more if, and only if, it is with chance.

    Args:
        options: layouts with mixed engines, the best first.
        held: what the engines of the layout that serves do.
        holds_tokens: that an engine which reads has to hold.
        musts: what goes before any value.
    """
    mixed = options[0]
    counted = divider.worth(mixed.engines)
    ends = sum(counted.carried_rps.values())
    options[0] = mixed = replace(mixed, ends_rps=ends)
    load = sum(row.offered_rps for row in rows)
    short = ends < (1 - BEHIND) * load or musts(mixed)[2] < sum(bool(row.sizes) for row in rows)
    known = now.steady or held.has_roles
    divisions = (
        []
        if not short or not known or not now.gives_roles
        else list(divisions_to_try(divider, now.gpus, holds_tokens, rows))
    )
    if held.has_roles and held not in divisions:
        divisions.insert(0, held)
    if not divisions:
        why = "no division into roles meets the targets"
        if not short:
            why = f"{mixed} ends nearly all of it"
        elif not known:
            why = "fewer requests end than arrive, so it is not known how long answers are"
        return options, Roles("", 0.0, ends, False, f"load {load:.3g} req/s: {why}")
    found = []
    for division in divisions:
        worth = divider.worth(division)
        # If mixed engines end nothing, a division is worth what it ends.
        scale = mixed.worth.value / counted.value if counted.value > 0 else 1.0
        found.append(
            Option(
                division.counts,
                replace(worth, value=worth.value * scale),
                division,
                sum(worth.carried_rps.values()),
            )
        )
    if not held.has_roles:
        # The one that serves is told by the same measure.
        at = next(at for at, option in enumerate(options) if option.engines == held)
        if at:
            ends_now = sum(divider.worth(held).carried_rps.values())
            options[at] = replace(options[at], ends_rps=ends_now)
    best = max(found, key=lambda option: (*musts(option), round(option.worth.value, 9)))
    # Of equal ones the layout that serves is first, and then one with mixed engines.
    first = [option for option in found if option.division == held]
    both = first + options + [option for option in found if option.division != held]
    both.sort(key=lambda option: (*musts(option), round(option.worth.value, 9)), reverse=True)
    chosen = both[0].division is not None
    assert best.ends_rps is not None
    told = f"load {load:.3g} req/s: {best} ends {best.ends_rps:.3g} of it within the targets, {mixed} {ends:.3g}"
    return both, Roles(str(best), best.ends_rps, ends, chosen, told)


def _longest(now: Situation) -> tuple[int, int]:
    """(tokens, windows since it was there) of the longest request of the last windows; 0 tokens if there was none."""
    before = now.history
    if now.longest_tokens and now.longest_tokens >= before.longest:
        return now.longest_tokens, 0
    if before.since < LINGER and before.longest:
        return before.longest, before.since + 1
    return now.longest_tokens, 0


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
    """Is there load that a layout does not carry? Of one in roles that is known only with what chance takes of any."""
    if option.division is not None:
        return False
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
