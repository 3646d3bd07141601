"""What the router knows of requests with tiers: what was promised, and who may go where now.

Decisions are those of `policy.admission`. The figures that they need are kept by one part each, told here of what
passes the router: places of admitted requests (`tickets.py`), what waits (`held.py`), what engines have to do
(`loads.py`), how many tokens requests give (`outputs.py`), tiers that are to be expected (`expected.py`), and by how
much times are corrected (`learning.py`). Where each request is the router itself knows (`places.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation, Scheduler
from sglang_adapt.core.layout import Role
from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest, RequestReport
from sglang_adapt.core.slo import SloConfig, Terms, request_terms
from sglang_adapt.policy.admission import (
    Decision,
    Job,
    Load,
    Outcome,
    admit,
    aged_place,
    decodes_beside,
    decodes_within,
    is_crowded,
    is_late,
    place,
    room_for,
    with_takers,
)
from sglang_adapt.policy.coming import own_ms, with_coming
from sglang_adapt.policy.limits import OPEN, Bounds, Limits, limits_for
from sglang_adapt.policy.profile import Correction
from sglang_adapt.policy.simple_rules import by_arrival, by_batch_rule
from sglang_adapt.policy.tally import Part, Tally
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.engine import Engine
from sglang_adapt.router.expected import Expected
from sglang_adapt.router.held import Held
from sglang_adapt.router.learning import Learning
from sglang_adapt.router.loads import Loads
from sglang_adapt.router.outputs import Outputs
from sglang_adapt.router.prefixes import Prefix, prefixes_of
from sglang_adapt.router.records import Record
from sglang_adapt.router.tickets import Tickets
from sglang_adapt.upstream.limits import FEASIBLE


class Admission:
    """See the module.

    Args:
        settings: tiers, which there are, and speed.
        tp_of: TP size of every engine, by name.
        bounds: of an engine's iterations, by TP size.
        report: told how each request has ended.
        clock_ms: CLOCK_MONOTONIC in ms.
        ablation: what is switched off of all this for a measurement. With engines of its own for each tier, a tier
            that has none there, as it is a new one, has all.

    Attributes:
        config: the tiers.
        roles: what the engines of the layout do now, by name, of those that are up; of a layout without roles nothing.
    """

    def __init__(
        self,
        settings: TierSettings,
        tp_of: Mapping[str, int],
        bounds: Mapping[int, Bounds],
        report: Callable[[RequestReport], None],
        clock_ms: Callable[[], float],
        ablation: Ablation = NOTHING_OFF,
    ) -> None:
        if settings.config is None:
            raise ValueError("there are no tiers to admit by")
        self.config: SloConfig = settings.config
        self.roles: Callable[[], Mapping[str, Role]] = dict
        times = {tp: settings.times(tp) for tp in set(tp_of.values())}
        self._tp_of = tp_of
        self._report = report
        self._clock_ms = clock_ms
        self._records: dict[str, Record] = {}
        self._named: dict[str, AdmitRequest] = {}
        self._scheduler = ablation.scheduler
        self._engines_of = {tier: frozenset(own) for tier, own in ablation.tier_engines}
        self._held: dict[frozenset[str] | None, Held] = {}
        """What waits, by the engines that it has; None: all."""
        self._waiting: Counter[str] = Counter()
        self._outputs = Outputs()
        self._turn = 0
        self._tally = Tally()
        self._tickets = Tickets(self._tally)
        self._learning = Learning(self._tally, tp_of, times, measured=settings.profile is not None)
        self._loads = Loads(self._tally, tp_of, times, self._learning.corrections, bounds, clock_ms)
        self._expected = Expected(self.config, lambda name: times[tp_of[name]].decode_ms(1, 1.0), clock_ms)

    @property
    def held(self) -> int:
        """Requests that wait here for room."""
        return sum(map(len, self._held.values()))

    @property
    def corrections(self) -> Mapping[int, Correction]:
        """Of the times of engines, by TP size, as they have been learned."""
        return self._learning.corrections

    def reload(self, config: SloConfig) -> None:
        """Other tiers from now on; what has been admitted keeps its terms."""
        self.config = config
        self._expected.use(config, self._loads.tiers_of)
        self._outputs.keep_only({tier.name for tier in config.tiers})
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
        self._loads.tiers_of = dict(tiers_of)
        self._expected.use(self.config, self._loads.tiers_of)

    # Requests arrive.

    def ask(self, request: AdmitRequest, engines: Sequence[Engine]) -> AdmitAnswer:
        """Decide about a request before it is tokenized; an admitted one has its place kept for `TICKET_MS`.

        While no engine serves, as in a switch, what the queue of its tier has room for is admitted, to wait for one.
        """
        now = self._now()
        self._expected.asked(request.terms)
        job = self._job(request.terms, request.tokens, request.output, now - request.arrived_ms)
        loads = self._where_all(self._open_to(request.terms, engines))
        decision = self._decide(request.terms, job, loads)
        if decision.outcome is Outcome.REFUSED:
            shortest = self._decide(request.terms, replace(job, tokens=1, waited_ms=0.0), loads)
            holds_from = 1 if shortest.outcome is Outcome.REFUSED else request.tokens
            return AdmitAnswer(request.id, False, decision.retry_after_s or 1, decision.reason, holds_from=holds_from)
        self._tickets.give(request, decision, now)
        return AdmitAnswer(request.id, True)

    def give_back(self, ticket: int) -> None:
        """An admitted request will not come; its place is free."""
        self._tickets.take_back(ticket)

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
        now = self._now()
        request, known = self._named.pop(rid, None), self._records.get(rid)
        if known is not None:
            # Its engine has gone before it was sent, and a switch held it.
            terms, arrived, output = known.terms, known.arrived_ms, known.most_output
        elif request is not None:
            terms, arrived, output = request.terms, request.arrived_ms, request.output
        else:
            terms, arrived, output = request_terms(self.config), now, None
            self._expected.asked(terms)
        prefixes = prefixes_of(ids)
        loads = self._where_all(self._open_to(terms, engines), prefixes)
        # It has been admitted: if its place is gone by now it is late, but it is not refused any more.
        job = self._job(terms, tokens, output, now - arrived)
        decision = self._decide(replace_reject(terms), job, loads, unlimited=True)
        self._records[rid] = Record(terms, tokens, arrived, decision, output, prefixes=prefixes)
        if decision.outcome is Outcome.FEASIBLE and (known is None or not known.promised):
            self._expected.fared.promised(terms.tier)
        if known is None:
            self._waiting[terms.tier] += 1
        if decision.engine is not None:
            return decision.engine
        held = self._held.setdefault(self._engines_of.get(terms.tier), Held())
        deadline_ms = None if terms.ttft_ms is None else arrived + terms.ttft_ms
        held.add(rid, decision.outcome, deadline_ms, terms.tpot_ms)
        return None

    def next_held(self, engines: Sequence[Engine]) -> tuple[str, str] | None:
        """(request, engine) of what is held and may go now; the caller sends it, and asks again."""
        for names, held in self._held.items():
            some = [engine for engine in engines if names is None or engine.name in names]
            if some and held and (found := self._next_of(held, some)) is not None:
                return found
        return None

    def _next_of(self, held: Held, engines: Sequence[Engine]) -> tuple[str, str] | None:
        """The same, of what waits for these engines; some does."""
        loads = self._where_all(engines)
        oldest = min(held.heads(), key=self._age)
        if self._scheduler is Scheduler.ARRIVAL:
            # It came while there was no engine.
            name = by_arrival(loads).engine
            assert name is not None
            held.drop(oldest)
            return oldest, name
        if self._clock_ms() - self._records[oldest].arrived_ms > self.config.background_wait_s * 1000:
            at = aged_place(loads, [self._tally.of(engine.name).aged for engine in engines])
            if at is not None:
                held.drop(oldest)
                self._records[oldest].aged = True
                return oldest, engines[at].name
        first = held.next_in_time(lambda rid: is_late(self._job_of(self._records[rid]), loads))
        if first is not None:
            record = self._records[first]
            decision = self._place(self._job_of(record), loads)
            if decision is not None and decision.engine is not None:
                record.decision = decision
                self._expected.fared.promised(record.terms.tier)
                held.drop(first)
                return first, decision.engine
        rid = first or held.first()
        job = self._job_of(self._records[rid])
        # Late work leaves room for what comes in time, where there is much of it and as long as anything comes.
        late = (
            first is None
            and job.ttft_ms is not None
            and is_crowded(held.best_effort, len(loads))
            and not self._expected.is_quiet()
        )
        at = room_for(job, loads, self._expected.spare_ms(), self._turn, late=late)
        if at is None:
            # What is behind it in its own queue waits for it; background work behind best effort does, too.
            return None
        self._turn = (at + 1) % len(loads)
        held.drop(rid)
        return rid, engines[at].name

    def _place(self, job: Job, loads: Sequence[Load]) -> Decision | None:
        return place(job, loads) if self._scheduler is Scheduler.SLO else by_batch_rule(job, loads)

    def _open_to(self, terms: Terms, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of these engines that a tier's requests have."""
        own = self._engines_of.get(terms.tier)
        return engines if own is None else [engine for engine in engines if engine.name in own]

    def _age(self, rid: str) -> tuple[float, str]:
        record = self._records[rid]
        return record.arrived_ms, record.decision.outcome

    def _job_of(self, record: Record) -> Job:
        waited_ms = self._clock_ms() - record.arrived_ms
        return self._job(record.terms, record.tokens, record.most_output, waited_ms)

    def decode_within(self, rid: str, engines: Sequence[Engine]) -> set[str]:
        """The engines where a request that has its first token would keep its target, and what runs there its own; of
        one without a promise those where it costs no target."""
        record = self._records.get(rid)
        if record is None or self._scheduler is not Scheduler.SLO:
            return {engine.name for engine in engines}
        job, loads = self._job_of(record), self._where(engines)
        if not record.promised or job.tpot_ms is None:
            return {load.engine for load in loads if decodes_beside(job, load)}
        return {load.engine for load in loads if decodes_within(job, load)}

    def priority(self, rid: str) -> int:
        """Stock's `priority` of a request: by what was promised. Old work counts as promised: it waits no longer."""
        record = self._records.get(rid)
        return FEASIBLE if record is None else record.priority

    def limits(self, engine: Engine, coming: str | None = None) -> Limits:
        """What an engine may do in an iteration now; with `coming`, as soon as this request has been sent to it."""
        if self._scheduler is not Scheduler.SLO:
            return OPEN
        record = None if coming is None else self._records.get(coming)
        load = self._where([engine], () if record is None else record.prefixes)[0]
        if self.roles().get(engine.name) is Role.PREFILL:
            # What it reads it does not decode: prompts are cut for what waits to be handed over.
            load, record = replace(load, requests=load.decoding), None
        promised = self._tally.of(engine.name).promised
        if record is not None:
            promised += record.promised
            load = with_coming(load, record.tokens, record.output, record.terms.tpot_ms if record.promised else None)
        return limits_for(
            load.times, load.requests, load.context, promised, load.tightest_tpot_ms, load.bounds, load.share
        )

    # Where requests are.

    def moved(self, rid: str, holder: str, tokens: int) -> None:
        """A request is in flight of an engine, or a holder beside the engines, from now on; `tokens` of its prompt."""
        self._learning.disturbed(holder)
        self._tally.put(rid, holder, self._part(rid, tokens))

    def left(self, rid: str) -> None:
        """A request is in flight nowhere."""
        self._tally.drop(rid)

    def _part(self, rid: str, tokens: int) -> Part:
        record = self._records.get(rid)
        return Part(tokens) if record is None else replace(record.part, prompt=tokens)

    # Requests run.

    def placed(self, rid: str, engine: Engine) -> None:
        """A request was sent to an engine, which has it in flight now (`moved`)."""
        record = self._records.get(rid)
        if record is None:
            return
        now = self._clock_ms()
        if record.sent_ms is None:
            record.sent_ms = now
        record.engine = engine.name
        load = self._where([engine], record.prefixes)[0]
        own = own_ms(load, record.tokens)
        load = replace(load, prefill_ms=load.prefill_ms + own)
        self._loads.sent(engine.name, load.prefill_ms)
        self._learning.sent(rid, record, load, own)
        self._loads.prefixes.sent(record.prefixes, engine.name)

    def output(self, rid: str, total: int, engine: Engine) -> None:
        """Output of a request has passed: it has `total` tokens now."""
        record = self._records.get(rid)
        if record is None or total <= record.output:
            return
        now = self._clock_ms()
        first = record.first_ms is None
        if first:
            record.first_ms = now
            self._waiting[record.terms.tier] -= 1
            self._learning.first(rid, record, engine.name, now)
        record.output, record.last_ms, record.engine = total, now, engine.name
        self._tally.change(rid, record.part)
        self._learning.given(rid, total, engine.name, now, first=first)

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
        for held in self._held.values():
            held.drop(rid)
        if record.first_ms is None:
            self._waiting[record.terms.tier] -= 1
            if finished:
                # It asked for no token: its answer is what it waited for.
                record.first_ms = self._clock_ms()
        self._learning.ended(rid, record, None if engine is None else engine.name, finished=finished)
        if finished:
            self._outputs.finished(record.terms.tier, record.output)
            if record.promised and record.missed:
                self._expected.fared.broken(record.terms.tier)
        self._report(record.report(rid, finished=finished))

    # Figures.

    def _decide(self, terms: Terms, job: Job, loads: Sequence[Load], *, unlimited: bool = False) -> Decision:
        if self._scheduler is Scheduler.ARRIVAL:
            return by_arrival(loads)
        if self._scheduler is Scheduler.BATCH_RULE:
            return by_batch_rule(job, loads)
        names = {tier.name: tier.queue_limit for tier in self.config.tiers}
        waiting = self._waiting[terms.tier] + self._tickets.of_tier[terms.tier]
        limit = 1 << 62 if unlimited else names.get(terms.tier, 1 << 62)
        return admit(job, loads, reject=terms.reject, waiting=waiting, queue_limit=limit)

    def _job(self, terms: Terms, tokens: int, most_output: int | None, waited_ms: float) -> Job:
        output = self._outputs.expect(terms.tier, most_output)
        return Job(tokens, output, terms.ttft_ms, terms.tpot_ms, max(0.0, waited_ms), terms.tier)

    def _where(self, engines: Sequence[Engine], prefixes: Sequence[Prefix] = ()) -> list[Load]:
        """What engines have to do."""
        return self._loads.of([engine.name for engine in engines], prefixes)

    def _where_all(self, engines: Sequence[Engine], prefixes: Sequence[Prefix] = ()) -> list[Load]:
        """The same, of all that serve: more is to be placed there, and room is left for tiers to be expected."""
        names, roles = [engine.name for engine in engines], self.roles()
        if self._scheduler is not Scheduler.SLO:
            # No room is left, and nothing is asked of what takes over.
            return self._loads.of(names, prefixes)
        takers = [name for name, role in roles.items() if role is not Role.PREFILL]
        readers = {name for name in names if roles.get(name) is Role.PREFILL}
        waits_ms = max((held.loosest_ms for held in self._held.values()), default=0.0)
        if not readers:
            return self._loads.of(names, prefixes, self._expected.guards(names), waits_ms)
        # What only reads keeps no target between tokens, and leaves no room for one.
        guards = self._expected.guards(takers)
        takers_now = self._loads.of(takers, (), guards, waits_ms)
        return with_takers(self._loads.of(names, prefixes, guards, waits_ms), readers, takers_now)

    def _now(self) -> float:
        """The time; tickets whose time is over have lost their place."""
        now = self._clock_ms()
        self._tickets.expire(now)
        return now


def replace_reject(terms: Terms) -> Terms:
    """The same terms without the wish to be refused."""
    return Terms(terms.tier, terms.ttft_ms, terms.tpot_ms, False, terms.background)
