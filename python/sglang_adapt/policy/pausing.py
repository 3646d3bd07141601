"""May the requests of engines that leave be paused in place, so that a tier with tight targets has the next ones alone?
And when have they to give their blocks up?

Hard preemption: nothing is copied, and what is paused goes on, KV and all, when its engine is in the layout again. Its
price: it gives no token until then, and its blocks are not there for others. Nitsum, 3.2.2; Flying Serving, 2.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.price import Running
from sglang_adapt.policy.worth import Row


def strategy_for(
    row: Row,
    before: Layout,
    after: Layout,
    running: Mapping[str, Running],
    speeds: Mapping[int, Speed],
    horizon_s: float,
) -> Strategy:
    """How a switch treats what runs on the engines that leave, if it is made for a tier with tight targets.

    KEEP, if all of it is of tiers of less weight, and beside it the engines that enter have room for what the tier asks
    for within the horizon, and for any request that the narrowest engine holds: one that does not fit would hold
    up all others. Else AUTO.

    Args:
        row: the tier.
        before, after: the layouts.
        running: what the engines of `before` have, by name.
        speeds: by TP size, ascending.
        horizon_s: of the plan.
    """
    serving, next_ones = set(before.engines), set(after.engines)
    leaving = [(engine, running.get(engine.name, Running())) for engine in before.engines if engine not in next_ones]
    busy = [one for _, one in leaving if one.requests]
    if not busy or any(one.most_weight >= row.weight for one in busy):
        return Strategy.AUTO
    taken = {gpu: one.kv_share for engine, one in leaving for gpu in engine.gpus}
    least = min(speed.request_tokens for speed in speeds.values())
    room = 0.0
    for engine in next_ones - serving:
        left = (1 - max(taken[gpu] for gpu in engine.gpus)) * speeds[engine.tp].kv_tokens
        if left < least:
            return Strategy.AUTO
        room += left * (row.estimates[engine.tp].capacity_rps > 0)
    demand = row.demand
    requests = max(1.0, demand.unfinished.requests + demand.rate_rps * horizon_s)
    return Strategy.KEEP if requests * (demand.prompt_tokens + demand.output_tokens) <= room else Strategy.AUTO


@dataclass(frozen=True, slots=True)
class Needy:
    """A request of an engine that serves.

    Attributes:
        rid: its id.
        gpus: of its engine.
        tokens: for which its engine wants to have room now: all that it may come to have, or what stock looks ahead.
        room: of the longest request that the engine holds beside what is kept.
    """

    rid: str
    gpus: Collection[int]
    tokens: int
    room: int


def must_yield(requests: Iterable[Needy], kept: Mapping[str, Collection[int]]) -> dict[str, Needy]:
    """Which paused requests have to give their blocks up, and for whom.

    A request whose engine could not hold it beside what is kept would wait for these blocks for ever, or outgrow the
    rest, and all behind it with it.

    Args:
        requests: of the engines that serve.
        kept: by engine that keeps requests, its GPUs.

    Returns:
        By engine that keeps requests and must let go, the first request that needs its blocks.
    """
    found: dict[str, Needy] = {}
    for request in requests:
        if request.tokens > request.room:
            for name, gpus in kept.items():
                if name not in found and not set(gpus).isdisjoint(request.gpus):
                    found[name] = request
    return found
