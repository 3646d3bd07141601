"""What the router does with each message. No process and no socket is made here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import zmq

from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest, no_engine_is_up
from sglang_adapt.policy.suspects import charged, to_go_on
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.control import ControlFanOut
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.journal import Entry
from sglang_adapt.router.long_requests import Lengths, LongRequests
from sglang_adapt.router.outlets import Outlets
from sglang_adapt.router.places import Places
from sglang_adapt.router.serving import Serving
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.router.waiting import Message, Waiting
from sglang_adapt.upstream import wire

logger = logging.getLogger(__name__)


_GONE = (EngineState.DEAD, EngineState.FAILED)


class Router:
    """Engines, the requests on them, and the handlers of the messages from both sides.

    Each request that is accepted and not ended is in `places`, from the moment its message is sent to an engine until
    its last output, its abort or its error passes here, or in `waiting`.

    Args:
        layout: that serves.
        outlets: where messages go.
        deaths_limit: a request ends with a 503 when more engines have died while they ran it.
        admission: decides by tiers where requests go and when; None: each at once to the engine with the least load.
        traffic: counts what arrives; None if nobody plans by it.
        lengths: how long requests may become; None where every engine decides that alone.

    Attributes:
        accepting: False while the server drains: the front accepts no new requests.
        closed: no request comes any more that the front had accepted; one that does is refused.
        long: requests that not every engine holds.
        waiting: requests that are in no engine.
        places: where all others are.
    """

    def __init__(
        self,
        layout: Layout,
        outlets: Outlets,
        deaths_limit: int = 2,
        admission: Admission | None = None,
        traffic: Traffic | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.accepting = True
        self.closed = False
        self.long = LongRequests(lengths or Lengths({}), lambda: 1e3 * time.monotonic())
        self._serving = Serving(layout, self.long)
        self.waiting = Waiting(self.long)
        self.places = Places(
            self._serving, self.long, admission, outlets.tokenizer, taken=outlets.taken, ended=self._ended
        )
        self._deaths_limit = deaths_limit
        self._suspects: set[str] = set()
        self.admission = admission
        self._traffic = traffic
        self._out = outlets
        self._control = ControlFanOut(
            wire.reply_tags(),
            wire.merge_replies,
            lambda tag, why: wire.encode_control_failure(tag, why, 503),
            outlets.tokenizer,
        )
        self._from_front: dict[bytes, Callable[[bytes], None]] = {
            wire.GENERATE: self._on_request,
            wire.EMBED: self._on_request,
            wire.BATCH_GENERATE: self._on_batch,
            wire.BATCH_EMBED: self._on_batch,
            wire.ABORT: self._on_abort,
        }
        if admission is not None:
            self._from_front[wire.TICKET] = lambda data: admission.named(*wire.ticket_of(data))
            admission.roles = self._serving.roles_of_those_up

    @property
    def in_flight(self) -> int:
        """Requests accepted and not ended."""
        return len(self.places.where) + len(self.waiting)

    def unfinished(self) -> Iterator[tuple[str, bool]]:
        """Every request accepted and not ended, and whether it waits for its first token."""
        for rid in self.places.where:
            yield rid, not self.journal[rid].ids
        for rid in self.waiting:
            yield rid, True

    # Where requests are: see `Places`.

    @property
    def journal(self) -> dict[str, Entry]:
        """Message and tokens of each request that is not in `waiting`."""
        return self.places.journal

    @property
    def moving(self) -> Engine:
        """Requests on the move."""
        return self.places.moving

    @property
    def stranded(self) -> Engine:
        """Requests whose engine has died."""
        return self.places.stranded

    # Which engines there are: see `Serving`.

    @property
    def layout(self) -> Layout:
        return self._serving.layout

    @property
    def engines(self) -> dict[str, Engine]:
        return self._serving.engines

    @property
    def roles(self) -> dict[str, Role]:
        """What the engines of the layout do now."""
        return self._serving.roles

    def serving(self) -> list[Engine]:
        """The engines that get requests now."""
        return self._serving.get_requests()

    def is_ready(self, name: str) -> bool:
        return self._serving.is_ready(name)

    def sends_to(self, name: str) -> bool:
        """May this engine get the next request, from a client or from an engine that has prefilled it?"""
        return self._serving.sends_to(name)

    def engine_for(self, rid: str) -> Engine | None:
        """The engine that goes on with a request, if there is one."""
        return self._serving.engine_for(rid)

    # Requests that wait, and what is told.

    def ask(self, request: AdmitRequest) -> AdmitAnswer:
        """Is a request admitted that has not been tokenized yet? The planner is told of what is refused, too."""
        assert self.admission is not None, "a deployment without tiers refuses nothing"
        answer = self.admission.ask(request, self.serving())
        if not answer.admitted and self._traffic is not None:
            self._traffic.refused(request.terms.tier, request.tokens)
        return answer

    def let_go(self) -> None:
        """Send requests that wait for room to the engines that have it now."""
        if self.admission is None or not self.waiting.for_room:
            return
        while (found := self.admission.next_held(self.serving())) is not None:
            rid, name = found
            tokens, data = self.waiting.for_room.pop(rid)
            self._place(rid, tokens, wire.with_priority(data, self.admission.priority(rid)), accepted=True, wanted=name)

    # Engines come and go.

    def add_engine(self, engine: Engine) -> None:
        """Know an engine; it gets no request before `engine_ready`."""
        self.engines[engine.name] = engine

    def engine_ready(self, engine: Engine) -> None:
        """An engine has answered its warm-up request: dispatch to it if its layout is active."""
        self._serving.engine_ready(engine)
        for request in self._control.engine_up(engine.name):
            self._send(engine, request)
        self._out.ready(engine)
        self._out.changed()
        self.let_go()

    def engine_lost(self, engine: Engine, state: EngineState, why: str) -> None:
        """An engine is gone: nothing more is sent to it, and its requests are stranded."""
        self._serving.engine_lost(engine, state)
        self._control.engine_lost(engine.name, why)
        self.strand(engine, list(engine.in_flight), why)
        if not self._serving.may_serve():
            self.fail(self.stranded, list(self.stranded.in_flight), f"no engine is left to go on: {why}")
            for rid in list(self.waiting.for_room):
                self._refuse_waiting(rid, wire.encode_unavailable(rid, f"no engine is left: {why}"))
        self.fail_too_long(why)
        self._out.changed()

    def fail_too_long(self, why: str) -> None:
        """End with a 503 what no engine holds that can still come to serve."""
        text = f"no engine is left that holds a request of this length: {why}"
        self.fail(self.stranded, [rid for rid in self.stranded.in_flight if not self._may_hold(rid)], text)
        for rid in [rid for rid in self.long.waiting if not self._may_hold(rid)]:
            self._refuse_waiting(rid, wire.encode_unavailable(rid, text))

    def _may_hold(self, rid: str) -> bool:
        """Is a request one that an engine holds which serves, or can come to?"""
        patient = rid in self.long.patient and self.accepting
        return self._serving.may_hold(rid, waits=self.long.may_bind or patient)

    def take_back(self, holder: Engine, rids: Iterable[str]) -> None:
        """Requests that an engine was to go on with have not been sent to it: they wait as before."""
        self.places.hand_over(holder, self.stranded, [rid for rid in rids if rid in holder.in_flight])

    def strand(self, holder: Engine, rids: Iterable[str], why: str) -> None:
        """Requests have lost their engine; `repair.Repair` places them. One that has lost too many ends with a 503."""
        there = [rid for rid in rids if rid in holder.in_flight]
        for rid in charged({rid: self.journal[rid].record for rid in there}, self._deaths_limit):
            self.journal[rid].deaths += 1
        for rid in there:
            self.journal[rid].died_at = len(self.journal[rid].ids)
            if self.journal[rid].record.is_suspect(self._deaths_limit):
                self._suspects.add(rid)
        self.fail(holder, [rid for rid in there if not self._may_hold(rid)], f"no engine that holds it is left: {why}")
        there = [rid for rid in there if rid in holder.in_flight]
        hopeless = [rid for rid in there if self.journal[rid].deaths > self._deaths_limit]
        self.fail(
            holder, hopeless, f"{self._deaths_limit + 1} engines died while they ran this request; the last: {why}"
        )
        self.places.hand_over(holder, self.stranded, there)
        if there:
            logger.error(
                "%s: %d unfinished requests go on elsewhere, %d ended with 503: %s",
                holder.name,
                len(there) - len(hopeless),
                len(hopeless),
                why,
            )
            self._out.stranded()

    def to_go_on(self) -> list[tuple[str, Engine]]:
        """The stranded requests that are to be placed now, with their engines: of those that the next death would end
        only one, while no other one of them may be why engines die."""
        # One that is too long for the engines of the layout waits for another layout, and the others do not.
        placed = {rid: engine for rid in self.stranded.in_flight if (engine := self.engine_for(rid))}
        records = {rid: self.journal[rid].record for rid in placed}
        return [(rid, placed[rid]) for rid in to_go_on(records, self._deaths_limit, one_is_tried=self._one_is_tried())]

    def _one_is_tried(self) -> bool:
        """Does an engine run a suspect, or is about to, that has not passed its last death?"""
        known = {rid: self.journal[rid].record for rid in self._suspects if rid in self.journal}
        self._suspects = {rid for rid, record in known.items() if record.is_tried(self._deaths_limit)}
        # One that is kept paused does no harm.
        holders = (self.places.where.get(rid) for rid in self._suspects)
        return any(holder is None or holder is self.moving or holder.name in self.engines for holder in holders)

    def _look_at_suspects(self) -> None:
        """A request has ended, or gone on: another one may be tried."""
        if self._suspects and self.stranded.in_flight and not self._one_is_tried():
            self._out.stranded()

    def _ended(self, engine: Engine) -> None:
        self._out.ended(engine)
        self._look_at_suspects()

    def send_again(self, rid: str) -> bool:
        """Place a stranded request that has no tokens as if it came now; False if there is no engine for it now."""
        if self.engine_for(rid) is None:
            return False
        entry = self.journal[rid]
        self.places.take_back(rid)
        self._place(rid, entry.tokens, entry.data, accepted=True)
        return True

    def take_up(self, engine: Engine, rids: Iterable[str]) -> None:
        """Stranded requests are an engine's now."""
        self.places.hand_over(self.stranded, engine, rids)

    def fail_all(self, why: str) -> None:
        """End every unfinished request with a 503 that says why, and stop the engines' work on them."""
        for engine in self.places.holders():
            for rid in self.fail(engine, list(engine.in_flight), why):
                self._send(engine, wire.encode_abort(rid))
        for rid in list(self.waiting):
            self._refuse_waiting(rid, wire.encode_unavailable(rid, why))

    def _refuse_waiting(self, rid: str, answer: bytes) -> None:
        """End a request that waits here."""
        self.waiting.drop(rid)
        self._refuse(rid, answer)

    def _refuse(self, rid: str, answer: bytes) -> None:
        """End a request that is in no engine and does not wait, or waits no more."""
        self.long.ended(rid)
        if self.admission is not None:
            self.admission.ended(rid, None, finished=False)
        self._out.tokenizer(answer)

    def fail(self, engine: Engine, rids: Iterable[str], why: str) -> list[str]:
        """End requests of an engine with a 503 that says why; returns those that were there."""
        there = [rid for rid in rids if rid in engine.in_flight]
        for rid in there:
            self.places.end(engine, rid)
            self._out.tokenizer(wire.encode_unavailable(rid, why))
        return there

    # The layout changes.

    def pause(self, engines: Iterable[str]) -> None:
        """Send engines no more requests until `activate`. Those that arrive go to the others, or wait here."""
        self._serving.pause(engines)

    def activate(self, layout: Layout) -> None:
        """Dispatch to the engines of a layout from now on: first the aborts and the requests that have waited."""
        self._serving.activate(layout)
        self.abort(self.places.take_aborts())
        for rid, tokens, data in self.waiting.take_after_switch():
            self._enter(rid, tokens, data, accepted=True)
        self.let_go()
        self._out.changed()

    def detach(self, engine: Engine, rids: Iterable[str]) -> None:
        """Requests have left an engine and are on the move. Aborts of them wait for `activate`."""
        self.places.hand_over(engine, self.moving, rids)

    def attach(self, engine: Engine, rids: Iterable[str]) -> None:
        """Requests on the move have arrived at an engine, which is out of dispatch or gets them as further load."""
        self.places.hand_over(self.moving, engine, rids)

    def arrive(self, engine: Engine, rids: Iterable[str]) -> None:
        """Requests that moved alone, outside of a switch, are an engine's; so are their aborts. It is told of those
        whose clients have gone meanwhile."""
        there = [rid for rid in rids if rid in self.moving.in_flight]
        for rid in rids:
            if rid not in there:
                self._send(engine, wire.encode_abort(rid))
        self.attach(engine, there)
        self.carry_out_aborts(there)

    def carry_out_aborts(self, there: Iterable[str]) -> None:
        """Aborts of requests that were on the move, which go where the requests are now."""
        self.abort(self.places.take_aborts(there))

    def abort(self, rids: Iterable[str]) -> None:
        """End requests whose clients have gone, wherever they are."""
        for rid in rids:
            self._on_abort(wire.encode_abort(rid))

    def keep(self, engine: Engine, rids: Iterable[str]) -> None:
        """Requests on the move stay paused at an engine, until `unkeep`. An abort ends them at once."""
        self.places.keep(engine, rids)

    def unkeep(self, engine: Engine) -> list[str]:
        """Requests kept at an engine are on the move again; returns the ids of those whose clients still wait."""
        return self.places.unkeep(engine)

    def lay_down(self, rids: Iterable[str], why: str) -> None:
        """Requests on the move have lost their KV, and no engine has died for it: `repair.Repair` places them, those
        that no engine of the layout holds when one does."""
        rids = list(rids)
        self.long.patient.update(rid for rid in rids if rid in self.long.needs)
        text = f"no engine that holds it is left: {why}"
        self.fail(self.moving, [rid for rid in rids if not self._may_hold(rid)], text)
        self.places.hand_over(self.moving, self.stranded, rids)
        self._out.stranded()

    async def ended(self, rids: Iterable[str]) -> None:
        """Wait until none of these requests is unfinished."""
        await self.places.until_ended(rids)

    # Messages from the front.

    def on_front_message(self, data: bytes) -> None:
        tag = wire.peek_tag(data)
        handler = self._from_front.get(tag)
        if handler is not None:
            handler(data)
            return
        engines = [engine for engine in self.engines.values() if engine.state is EngineState.READY]
        # Active engines first: the merged answer is the first engine's where answers cannot be added up.
        engines.sort(key=lambda engine: engine.name not in self._serving.active)
        self._control.open(tag, data, [engine.name for engine in engines])
        for engine in engines:
            self._send(engine, data)

    def _on_request(self, data: bytes) -> None:
        rid, tokens = wire.request_head(data)
        if self.closed:
            self._refuse(rid, wire.encode_unavailable(rid, "the server is shutting down"))
            return
        is_client = not rid.startswith(wire.HEALTH_RID_PREFIX)
        if is_client and self.long.matter:
            asked = wire.asked_output(data)
            if refusal := self.long.arrived(rid, tokens, asked, self.layout, self._serving.alive()):
                self._refuse(rid, wire.encode_refused(rid, refusal))
                return
        if self._traffic is not None and is_client:
            self._traffic.arrived(rid, tokens)
        self._enter(rid, tokens, data)

    @property
    def request_tokens(self) -> int:
        """The longest request that is accepted now, prompt and output; 0 where every engine decides that alone."""
        return self.long.limit(self._serving.alive() if self.long.may_bind else self._serving.readers)

    def _enter(self, rid: str, tokens: int, data: bytes, accepted: bool = False) -> None:
        """A request of a client: where its tier's targets say, now or when there is room."""
        if self.admission is None:
            self._place(rid, tokens, data, accepted)
            return
        engines = [engine for engine in self.serving() if self.long.holds(engine.name, rid)]
        generates = wire.peek_tag(data) == wire.GENERATE and not rid.startswith(wire.HEALTH_RID_PREFIX)
        if not engines or not generates:
            self._place(rid, tokens, data, accepted)
            return
        name = self.admission.offer(rid, tokens, wire.prompt_ids(data), engines)
        if name is not None:
            self._place(rid, tokens, wire.with_priority(data, self.admission.priority(rid)), accepted, name)
            return
        self.waiting.for_room[rid] = Message(tokens, data)
        self.let_go()

    def _place(self, rid: str, tokens: int, data: bytes, accepted: bool = False, wanted: str | None = None) -> None:
        """Send a request to `wanted`, or the engine with the least load; while a switch has paused all, it waits, and
        so does one that no engine of the layout holds, until one is bound for it.

        If no engine of the layout is up, one that comes now ends with a 503, and one that has been `accepted` is
        stranded until one is.
        """
        while True:
            engine = self._serving.engine_for(rid, wanted, accepted=accepted)
            wanted = None
            if engine is None and self._serving.paused:
                self.waiting.paused[rid] = Message(tokens, data)
                return
            if engine is None and not self._serving.may_take(rid, accepted=accepted):
                self._wait_for_bound(rid, tokens, data)
                return
            if engine is None and accepted and self._serving.may_serve():
                self.places.hold(self.stranded, rid, tokens)
                self.journal.setdefault(rid, Entry(data, tokens))
                return
            if engine is None:
                self._refuse(rid, wire.encode_unavailable(rid, no_engine_is_up(self.layout)))
                return
            self._out.placing(rid, engine)
            if self._send(engine, data):
                break
        if rid.startswith(wire.HEALTH_RID_PREFIX):
            # A busy engine answers it with a message that carries no id, so it cannot be tracked.
            return
        self.long.placed(rid, engine.name)
        self.places.hold(engine, rid, tokens)
        self._serving.assign(engine.name, engine.unread.get(rid, 0))
        self.journal.setdefault(rid, Entry(data, tokens))
        if self.admission is not None:
            self.admission.placed(rid, engine)

    def _wait_for_bound(self, rid: str, tokens: int, data: bytes) -> None:
        """No engine of the layout holds a request: it waits for one, or is refused where nobody binds one."""
        if not self.long.may_bind:
            why = f"layout {self.layout} holds no request of {self.long.needs[rid]} tokens, and was made meanwhile"
            self._refuse(rid, wire.encode_unavailable(rid, why))
        elif not self._may_hold(rid):
            self._refuse(rid, wire.encode_unavailable(rid, "no engine is left that holds a request of this length"))
        else:
            self.long.wait(rid, tokens, data)
            self._out.long_waits()

    def _on_batch(self, data: bytes) -> None:
        for request in wire.split_batch(data):
            self._on_request(request)

    def _on_abort(self, data: bytes) -> None:
        rid, abort_all = wire.abort_head(data)
        engine = None if abort_all else self.places.where.get(rid)
        for waiting in [one for one in self.waiting if abort_all or one.startswith(rid)]:
            self._refuse_waiting(waiting, wire.encode_abort(waiting))
        # Stock aborts by prefix, so an id that is not known here may name several requests anywhere.
        targets = [engine] if engine is not None else [holder for holder in self.places.holders() if holder.in_flight]
        for target in targets:
            self._send(target, data)

    def _send(self, engine: Engine, data: bytes) -> bool:
        try:
            engine.send(data)
        except zmq.Again:
            if engine.state is EngineState.READY:
                self._out.lost(engine)
            return False
        return True

    # Messages from an engine.

    def on_engine_message(self, engine: Engine, data: bytes) -> None:
        if engine.state in _GONE:
            # It was sent before the engine died and read after: others go on from the tokens that were known then.
            return
        tag = wire.peek_tag(data)
        if tag in (wire.TOKEN_OUTPUT, wire.EMBED_OUTPUT):
            self._on_outputs(engine, data)
        elif tag == wire.ABORT:
            rid = wire.abort_head(data)[0]
            if rid.startswith(wire.CONTROL_FAILED_PREFIX):
                self._control.reply(engine.name, rid.removeprefix(wire.CONTROL_FAILED_PREFIX).encode(), data)
                return
            self.places.end(engine, rid)
            self._out.tokenizer(data)
        elif tag == wire.HEALTH_OUTPUT:
            self._out.tokenizer(data)
        elif tag == wire.SAID:
            self._out.replied(engine, data)
        else:
            self._control.reply(engine.name, tag, data)

    def _on_outputs(self, engine: Engine, data: bytes) -> None:
        is_text = wire.peek_tag(data) == wire.TOKEN_OUTPUT
        outputs = wire.token_outputs(data) if is_text else wire.embed_outputs(data)
        if outputs and outputs[0].rid.startswith(wire.WARMUP_RID_PREFIX):
            if outputs[0].finished:
                self.engine_ready(engine)
            return
        for output in outputs:
            if self.admission is not None:
                self.admission.output(output.rid, output.total, engine)
                if output.finished:
                    self.admission.ended(output.rid, engine, finished=not output.aborted)
            if output.finished:
                if self._traffic is not None and not output.aborted:
                    self._traffic.finished(output.rid, output.total)
                self.places.end(engine, output.rid)
            elif (entry := self.journal.get(output.rid)) is not None:
                if not entry.ids:
                    self.places.read(engine, output.rid)
                entry.append(output.decoded, output.total)
        self._out.outputs(data)
        self._look_at_suspects()
        self.let_go()
