"""Can an engine take a request within its targets, and which one does: pure decisions over what engines have to do.

As Nitsum's global scheduler (3.3.2): of each engine the available serving bandwidth, which is what it can do within the
targets of all that runs on it, less what it has been given and has not ended. A request that fits somewhere is
*feasible* and goes to the engine with the least load. Any other waits in the router, as does background work, until an
engine has room that costs no target (`room_for`); nothing waits for ever (`Ageing`).

The model of an engine. While requests decode it computes prompts in iterations of at most so many tokens as its
tightest target allows (`policy.limits`), with decode steps after each. So the first token of a request comes after the
step in flight, all prompts before its own, and the steps between. Later tokens come at the time of a decode step,
stretched by the share of time that prompts take, or by its part of the prompts of an iteration, if that is less.

An engine that only reads (`Load.takers`) hands requests over with their first token. Then the first token is that of
the model above, and later ones come at the time of a decode step at one of those that take over; a request is feasible
if it is on both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sglang_adapt.policy.limits import SAFETY, STEPS, Bounds, chunk_tokens
from sglang_adapt.policy.profile import Times
from sglang_adapt.policy.reserve import FILL, Guard

LATE_FILL = 0.25
"""As `reserve.FILL`, for work whose target is missed already: what runs in time is to find room first, or in overload
nothing would be in time any more once much is late."""
FEW_WAITING = 3
"""So much best effort that waits for each engine, late or not, is no overload: what is late of it has `FILL` like
others."""
WINDOW_MS = 2000.0
"""Over this time the share of prompts in an engine's time is reckoned."""
_MOST_SHARE = 0.95
_LOAD_STEP = 0.1
"""Loads that differ by less count as equal, so that cached prefixes decide, and then which has the fewest requests."""


_UNBOUNDED = Bounds(1, 1 << 30, 1 << 30)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is to be placed.

    Attributes:
        tokens: of its prompt.
        output: tokens that it is expected to give.
        ttft_ms, tpot_ms: targets; None for background work.
        waited_ms: since it arrived.
        tier: its name.
    """

    tokens: int
    output: float
    ttft_ms: float | None
    tpot_ms: float | None
    waited_ms: float = 0.0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has been given and has not ended.

    Attributes:
        engine: its name.
        times: how fast it is.
        requests: all of it.
        prefill_tokens: prompts whose first token has not come.
        context: tokens that its requests have, or will have when their prompts are computed.
        tightest_tpot_ms: smallest target of what runs within its targets; infinite if there is none.
        prefill_ms: prompts of the last time, decayed over `WINDOW_MS`.
        bounds: of its iterations.
        cached: tokens of the job's prompt that it is believed to have cached.
        decoding: those of its requests that have their first token.
        preemptible: those of its requests that give way to one with targets.
        guard: smallest TPOT target of requests that are to be expected, and the room that looser ones leave for them.
        waits_ms: loosest TPOT target of work that waits for room; 0 if none does.
        tiers: whose requests are promised their targets here; None: of all. Other work is taken from any tier.
        takers: engines that decode what this one reads, with what will come to them; None: it decodes itself.
    """

    engine: str
    times: Times
    requests: int = 0
    prefill_tokens: int = 0
    context: float = 0.0
    tightest_tpot_ms: float = math.inf
    prefill_ms: float = 0.0
    bounds: Bounds = field(default=_UNBOUNDED)
    cached: int = 0
    guard: Guard = field(default=Guard())
    decoding: int = 0
    preemptible: int = 0
    tiers: frozenset[str] | None = None
    takers: tuple[Load, ...] | None = None
    waits_ms: float = 0.0

    @property
    def share(self) -> float:
        """Of its time, what prompts take."""
        return min(_MOST_SHARE, self.prefill_ms / WINDOW_MS)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job would meet on an engine.

    Attributes:
        ttft_ms: from its arrival to its first token.
        tpot_ms: between its later tokens.
        others_tpot_ms: between the tokens of what runs there already; 0 if nothing does.
        full: no slot is free.
    """

    ttft_ms: float
    tpot_ms: float
    others_tpot_ms: float
    full: bool


def forecast(job: Job, load: Load) -> Forecast:
    """Predict; all times grow with what the engine has to do."""
    if load.takers is not None:
        return _forecast_of_reader(job, load, load.takers)
    new = max(1, job.tokens - load.cached)
    times, tightest = load.times, min(load.tightest_tpot_ms, job.tpot_ms or math.inf)
    step = times.decode_ms(load.requests, load.context)
    with_own = _share_with(load, new)
    chunk = chunk_tokens(times, step, tightest, load.bounds, with_own)
    between = step if load.decoding else 0.0
    ttft = job.waited_ms + times.latency_ms + step
    ttft += prompts_ms(times, load.prefill_tokens + new, load.cached, between, chunk, reading_ms(load, new))
    after = _with_one_more_ms(job, load)
    longest = after + times.prefill_ms(chunk_tokens(times, after, tightest, load.bounds, with_own)) / STEPS
    tpot = min(longest, after / (1 - load.share))
    others = min(longest, after / (1 - with_own))
    stay = load.requests if job.tpot_ms is None else load.requests - load.preemptible
    return Forecast(ttft, tpot, others if load.requests else 0.0, stay >= load.bounds.requests)


def _forecast_of_reader(job: Job, load: Load, takers: Sequence[Load]) -> Forecast:
    """The same of an engine that only reads: beside prompts it decodes what waits to be handed over."""
    new, times = max(1, job.tokens - load.cached), load.times
    step = times.decode_ms(load.decoding, load.context * load.decoding / max(1, load.requests))
    share = _share_with(load, new)
    chunk = chunk_tokens(times, step, load.tightest_tpot_ms, load.bounds, share)
    read = prompts_ms(times, load.prefill_tokens + new, load.cached, step, chunk, reading_ms(load, new))
    tpot = min((_with_one_more_ms(job, taker) for taker in takers), default=math.inf)
    others = min(step + times.prefill_ms(chunk) / STEPS, step / (1 - share)) if step else 0.0
    full = _is_full(load) or all(_is_full(taker) for taker in takers)
    return Forecast(job.waited_ms + times.latency_ms + step + read, tpot, others, full)


def _share_with(load: Load, new: int) -> float:
    """Of its time, what prompts take with another one of `new` tokens."""
    return min(_MOST_SHARE, (load.prefill_ms + load.times.prefill_ms(new, load.cached)) / WINDOW_MS)


def _with_one_more_ms(job: Job, load: Load) -> float:
    """A decode step with a job that has its first token."""
    return load.times.decode_ms(load.requests + 1, load.context + job.tokens + job.output / 2)


def with_takers(loads: Sequence[Load], readers: Collection[str], takers: Sequence[Load]) -> list[Load]:
    """Loads of engines of which some only read, with the engines that take over what these have.

    Args:
        loads: of the engines that requests may go to.
        readers: names of those that only read.
        takers: those that take over.
    """
    reading = [load for load in loads if load.engine in readers]
    share = 1 / max(1, len(takers))
    requests = math.ceil(share * sum(load.requests for load in reading))
    context = share * sum(load.context for load in reading)
    coming = tuple(replace(one, requests=one.requests + requests, context=one.context + context) for one in takers)
    return [replace(load, takers=coming) if load.engine in readers else load for load in loads]


def reading_ms(load: Load, new: int) -> float:
    """To compute the prompts of an engine and another one of `new` tokens, without steps between.

    Each attends to itself alone, so that several take less than one of all their tokens, and at most their sum.
    """
    own = load.times.prefill_ms(new, load.cached)
    if not load.prefill_tokens:
        return own
    ahead = max(1, load.requests - load.decoding)
    one_by_one = own + ahead * load.times.prefill_ms(load.prefill_tokens / ahead)
    return min(one_by_one, load.times.prefill_ms(load.prefill_tokens + new, load.cached))


def prompts_ms(
    times: Times, tokens: float, cached: float, step_ms: float, chunk: int, whole: float | None = None
) -> float:
    """To compute prompts, with steps of `step_ms` between each `chunk` tokens; 0 if nothing decodes.

    Args:
        whole: time without steps between; None: as of one prompt.
    """
    if whole is None:
        whole = times.prefill_ms(tokens, cached)
    return (
        whole
        if tokens <= chunk or step_ms <= 0
        else max(whole, tokens / chunk * (times.prefill_ms(chunk, cached) + STEPS * step_ms))
    )


def is_feasible(job: Job, load: Load, seen: Forecast) -> bool:
    """Would the job meet its targets on the engine, and all that runs there still meet theirs?"""
    assert job.ttft_ms is not None and job.tpot_ms is not None
    return (
        (load.tiers is None or job.tier in load.tiers)
        and not seen.full
        and not _takes_from_looser(job, load)
        and seen.ttft_ms <= SAFETY * job.ttft_ms
        and seen.tpot_ms <= SAFETY * job.tpot_ms
        and seen.others_tpot_ms <= SAFETY * load.tightest_tpot_ms
        and (job.tpot_ms <= load.guard.tpot_ms or seen.others_tpot_ms <= guarded_ms(load))
        and (load.takers is None or any(decodes_within(job, taker) for taker in load.takers))
    )


def _takes_from_looser(job: Job, load: Load) -> bool:
    """Would its target bind an engine that looser work has to itself (`reserve.guards`), while such work waits?

    Each engine would soon be bound by the tightest target otherwise, and what is looser never in time again.
    """
    assert job.tpot_ms is not None
    bound = load.tightest_tpot_ms <= job.tpot_ms or math.isinf(load.tightest_tpot_ms)
    return not bound and load.guard.tpot_ms > job.tpot_ms and load.waits_ms > job.tpot_ms


def guarded_ms(load: Load) -> float:
    """Up to which time between tokens an engine may take on looser work, so that a request that is to be expected still
    finds its target kept. Infinite if it could not keep that target for one request alone: then there is nothing to
    leave room for."""
    return guarded_by_ms(load.guard.tpot_ms, _alone_ms(load), load.guard.fill)


def guarded_by_ms(guard_ms: float, alone_ms: float, fill: float) -> float:
    """The same, of an engine of which a step of one request takes `alone_ms`."""
    return math.inf if guard_ms < alone_ms / SAFETY else _part_ms(guard_ms, alone_ms, fill)


def _filled_ms(load: Load, fill: float = FILL) -> float:
    """Up to which time between tokens an engine may take on work without a promise."""
    alone_ms = _alone_ms(load)
    return min(guarded_by_ms(load.guard.tpot_ms, alone_ms, fill), _part_ms(load.tightest_tpot_ms, alone_ms, fill))


def _alone_ms(load: Load) -> float:
    """A step of one request."""
    return load.times.decode_ms(1, 1.0)


def _part_ms(target_ms: float, alone_ms: float, fill: float) -> float:
    return max(fill * target_ms, alone_ms + fill * (SAFETY * target_ms - alone_ms))


def decodes_within(job: Job, load: Load) -> bool:
    """Would a job that has its first token from elsewhere meet its TPOT on the engine, and all that runs there still
    meet theirs?"""
    assert job.tpot_ms is not None
    after = _with_one_more_ms(job, load)
    takes = (load.tiers is None or job.tier in load.tiers) and not _is_full(load)
    leaves = job.tpot_ms <= load.guard.tpot_ms or after <= guarded_ms(load)
    return takes and leaves and after <= SAFETY * min(job.tpot_ms, load.tightest_tpot_ms)


def decodes_beside(job: Job, load: Load) -> bool:
    """Would a job without a promise that has its first token from elsewhere cost no target on the engine?"""
    return not _is_full(load) and (not load.requests or _with_one_more_ms(job, load) <= _filled_ms(load))


class Outcome(StrEnum):
    """What becomes of a request that arrives."""

    FEASIBLE = "feasible"
    BEST_EFFORT = "best_effort"
    BACKGROUND = "background"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Decision:
    """About one request.

    Attributes:
        outcome: feasible goes to `engine` now; best effort and background wait for room.
        engine: where to.
        ttft_ms, tpot_ms: as predicted, for a feasible one; of an infeasible one what it would have been at best.
        retry_after_s: of one that is refused.
        reason: of one that is refused, in words.
    """

    outcome: Outcome
    engine: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    retry_after_s: int | None = None
    reason: str = ""


def admit(job: Job, loads: Sequence[Load], *, reject: bool, waiting: int, queue_limit: int) -> Decision:
    """Decide about a request that arrives.

    Args:
        job: the request.
        loads: engines that serve; if there is none, as in a switch, what may wait does.
        reject: it is refused if it is not feasible.
        waiting: requests of its tier without a first token.
        queue_limit: as many of its tier may be.
    """
    if waiting >= queue_limit:
        text = f"{waiting} requests of this tier wait, which is its limit"
        return Decision(Outcome.REFUSED, retry_after_s=retry_after_s(job, loads), reason=text)
    if job.ttft_ms is None or job.tpot_ms is None:
        return Decision(Outcome.BACKGROUND)
    if not loads:
        return Decision(Outcome.BEST_EFFORT)
    seen = [(forecast(job, load), load) for load in loads]
    feasible = [
        (_is_elsewhere(job, load), _load(job, found), -load.cached, load.requests, at)
        for at, (found, load) in enumerate(seen)
        if _fits(job, load, found)
    ]
    if feasible:
        found, load = seen[min(feasible)[-1]]
        return Decision(Outcome.FEASIBLE, load.engine, found.ttft_ms, found.tpot_ms)
    found = min((found for found, _ in seen), key=lambda found: _load(job, found))
    if not reject:
        return Decision(Outcome.BEST_EFFORT, None, found.ttft_ms, found.tpot_ms)
    text = (
        f"no engine can give the first token within {job.ttft_ms:g} ms and the next ones within {job.tpot_ms:g} ms now "
        f"(at best {found.ttft_ms:.0f} and {found.tpot_ms:.1f})"
    )
    return Decision(
        Outcome.REFUSED, None, found.ttft_ms, found.tpot_ms, retry_after_s=retry_after_s(job, loads), reason=text
    )


_fits = is_feasible


def _is_elsewhere(job: Job, load: Load) -> bool:
    """While looser work waits, a job goes first to engines that leave room for it."""
    assert job.tpot_ms is not None
    return load.waits_ms > job.tpot_ms and load.guard.tpot_ms != job.tpot_ms


def _load(job: Job, found: Forecast) -> int:
    """How much of its targets a job would use up, in steps."""
    assert job.ttft_ms is not None and job.tpot_ms is not None
    return math.floor(max(found.ttft_ms / job.ttft_ms, found.tpot_ms / job.tpot_ms) / _LOAD_STEP)


def place(job: Job, loads: Sequence[Load]) -> Decision | None:
    """Where a request that has waited can meet its targets now, and no promise is broken; None if nowhere."""
    if not loads or job.ttft_ms is None or job.tpot_ms is None:
        return None
    decision = admit(job, loads, reject=False, waiting=0, queue_limit=1)
    return decision if decision.outcome is Outcome.FEASIBLE else None


def is_late(job: Job, loads: Sequence[Load]) -> bool:
    """Has it waited so long that no engine could give its first token in time any more, even if it were idle?"""
    assert job.ttft_ms is not None
    own_ms = min(load.times.latency_ms + load.times.prefill_ms(max(1, job.tokens)) for load in loads)
    return job.waited_ms + own_ms > job.ttft_ms


def retry_after_s(job: Job, loads: Sequence[Load]) -> int:
    """After how many seconds an engine may have room again, 1 to 60: prompts computed, or one request in two ended."""
    waits = []
    for load in loads:
        found = forecast(job, load)
        late = found.ttft_ms - job.waited_ms - SAFETY * (job.ttft_ms or 0.0)
        limit = SAFETY * min(job.tpot_ms or math.inf, load.tightest_tpot_ms)
        slow = max(found.tpot_ms, found.others_tpot_ms) > limit or found.full
        waits.append(max(late, job.output / 2 * found.tpot_ms if slow else 0.0))
    return min(60, max(1, math.ceil(min(waits, default=0.0) / 1000)))


def is_crowded(waiting: int, engines: int) -> bool:
    """Does so much best effort wait for this many engines that what is late of it is to leave room for the others?"""
    return waiting > FEW_WAITING * engines


def room_for(job: Job, loads: Sequence[Load], spare_ms: float, first: int = 0, *, late: bool = False) -> int | None:
    """Where a request without a promise fits so that no target suffers, as an index into `loads`; None if nowhere.

    A prompt so long that tokens beside it would come later than `FILL` says is read in parts which keep the targets,
    one at a time on an engine: what it leaves is the room of the step.

    Args:
        job: best effort or background work; its own targets do not count.
        loads: engines that serve.
        spare_ms: prompts that may be before a feasible request that comes next.
        first: where to begin, so that engines take turns.
        late: it has a target, which is missed already, and much waits (`is_crowded`).
    """
    for step in range(len(loads)):
        at = (first + step) % len(loads)
        load = loads[at]
        found = forecast(job, load)
        queued = reading_ms(load, max(1, job.tokens - load.cached))
        if load.takers is not None and not any(decodes_beside(job, taker) for taker in load.takers):
            continue
        if not load.requests:
            return at
        if found.full or queued > spare_ms:
            continue
        filled_ms = _filled_ms(load, LATE_FILL if late else FILL)
        if found.others_tpot_ms <= filled_ms or _fits_in_parts(job, load, filled_ms, spare_ms):
            return at
    return None


def _fits_in_parts(job: Job, load: Load, filled_ms: float, spare_ms: float) -> bool:
    """Is there room for a prompt that the engine cuts for what has been promised there, while it reads no other one?"""
    new = max(1, job.tokens - load.cached)
    after = _with_one_more_ms(job, load)
    if load.prefill_tokens or math.isinf(load.tightest_tpot_ms) or after > filled_ms:
        return False
    own = min(_MOST_SHARE, load.times.prefill_ms(new, load.cached) / WINDOW_MS)
    if after <= (1 - own) * filled_ms:
        # It finds room when less has been read of late.
        return False
    target_ms = min(load.tightest_tpot_ms, load.guard.tpot_ms if math.isfinite(guarded_ms(load)) else math.inf)
    chunk = chunk_tokens(load.times, after, target_ms, load.bounds, 1.0)
    if chunk >= load.bounds.prefill_tokens:
        # No part fits beside a step.
        return False
    return prompts_ms(load.times, new, load.cached, after if load.decoding else 0.0, chunk) <= spare_ms


def aged_place(loads: Sequence[Load], aged_on: Sequence[int]) -> int | None:
    """Where the next request goes that has waited its time, room or not: the emptiest engine that has no such one yet.

    One at a time on each engine keeps a long queue of old work from taking all of it. So work waits no longer than the
    stated time and then, behind `n` others that are as old, for `n / engines` requests to end.
    """
    free = [(load.requests, at) for at, load in enumerate(loads) if aged_on[at] == 0 and not _is_full(load)]
    return min(free)[1] if free else None


def _is_full(load: Load) -> bool:
    return load.requests >= load.bounds.requests
