"""What the router knows of requests with tiers: what was promised, what waits, what engines have to do.

Decisions are those of `policy.admission`; here are the figures that they need, kept up from what passes the router, and
the requests that wait for room. The router itself (`router.py`) keeps where each request is.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import heappop, heappush

from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest, RequestReport
from sglang_adapt.core.slo import SloConfig, Terms, Tier, request_terms
from sglang_adapt.policy.admission import (
    WINDOW_MS,
    Decision,
    Job,
    Load,
    Outcome,
    admit,
    aged_place,
    decodes_within,
    is_late,
    place,
    room_for,
)
from sglang_adapt.policy.limits import Bounds, Limits, chunk_tokens, limits_for
from sglang_adapt.policy.profile import Corrected, Correction
from sglang_adapt.policy.reserve import Asked, Place, guards
from sglang_adapt.policy.tally import Part, Tally
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.engine import Engine
from sglang_adapt.upstream.limits import BACKGROUND, BEST_EFFORT, FEASIBLE

TICKET_MS = 5000.0
"""A request that was admitted keeps its place this long until it comes tokenized."""
_PREFIXES = (1024, 256, 64)
"""Lengths of prompts' beginnings, in tokens, by which engines are remembered."""
_REMEMBERED = 8192
_FEW_TOKENS = 8
"""So many decode steps at least say how long one takes: output comes in a bunch now and then."""
_MANY_TOKENS = 32
_SLOWNESS = 1.15
"""An engine that takes so many times as long for so many steps, and the prompts between, is slower than believed; less
may be the part of a prompt that is counted at the wrong end."""
_MOSTLY = 3.0
"""A prompt says how long prompts take if it takes so many times as long as the step that it waits for."""
_FIRST_GUESS_OUTPUT = 128.0
_EXPECTED_MS = 10_000.0
"""A tier that has had a request in this time is expected to have another one, for which room is left."""
_RESERVE_MS = 200.0
"""So often is decided anew which engines leave room for a tight tier."""
_SPARE_OF_TTFT = 0.5
"""Work without a promise may put prompts before the next feasible request for this part of the smallest TTFT target of
the tiers that are expected."""


_PRIORITY = {Outcome.FEASIBLE: FEASIBLE, Outcome.BEST_EFFORT: BEST_EFFORT, Outcome.BACKGROUND: BACKGROUND}


@dataclass(slots=True)
class _Record:
    """One request from its arrival to its end."""

    terms: Terms
    tokens: int
    arrived_ms: float
    decision: Decision
    most_output: int | None = None
    sent_ms: float | None = None
    first_ms: float | None = None
    last_ms: float = 0.0
    output: int = 0
    aged: bool = False
    reading: tuple[float, float, int] | None = None
    read_ms: float = 0.0
    began: tuple[str, float, float] = ("", 0.0, 0.0)
    engine: str = ""
    prefixes: tuple[tuple[int, bytes], ...] = ()


@dataclass(slots=True)
class _Span:
    """Decode steps of an engine that has nothing to read: since when, and as one of its requests has seen them."""

    rid: str
    since_ms: float
    output: int
    step_ms: float


@dataclass(slots=True)
class _Ticket:
    """An admitted request that has not come tokenized yet."""

    request: AdmitRequest
    decision: Decision
    expires_ms: float


class Admission:
    """See the module.

    Args:
        settings: tiers, which there are, and speed.
        tp_of: TP size of every engine, by name.
        bounds: of an engine's iterations, by TP size.
        report: told how each request has ended.
        clock_ms: CLOCK_MONOTONIC in ms.
    """

    def __init__(
        self,
        settings: TierSettings,
        tp_of: Mapping[str, int],
        bounds: Mapping[int, Bounds],
        report: Callable[[RequestReport], None],
        clock_ms: Callable[[], float],
    ) -> None:
        if settings.config is None:
            raise ValueError("there are no tiers to admit by")
        self.config: SloConfig = settings.config
        self._times = {tp: settings.times(tp) for tp in set(tp_of.values())}
        most = 4.0 if settings.profile is not None else 32.0
        self.corrections = {tp: Correction(most=most) for tp in self._times}
        self._tp_of = tp_of
        self._bounds = bounds
        self._report = report
        self._clock_ms = clock_ms
        self._records: dict[str, _Record] = {}
        self._tickets: OrderedDict[int, _Ticket] = OrderedDict()
        self._ticketed: Counter[str] = Counter()
        self._tally = Tally()
        self._tiers_of: Mapping[str, frozenset[str]] = {}
        self._named: dict[str, AdmitRequest] = {}
        self._held: dict[Outcome, OrderedDict[str, None]] = {
            Outcome.BEST_EFFORT: OrderedDict(),
            Outcome.BACKGROUND: OrderedDict(),
        }
        self._deadlines: list[tuple[float, str]] = []
        self._waiting: Counter[str] = Counter()
        self._prefill: dict[str, tuple[float, float]] = {}
        self._sent: Counter[str] = Counter()
        self._read: defaultdict[str, float] = defaultdict(float)
        self._spans: dict[str, _Span] = {}
        self._outputs: dict[str, float] = {}
        self._prefixes: OrderedDict[bytes, str] = OrderedDict()
        self._turn = 0
        self._seen_ms: dict[str, float] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        self._guarding: tuple[float, tuple[str, ...], Mapping[str, float]] | None = None

    @property
    def held(self) -> int:
        """Requests that wait here for room."""
        return sum(map(len, self._held.values()))

    def reload(self, config: SloConfig) -> None:
        """Other tiers from now on; what has been admitted keeps its terms."""
        self.config = config
        self._guarding = None
        names = {tier.name for tier in config.tiers}
        self._outputs = {name: tokens for name, tokens in self._outputs.items() if name in names}
        self._waiting += Counter()  # Drops tiers of which nothing waits.

    def assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        """Which tiers' requests are promised their targets on which engines, from now on.

        Args:
            tiers_of: names of tiers by engine; an engine that is not in it takes all. Work without a promise, and what
                has been placed, is where there is room.

        Raises:
            ValueError: there is no such engine.
        """
        unknown = sorted(tiers_of.keys() - self._tp_of.keys())
        if unknown:
            known = ", ".join(self._tp_of)
            raise ValueError(f"there is no engine {', '.join(unknown)} to assign tiers to; there are {known}")
        self._tiers_of = dict(tiers_of)
        self._guarding = None

    # Requests arrive.

    def ask(self, request: AdmitRequest, engines: Sequence[Engine]) -> AdmitAnswer:
        """Decide about a request before it is tokenized; an admitted one has its place kept for `TICKET_MS`.

        While no engine serves, as in a switch, what the queue of its tier has room for is admitted, to wait for one.
        """
        now = self._forget_tickets()
        self._note_asked(request.terms)
        job = self._job(request.terms, request.tokens, request.output, now - request.arrived_ms)
        decision = self._decide(request.terms, job, self._loads(engines, guarded=True))
        if decision.outcome is Outcome.REFUSED:
            return AdmitAnswer(request.id, False, decision.retry_after_s or 1, decision.reason)
        self._tickets[request.id] = _Ticket(request, decision, now + TICKET_MS)
        self._ticketed[request.terms.tier] += 1
        if decision.engine is not None:
            part = Part(request.tokens, unread=True, promised=True, tpot_ms=request.terms.tpot_ms)
            self._tally.put(request.id, decision.engine, part)
        return AdmitAnswer(request.id, True)

    def give_back(self, ticket: int) -> None:
        """An admitted request will not come; its place is free."""
        known = self._tickets.pop(ticket, None)
        if known is not None:
            self._ticketed[known.request.terms.tier] -= 1
            self._tally.drop(ticket)

    def named(self, rid: str, request: AdmitRequest) -> None:
        """The request `rid`, which comes next, was admitted as this; it takes its place now."""
        self.give_back(request.id)
        self._named[rid] = request

    def tier_of(self, rid: str) -> str:
        """The tier of a request that has come: as it was admitted, else the default one."""
        request = self._named.get(rid)
        return self.config.default if request is None else request.terms.tier

    def tier_now(self, rid: str) -> str:
        """The tier of a request that is unfinished."""
        record = self._records.get(rid)
        return self.tier_of(rid) if record is None else record.terms.tier

    def offer(self, rid: str, tokens: int, ids: bytes, engines: Sequence[Engine]) -> str | None:
        """A tokenized request has come: the engine that it goes to, or None: it is held until `next_held` names it.

        Args:
            rid: its id.
            tokens: of its prompt.
            ids: they themselves, int64, or nothing.
            engines: those that serve, at least one.
        """
        now = self._forget_tickets()
        request, known = self._named.pop(rid, None), self._records.get(rid)
        if known is not None:
            # Its engine has gone before it was sent, and a switch held it.
            terms, arrived, output = known.terms, known.arrived_ms, known.most_output
        elif request is not None:
            terms, arrived, output = request.terms, request.arrived_ms, request.output
        else:
            terms, arrived, output = request_terms(self.config), now, None
            self._note_asked(terms)
        prefixes = _prefixes(ids)
        loads = self._loads(engines, prefixes, guarded=True)
        # It has been admitted: if its place is gone by now it is late, but it is not refused any more.
        job = self._job(terms, tokens, output, now - arrived)
        decision = self._decide(replace_reject(terms), job, loads, unlimited=True)
        self._records[rid] = _Record(terms, tokens, arrived, decision, output, prefixes=prefixes)
        if known is None:
            self._waiting[terms.tier] += 1
        if decision.outcome is Outcome.FEASIBLE:
            assert decision.engine is not None
            return decision.engine
        self._held[decision.outcome][rid] = None
        if decision.outcome is Outcome.BEST_EFFORT and terms.ttft_ms is not None:
            heappush(self._deadlines, (arrived + terms.ttft_ms, rid))
        return None

    def next_held(self, engines: Sequence[Engine]) -> tuple[str, str] | None:
        """(request, engine) of what is held and may go now; the caller sends it, and asks again."""
        if not engines:
            return None
        heads = [(self._records[next(iter(queue))].arrived_ms, kind) for kind, queue in self._held.items() if queue]
        if not heads:
            return None
        loads = self._loads(engines, guarded=True)
        oldest_ms, oldest = min(heads)
        if self._clock_ms() - oldest_ms > self.config.background_wait_s * 1000:
            at = aged_place(loads, [self._tally.of(engine.name).aged for engine in engines])
            if at is not None:
                rid, _ = self._held[oldest].popitem(last=False)
                self._records[rid].aged = True
                return rid, engines[at].name
        first = self._next_in_time(loads)
        if first is not None:
            record = self._records[first]
            decision = place(self._job_of(record), loads)
            if decision is not None and decision.engine is not None:
                record.decision = decision
                del self._held[Outcome.BEST_EFFORT][first]
                return first, decision.engine
        kind = Outcome.BEST_EFFORT if self._held[Outcome.BEST_EFFORT] else Outcome.BACKGROUND
        rid = first or next(iter(self._held[kind]))
        at = room_for(self._job_of(self._records[rid]), loads, self._spare_ms(), self._turn)
        if at is None:
            # What is behind it in its own queue waits for it; background work behind best effort does, too.
            return None
        self._turn = (at + 1) % len(loads)
        del self._held[kind][rid]
        return rid, engines[at].name

    def _next_in_time(self, loads: Sequence[Load]) -> str | None:
        """Of best effort that can still be in time, what has the least time left. What is late goes after it."""
        held = self._held[Outcome.BEST_EFFORT]
        while self._deadlines:
            rid = self._deadlines[0][1]
            if rid in held and not is_late(self._job_of(self._records[rid]), loads):
                return rid
            heappop(self._deadlines)
        return None

    def _job_of(self, record: _Record) -> Job:
        waited_ms = self._clock_ms() - record.arrived_ms
        return self._job(record.terms, record.tokens, record.most_output, waited_ms)

    def decode_within(self, rid: str, engines: Sequence[Engine]) -> set[str]:
        """The engines where a request that has its first token would keep its target, and what runs there its own: all
        of them, if it has none."""
        record = self._records.get(rid)
        if record is None or record.terms.tpot_ms is None:
            return {engine.name for engine in engines}
        job = self._job_of(record)
        return {load.engine for load in self._loads(engines) if decodes_within(job, load)}

    def priority(self, rid: str) -> int:
        """Stock's `priority` of a request: by what was promised. Old work counts as promised: it waits no longer."""
        record = self._records.get(rid)
        if record is None or record.aged:
            return FEASIBLE
        return _PRIORITY[record.decision.outcome]

    def limits(self, engine: Engine, coming: str | None = None) -> Limits:
        """What an engine may do in an iteration now; with `coming`, as soon as this request has been sent to it."""
        record = None if coming is None else self._records.get(coming)
        load = self._loads([engine], () if record is None else record.prefixes)[0]
        promised = self._tally.of(engine.name).promised
        if record is not None:
            own = load.times.prefill_ms(max(1, record.tokens - load.cached), load.cached)
            load = replace(
                load,
                requests=load.requests + 1,
                context=load.context + record.tokens + record.output,
                prefill_ms=load.prefill_ms + own,
            )
            if record.decision.outcome is Outcome.FEASIBLE:
                promised += 1
                load = replace(load, tightest_tpot_ms=min(load.tightest_tpot_ms, record.terms.tpot_ms or math.inf))
        return limits_for(
            load.times, load.requests, load.context, promised, load.tightest_tpot_ms, load.bounds, load.share
        )

    # Where requests are.

    def moved(self, rid: str, holder: str, tokens: int) -> None:
        """A request is in flight of an engine, or a holder beside the engines, from now on; `tokens` of its prompt."""
        self._spans.pop(holder, None)
        self._tally.put(rid, holder, self._part(rid, tokens))

    def left(self, rid: str) -> None:
        """A request is in flight nowhere."""
        self._tally.drop(rid)

    def _part(self, rid: str, tokens: int) -> Part:
        record = self._records.get(rid)
        if record is None:
            return Part(tokens)
        unread = record.first_ms is None
        promised = record.decision.outcome is Outcome.FEASIBLE
        return Part(
            tokens,
            record.output,
            unread=unread,
            decoding=not unread,
            preemptible=self.priority(rid) == BACKGROUND,
            promised=promised,
            tpot_ms=record.terms.tpot_ms if promised else None,
            aged=record.aged,
        )

    # Requests run.

    def placed(self, rid: str, engine: Engine) -> None:
        """A request was sent to an engine, which has it in flight now (`moved`)."""
        record = self._records.get(rid)
        if record is None:
            return
        now = self._clock_ms()
        if record.sent_ms is None:
            record.sent_ms = now
        name = record.engine = engine.name
        load = self._loads([engine], record.prefixes)[0]
        own = load.times.prefill_ms(max(1, record.tokens - load.cached), load.cached)
        self._prefill[name] = (load.prefill_ms + own, now)
        self._note_reading(record, replace(load, prefill_ms=load.prefill_ms + own), own)
        for _, key in record.prefixes:
            self._prefixes[key] = name
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > _REMEMBERED:
            self._prefixes.popitem(last=False)

    def output(self, rid: str, total: int, engine: Engine) -> None:
        """Output of a request has passed: it has `total` tokens now."""
        record = self._records.get(rid)
        if record is None or total <= record.output:
            return
        now = self._clock_ms()
        if record.first_ms is None:
            record.first_ms = now
            self._waiting[record.terms.tier] -= 1
            self._learn_reading(record, engine.name, now)
        record.output, record.last_ms, record.engine = total, now, engine.name
        self._tally.change(rid, self._part(rid, record.tokens))
        step = self._learn_steps(rid, total, engine.name, now)
        if record.first_ms == now:
            record.began = (engine.name, self._read[engine.name], step or self._step_ms(engine.name))

    def grown(self, engine: str, tokens: int) -> None:
        """Requests of an engine have given so many tokens together, of which `output` will tell one by one later.

        Then they are taken back, as less than 0. For who sees many tokens at a time, as the simulator does.
        """
        self._tally.grow(engine, tokens)

    def ended(self, rid: str, engine: Engine | None, *, finished: bool) -> None:
        """A request has ended: finished, or aborted or failed."""
        self._named.pop(rid, None)
        record = self._records.pop(rid, None)
        if record is None:
            return
        if (span := self._spans.get(record.engine)) is not None and span.rid == rid:
            del self._spans[record.engine]
        for queue in self._held.values():
            queue.pop(rid, None)
        if record.first_ms is None:
            self._waiting[record.terms.tier] -= 1
            if finished:
                # It asked for no token: its answer is what it waited for.
                record.first_ms = self._clock_ms()
        tpot = None
        if record.first_ms is not None and record.output > 1:
            tpot = (record.last_ms - record.first_ms) / (record.output - 1)
            if finished and engine is not None and record.output >= _MANY_TOKENS:
                self._learn_slowness(record, engine.name, record.last_ms - record.first_ms)
        if finished:
            tier = record.terms.tier
            known = self._outputs.get(tier, float(record.output))
            self._outputs[tier] = known + 0.05 * (record.output - known)
        self._report(
            RequestReport(
                rid=rid,
                terms=record.terms,
                outcome=record.decision.outcome.value,
                ended="finished" if finished else "stopped",
                engine=record.engine,
                arrived_ms=record.arrived_ms,
                queue_ms=None if record.sent_ms is None else record.sent_ms - record.arrived_ms,
                ttft_ms=None if record.first_ms is None else record.first_ms - record.arrived_ms,
                tpot_ms=tpot,
                forecast_ttft_ms=record.decision.ttft_ms,
                forecast_tpot_ms=record.decision.tpot_ms,
                prompt_tokens=record.tokens,
                output_tokens=record.output,
            )
        )

    # Figures.

    def _decide(self, terms: Terms, job: Job, loads: Sequence[Load], *, unlimited: bool = False) -> Decision:
        names = {tier.name: tier.queue_limit for tier in self.config.tiers}
        waiting = self._waiting[terms.tier] + self._ticketed[terms.tier]
        limit = 1 << 62 if unlimited else names.get(terms.tier, 1 << 62)
        return admit(job, loads, reject=terms.reject, waiting=waiting, queue_limit=limit)

    def _job(self, terms: Terms, tokens: int, most_output: int | None, waited_ms: float) -> Job:
        output = self._outputs.get(terms.tier, _FIRST_GUESS_OUTPUT)
        if most_output is not None:
            output = min(output, most_output)
        return Job(tokens, output, terms.ttft_ms, terms.tpot_ms, max(0.0, waited_ms), terms.tier)

    def _loads(
        self, engines: Sequence[Engine], prefixes: Sequence[tuple[int, bytes]] = (), *, guarded: bool = False
    ) -> list[Load]:
        """What engines have to do; `guarded` if all that serve are named, and more is to be placed there."""
        now = self._clock_ms()
        times = {tp: Corrected(times, self.corrections[tp]) for tp, times in self._times.items()}
        guarding = self._guards(engines, now) if guarded else {}
        loads = []
        for name in (engine.name for engine in engines):
            sums, tiers, tp = self._tally.of(name), self._tiers_of.get(name), self._tp_of[name]
            loads.append(
                Load(
                    name,
                    times[tp],
                    sums.requests,
                    sums.unread,
                    float(sums.context),
                    sums.tightest_tpot_ms,
                    self._prefill_ms(name, now),
                    self._bounds[tp],
                    self._cached(name, prefixes) if prefixes else 0,
                    guarding.get(name, math.inf),
                    sums.decoding,
                    sums.preemptible,
                    tiers,
                )
            )
        return loads

    def _prefill_ms(self, engine: str, now: float) -> float:
        value, at = self._prefill.get(engine, (0.0, now))
        return value * math.exp((at - now) / WINDOW_MS)

    # Corrections learn times of prefills and of steps where nothing else is in them: what forecasts leave out, such as
    # queueing, would make the times look longer than they are, and sizes that are seldom asked better than they are.

    def _note_reading(self, record: _Record, load: Load, own_ms: float) -> None:
        """A prompt goes to an engine; if it is alone and prompts are not cut, its time is learned from.

        Args:
            load: of the engine, with this request.
            own_ms: that its prompt is to take.
        """
        name, record.read_ms = load.engine, own_ms
        self._sent[name] += 1
        self._spans.pop(name, None)
        step = load.times.decode_ms(load.requests - 1, load.context - record.tokens) if load.decoding else 0.0
        chunk = chunk_tokens(load.times, step, load.tightest_tpot_ms, load.bounds, load.share)
        uncut = record.tokens <= chunk >= load.bounds.prefill_tokens
        alone = uncut and load.prefill_tokens <= record.tokens and own_ms >= _MOSTLY * step
        # It waits for half of the step in flight, on average.
        record.reading = (own_ms, step / 2, self._sent[name]) if alone else None

    def _learn_reading(self, record: _Record, engine: str, now: float) -> None:
        """A request's first token has come."""
        self._spans.pop(engine, None)
        self._read[engine] += record.read_ms
        if record.reading is not None and record.sent_ms is not None and record.engine == engine:
            predicted, beside, sent = record.reading
            if sent == self._sent[engine]:
                known = self.corrections[self._tp_of[engine]]
                actual = now - record.sent_ms - beside
                self.corrections[self._tp_of[engine]] = known.with_prefill(predicted, actual)

    def _learn_steps(self, rid: str, total: int, engine: str, now: float) -> float | None:
        """A request has `total` tokens now: if its engine has read nothing meanwhile, they were decode steps alone.

        Returns the time of a step as it is believed to be, if it was looked up.
        """
        if self._tally.of(engine).unread:
            self._spans.pop(engine, None)
            return None
        span = self._spans.get(engine)
        if span is not None and (span.rid != rid or total - span.output < _FEW_TOKENS):
            return None
        step = self._step_ms(engine)
        if span is not None:
            tp = self._tp_of[engine]
            actual = (now - span.since_ms) / (total - span.output)
            self.corrections[tp] = self.corrections[tp].with_decode((span.step_ms + step) / 2, actual)
        self._spans[engine] = _Span(rid, now, total, step)
        return step

    def _learn_slowness(self, record: _Record, engine: str, actual_ms: float) -> None:
        """A request has ended: was its engine slower than if it had done one by one all that it did meanwhile?

        An engine that is never without prompts would else never be found out. What is quicker says nothing: prompts
        that are read together take less.
        """
        name, read, step = record.began
        predicted = (record.output - 1) * (step + self._step_ms(engine)) / 2 + self._read[engine] - read
        if name == engine and self._read[engine] > read and actual_ms > _SLOWNESS * predicted:
            tp = self._tp_of[engine]
            known = self.corrections[tp]
            self.corrections[tp] = known.with_prefill(predicted, actual_ms).with_decode(predicted, actual_ms)

    def _step_ms(self, engine: str) -> float:
        """A decode step of an engine, as it is believed to be."""
        sums, tp = self._tally.of(engine), self._tp_of[engine]
        return self._times[tp].decode_ms(sums.requests, float(sums.context)) * self.corrections[tp].decode

    def _spare_ms(self) -> float:
        """Prompts without a promise that may be before the next one with a promise; infinite if none is expected."""
        targets = (tier.ttft_ms for tier in self._expected())
        return _SPARE_OF_TTFT * min((target for target in targets if target is not None), default=math.inf)

    def _expected(self) -> list[Tier]:
        """Tiers that had requests with targets within `_EXPECTED_MS`, and so are expected to have more."""
        now = self._clock_ms()
        self._seen_ms = {tier: at for tier, at in self._seen_ms.items() if now - at < _EXPECTED_MS}
        return [tier for tier in self.config.tiers if tier.name in self._seen_ms]

    def _guards(self, engines: Sequence[Engine], now: float) -> Mapping[str, float]:
        """TPOT targets by engine for which looser work leaves room, of tiers that had requests of late."""
        names = tuple(engine.name for engine in engines)
        if self._guarding is not None:
            decided, of, known = self._guarding
            if of == names and now - decided < _RESERVE_MS:
                return known
        places = [
            Place(name, self._times[self._tp_of[name]].decode_ms(1, 1.0), self._tiers_of.get(name)) for name in names
        ]
        asked = [
            Asked(tier.name, tier.tpot_ms, tier.weight * self._asked_rate(tier.name, now))
            for tier in self._expected()
            if tier.tpot_ms is not None
        ]
        found = guards(places, asked)
        self._guarding = (now, names, found)
        return found

    def _asked_rate(self, tier: str, now: float) -> float:
        """Requests of a tier, of which older ones count less."""
        value, at = self._asked.get(tier, (0.0, now))
        return value * math.exp((at - now) / _EXPECTED_MS)

    def _note_asked(self, terms: Terms) -> None:
        """A request has come. One that is refused counts as well: room is to be there for the next one."""
        now = self._clock_ms()
        self._asked[terms.tier] = (self._asked_rate(terms.tier, now) + 1.0, now)
        if terms.tpot_ms is not None:
            if terms.tier not in self._seen_ms:
                self._guarding = None
            self._seen_ms[terms.tier] = now

    def _cached(self, engine: str, prefixes: Sequence[tuple[int, bytes]]) -> int:
        """Tokens of a prompt that an engine is believed to have; `prefixes` of it, the longest first."""
        return next((length for length, key in prefixes if self._prefixes.get(key) == engine), 0)

    def _forget_tickets(self) -> float:
        """Drop tickets whose time is over; returns the time."""
        now = self._clock_ms()
        while self._tickets and next(iter(self._tickets.values())).expires_ms < now:
            self.give_back(next(iter(self._tickets)))
        return now


def replace_reject(terms: Terms) -> Terms:
    """The same terms without the wish to be refused."""
    return Terms(terms.tier, terms.ttft_ms, terms.tpot_ms, False, terms.background)


def _prefixes(ids: bytes) -> tuple[tuple[int, bytes], ...]:
    """(tokens, key) of a prompt's beginnings, the longest first."""
    lengths = (length for length in _PREFIXES if len(ids) >= 8 * length)
    return tuple((length, blake2b(ids[: 8 * length], digest_size=16).digest()) for length in lengths)
