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
        return Trigger.LOAD, f"load {load:.3g} req/s: {ends[0]}, {ends[1]}", None
    carries = [_carries(option, rows, load) for option in (serving, best)]
    return Trigger.LOAD, f"load {load:.3g} req/s: {carries[0]}, {carries[1]}", None


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
