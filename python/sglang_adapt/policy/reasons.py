"""Why a layout is to be changed: the trigger, and in words for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_adapt.policy.division import Divider
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.situation import Option, Situation, Trigger
from sglang_adapt.policy.worth import BEHIND, Row, longest_held


def why_change(
    rows: Sequence[Row],
    best: Option,
    serving: Option,
    now: Situation,
    speeds: Mapping[int, Speed],
    divider: Divider,
) -> tuple[Trigger, str, Row | None]:
    """The trigger of a change, its reason in words, and, if it is for a tier, which."""
    holds = longest_held(serving.engines.prompts, speeds)
    idle = not any(row.demand.is_there for row in rows)
    if now.longest_tokens > holds:
        told = f"a request of {now.longest_tokens} tokens is there, {serving} holds {holds}"
        return Trigger.LONG_CONTEXT, told, None
    for row in rows:
        if not divider.meets(row, serving.engines) and divider.meets(row, best.engines):
            terms = row.demand.terms
            named, whose = f"tier {terms.tier}", ""
            if terms.ttft_ms is not None and terms.tpot_ms is not None:
                named, whose = f"{named} ({terms.ttft_ms:g} / {terms.tpot_ms:g} ms)", " within its targets"
            has = "has no requests now, and the next one" if idle else "has requests, which"
            told = f"{named} {has} {serving} cannot serve{whose}"
            return Trigger.PRIORITY, told, row
    if idle:
        times = [_duration(_mean_ms(option, rows)) for option in (serving, best)]
        return Trigger.LOAD, f"no requests now; the next one takes {times[0]} on {serving}, {times[1]} on {best}", None
    load = sum(row.offered_rps for row in rows)
    apart = serving.division is not None or best.division is not None
    if apart and min(serving.ends_rps or 0.0, best.ends_rps or 0.0) < (1 - BEHIND) * load:
        ends = [f"{option} ends {option.ends_rps or 0.0:.3g} of it within the targets" for option in (serving, best)]
        more = (best.ends_rps or 0.0) > (serving.ends_rps or 0.0)
        by = "" if more else _by_value(best, serving, rows)
        return Trigger.LOAD, f"load {load:.3g} req/s: {ends[0]}, {ends[1]}{by}", None
    carries = [_carries(option, rows, load) for option in (serving, best)]
    by = "" if _speaks_for(best, serving, rows, load) else _by_value(best, serving, rows)
    return Trigger.LOAD, f"load {load:.3g} req/s: {carries[0]}, {carries[1]}{by}", None


def _speaks_for(best: Option, serving: Option, rows: Sequence[Row], load: float) -> bool:
    """Is the best one the better one by what is told of both, without weights?"""
    keeps_up = [_carried(option) >= (1 - BEHIND) * load for option in (best, serving)]
    if all(keeps_up):
        return _mean_ms(best, rows) < _mean_ms(serving, rows)
    return keeps_up[0] or (not keeps_up[1] and _carried(best) > _carried(serving))


def _by_value(best: Option, serving: Option, rows: Sequence[Row]) -> str:
    """What has decided where loads and times alone speak for the layout that serves."""
    gains = {row.tier: best.worth.carried_rps[row.tier] - serving.worth.carried_rps[row.tier] for row in rows}
    row = max(rows, key=lambda row: row.weight * gains[row.tier])
    of_tier = ""
    if len(rows) > 1 and gains[row.tier] > 0:
        was, now = (option.worth.carried_rps[row.tier] for option in (serving, best))
        of_tier = f", as of tier {row.tier} (weight {row.weight:g}) it carries {now:.3g} instead of {was:.3g}"
    how = "weights and times" if len({row.weight for row in rows}) > 1 else "loads and times together"
    return f"; by {how} {serving} is worth {serving.worth.value:.3g}, {best} {best.worth.value:.3g}{of_tier}"


def _carries(option: Option, rows: Sequence[Row], load: float) -> str:
    """What an option does of a load in requests/s; the time of requests where it keeps up, as else they queue."""
    if _carried(option) < (1 - BEHIND) * load:
        return f"{option} carries {_carried(option):.3g} of it"
    return f"{option} carries it in {_duration(_mean_ms(option, rows))} a request"


def _carried(option: Option) -> float:
    return sum(option.worth.carried_rps.values())


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
