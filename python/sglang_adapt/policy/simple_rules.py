"""Simpler rules in place of admission and placement by targets, to measure what those are worth: pure decisions.

As the first steps of Nitsum's ablation (4.2.1): requests go on as they come, or by a batch rule that looks at each
request alone. See `core.ablation.Scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_adapt.policy.admission import Decision, Job, Load, Outcome, forecast
from sglang_adapt.policy.limits import SAFETY


def least_loaded(loads: Sequence[Load]) -> int | None:
    """The engine with the fewest requests, and of these the fewest tokens, as stock's; None if there is no engine."""
    at = range(len(loads))
    return min(at, key=lambda one: (loads[one].requests, loads[one].context, one), default=None)


def by_arrival(loads: Sequence[Load]) -> Decision:
    """A request that goes on at once; without an engine, as in a switch, when there is one. Nothing is promised."""
    at = least_loaded(loads)
    return Decision(Outcome.BEST_EFFORT, None if at is None else loads[at].engine)


def by_batch_rule(job: Job, loads: Sequence[Load]) -> Decision:
    """Feasible on the engine with the least load if the request is predicted to meet its own targets there.

    What runs there and what is to be expected does not count, and no other engine is looked at. Work without targets
    waits for room, as it does by targets.
    """
    if job.ttft_ms is None or job.tpot_ms is None:
        return Decision(Outcome.BACKGROUND)
    at = least_loaded(loads)
    if at is None:
        return Decision(Outcome.BEST_EFFORT)
    seen = forecast(job, loads[at])
    meets = not seen.full and seen.ttft_ms <= SAFETY * job.ttft_ms and seen.tpot_ms <= SAFETY * job.tpot_ms
    if meets:
        return Decision(Outcome.FEASIBLE, loads[at].engine, seen.ttft_ms, seen.tpot_ms)
    return Decision(Outcome.BEST_EFFORT, None, seen.ttft_ms, seen.tpot_ms)
