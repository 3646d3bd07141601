"""A router without sockets: engines and front are lists."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_adapt.core.layout import candidate_engines, parse_layout
from sglang_adapt.policy.admission import Outcome
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.outlets import Outlets
from sglang_adapt.router.router import Router
from sglang_adapt.upstream import wire


class World:
    """A router with engines tp1@0, tp1@1 and tp2@0-1; layout tp1@0,tp1@1 unless told otherwise. More with more GPUs."""

    def __init__(
        self,
        layout: str = "tp1@0,tp1@1",
        admission: Admission | None = None,
        lengths: Lengths | None = None,
        gpus: int = 2,
    ) -> None:
        self.tokenizer: list[object] = []
        self.outputs: list[object] = []
        self.lost: list[str] = []
        self.ready: list[str] = []
        self.replied: list[tuple[str, bytes]] = []
        self.connected: dict[str, bool] = {}
        self.wake: Callable[[], None] = lambda: None
        self.ended: Callable[[Engine], None] = lambda engine: None
        self.taken: Callable[[str], None] = lambda rid: None
        self.received: dict[str, list[bytes]] = {}
        self.on_long: Callable[[], None] = lambda: None
        self.on_placing: Callable[[str, Engine], None] = lambda rid, engine: None
        self.router = Router(
            parse_layout(layout, (1, 2), gpus),
            Outlets(
                tokenizer=lambda data: self.tokenizer.append(msgpack_decode(data)),
                outputs=lambda data: self.outputs.append(msgpack_decode(data)),
                ready=lambda engine: self.ready.append(engine.name),
                changed=lambda: self.wake(),
                lost=lambda engine: self.lost.append(engine.name),
                replied=lambda engine, data: self.replied.append((engine.name, data)),
                stranded=lambda: self.wake(),
                long_waits=lambda: self.on_long(),
                ended=lambda engine: self.ended(engine),
                taken=lambda rid: self.taken(rid),
                placing=lambda rid, engine: self.on_placing(rid, engine),
            ),
            admission=admission,
            lengths=lengths,
        )
        for name in (spec.name for spec in candidate_engines((1, 2), gpus)):
            self.connected[name] = True
            self.received[name] = []
            self.router.add_engine(Engine(name, send=self._sender(name)))

    def _sender(self, name: str) -> Callable[[bytes], None]:
        def send(data: bytes) -> None:
            if not self.connected[name]:
                raise zmq.Again
            self.received[name].append(data)

        return send

    def engine(self, name: str) -> Engine:
        return self.router.engines[name]

    def warm(self, *names: str) -> World:
        """Let engines, started again if they were dead, answer their warm-up request."""
        for name in names or tuple(self.router.engines):
            if self.engine(name).state is EngineState.DEAD:
                self.engine(name).state = EngineState.STARTING
            self.finish(name, f"{wire.WARMUP_RID_PREFIX}_{name}_0")
        return self

    def send(self, message: object) -> None:
        self.router.on_front_message(msgpack_encode(message))

    def request(self, rid: str, tokens: int = 8, new: int | None = 4) -> None:
        self.send(generate(rid, tokens, new))

    def finish(self, name: str, *rids: str) -> None:
        self.output(name, rids, [{"type": "length", "length": 4}] * len(rids))

    def output(self, name: str, rids: Sequence[str], reasons: Sequence[dict | None]) -> None:
        self.router.on_engine_message(self.engine(name), msgpack_encode(token_output(rids, reasons)))

    def tokens(self, name: str, rid: str, decoded: Sequence[int], total: int) -> None:
        """One request's output: token ids, of which the last are new, and how many it has now."""
        output = token_output([rid], [None])
        output.decode_ids, output.completion_tokens = [array("q", decoded)], [total]
        self.reply(name, output)

    def reply(self, name: str, message: object) -> None:
        self.router.on_engine_message(self.engine(name), msgpack_encode(message))

    def seen(self, name: str) -> list[str]:
        """The ids of what an engine was sent."""
        return [msgpack_decode(data).rid for data in self.received[name]]

    def check(self) -> None:
        """The router's invariant."""
        holders = self.router.places.holders()
        where = {rid: holder.name for holder in holders for rid in holder.in_flight}
        assert len(where) == sum(len(holder.in_flight) for holder in holders)
        assert {rid: holder.name for rid, holder in self.router.places.where.items()} == where
        assert self.router.journal.keys() == where.keys()
        long = self.router.long
        assert not set(long.waiting) & where.keys()
        somewhere = (
            where.keys() | self.router.waiting.paused.keys() | self.router.waiting.for_room.keys() | set(long.waiting)
        )
        assert long.needs.keys() <= somewhere
        assert {*long.waiting} <= long.needs.keys()
        if (admission := self.router.admission) is not None:
            assert admission._records.keys() == where.keys() | self.router.waiting.for_room.keys()
            assert admission.held == len(self.router.waiting.for_room)
            unread = [record for record in admission._records.values() if record.first_ms is None]
            assert admission._waiting.total() == len(unread)
            self._check_sums(admission)

    def _check_sums(self, admission: Admission) -> None:
        """What admission has added up is what there is."""
        tickets = list(admission._tickets.open.values())
        assert admission._tickets.of_tier == Counter(ticket.request.terms.tier for ticket in tickets)
        for holder in self.router.places.holders():
            records = [admission._records[rid] for rid in holder.in_flight]
            promised = [record for record in records if record.decision.outcome is Outcome.FEASIBLE]
            asked = [ticket.request for ticket in tickets if ticket.decision.engine == holder.name]
            unread = [record for record in records if record.first_ms is None]
            sums = admission._tally.of(holder.name)
            assert sums.requests == len(records) + len(asked)
            assert sums.unread == sum(one.tokens for one in [*unread, *asked])
            assert sums.context == sum(one.tokens + one.output for one in records) + sum(one.tokens for one in asked)
            assert sums.decoding == len(records) - len(unread)
            assert sums.promised == len(promised) + len(asked)
            assert sums.aged == sum(record.aged for record in records)
            targets = [one.terms.tpot_ms for one in [*promised, *asked]]
            assert sums.tightest_tpot_ms == min((one for one in targets if one is not None), default=math.inf)


def generate(rid: str, tokens: int = 8, new: int | None = 4) -> io_struct.TokenizedGenerateReqInput:
    """A stock tokenized request."""
    return io_struct.TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=array("q", range(tokens)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=new),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )


@cache
def _required_of_outputs() -> tuple[str, ...]:
    """msgspec takes 3 ms to find out."""
    return tuple(field.name for field in msgspec.structs.fields(io_struct.BatchTokenIDOutput) if field.required)


def token_output(rids: Sequence[str], reasons: Sequence[dict | None]) -> io_struct.BatchTokenIDOutput:
    """A stock batch of outputs, a token each, with nothing optional in it."""
    count = len(rids)
    required = dict.fromkeys(_required_of_outputs())
    numbers = dict.fromkeys(
        ("read_offsets", "prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens"), [0] * count
    )
    flags = dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), [True] * count)
    return io_struct.BatchTokenIDOutput(
        **required
        | numbers
        | flags
        | {
            "rids": list(rids),
            "finished_reasons": list(reasons),
            "decoded_texts": [""] * count,
            "decode_ids": [array("q", [7])] * count,
            "output_ids": [array("q", [7])] * count,
        }
    )
