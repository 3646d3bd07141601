"""Our own messages: between the front and the router, and between the router and an engine's ranks.

One struct a message, msgpack on the wire. Front and router have a socket for them. Router and engine have not: theirs
travel on stock's sockets (`upstream/wire.py`), in order with everything else.

Stock messages keep stock's format and travel on stock's sockets; nothing is added to them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_adapt.core.slo import SloConfig, Terms


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine as the router sees it.

    Attributes:
        name: e.g. `tp2@0-1`.
        state: `starting`, `ready`, `dead` (being restarted) or `failed` (given up).
        active: part of the active layout.
        role: what it does there now, one of `core.layout.Role`.
        in_flight: accepted and unfinished requests on it.
        restarts: how often it was restarted since the start of the server.
        pids: process ids of its ranks; none from when one has ended until all are started again.
        last_death: why it was lost the last time; None if it never was.
        leased_blocks: KV blocks on each of its GPUs that it may use; None where there is no shared pool.
        free_blocks: KV blocks on each of its GPUs that nobody has.
    """

    name: str
    state: str
    active: bool
    in_flight: int
    restarts: int
    pids: list[int]
    leased_blocks: int | None = None
    free_blocks: int | None = None
    role: str = "mixed"
    last_death: str | None = None


class RouterStatus(msgspec.Struct, frozen=True, tag=True):
    """Router to front: sent on every change of an engine's state and every second as a sign of life.

    Attributes:
        layout: that serves.
        engines: all of them.
        request_tokens: the longest request that is accepted now, prompt and output; 0 where every engine decides alone.
    """

    layout: str
    engines: list[EngineStatus]
    request_tokens: int = 0


class DrainRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: finish the requests that are there and on their way, within a time, then stop the engines and
    exit."""

    timeout_s: float


class NoMoreRequests(msgspec.Struct, frozen=True, tag=True):
    """Front to router, after a DrainRequest: all requests that the front had accepted have ended, no more will come."""


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: send the status now."""


class SwitchRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: go over to a layout. Answered by a LayoutAnswer when it is done or refused.

    Attributes:
        id: names the request in its answer.
        layout: e.g. `tp2@0-1`; `auto` gives the decision back to the planner.
        strategy: one of `policy.carry.Strategy`.
        reason: for the log.
    """

    id: int
    layout: str
    strategy: str
    reason: str


class LayoutRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: which layout serves, read back from the engines? Answered by a LayoutAnswer."""

    id: int


class PlanRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: what would the planner do? Answered by a LayoutAnswer.

    Attributes:
        id: names the request in its answer.
        rates: requests/s by tier; of the only one, where there are no tiers, under the empty name; None: at what is
            asked for now.
    """

    id: int
    rates: dict[str, float] | None


class ViewRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: what does the live page show? Answered by a LayoutAnswer."""

    id: int


class AdmitRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router, before a request is tokenized: will it be served? Answered by an AdmitAnswer.

    Attributes:
        id: names the request in its answer. What is tokenized comes with all of this (`upstream.wire.encode_ticket`).
        terms: what it asks for.
        tokens: of its prompt, about.
        output: the most tokens that it may give; None if it does not say.
        arrived_ms: when it arrived, by CLOCK_MONOTONIC, which all processes share.
    """

    id: int
    terms: Terms
    tokens: int
    output: int | None
    arrived_ms: float


class AdmitAnswer(msgspec.Struct, frozen=True, tag=True):
    """Router to front: a request is served, or refused with a reason and the seconds after which to come again.

    Attributes:
        draining: it is refused because the server shuts down.
        holds_from: prompts of so many tokens would be refused as well; 0: only longer ones than that of the request.
    """

    id: int
    admitted: bool
    retry_after_s: int = 0
    reason: str = ""
    draining: bool = False
    holds_from: int = 0


class PlaceReturned(msgspec.Struct, frozen=True, tag=True):
    """Front to router: the admitted request `id` has gone without being tokenized; its place is free."""

    id: int


class TiersOrder(msgspec.Struct, frozen=True, tag=True):
    """Front to router: these are the tiers from now on. Requests that have been admitted keep their terms."""

    config: SloConfig


class RequestReport(msgspec.Struct, frozen=True, tag=True):
    """Router to front: how a request has ended. Times in ms; None where there was no such token or forecast.

    Attributes:
        rid: its id.
        terms: what it asked for.
        outcome: one of `policy.admission.Outcome`, as it was placed.
        ended: `finished`, or `stopped` (aborted by its client, or failed).
        engine: that gave its last token; empty if none did.
        arrived_ms: by CLOCK_MONOTONIC.
        queue_ms: from its arrival until it was sent to an engine.
        ttft_ms, tpot_ms: as they were.
        forecast_ttft_ms, forecast_tpot_ms: as they were predicted when it arrived.
        prompt_tokens, output_tokens: how many.
    """

    rid: str
    terms: Terms
    outcome: str
    ended: str
    engine: str
    arrived_ms: float
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    forecast_ttft_ms: float | None
    forecast_tpot_ms: float | None
    prompt_tokens: int
    output_tokens: int

    @property
    def met(self) -> tuple[bool, bool]:
        """Has it met its (TTFT, TPOT) target? One that did not finish has met none; background work cannot miss any."""
        if self.ended != "finished":
            return False, False
        terms = self.terms
        ttft = terms.ttft_ms is None or (self.ttft_ms is not None and self.ttft_ms <= terms.ttft_ms)
        return ttft, terms.tpot_ms is None or self.tpot_ms is None or self.tpot_ms <= terms.tpot_ms


class LayoutAnswer(msgspec.Struct, frozen=True, tag=True):
    """Router to front: HTTP status and body of the answer to the request `id`."""

    id: int
    status: int
    body: dict[str, Any]


class EngineCall(msgspec.Struct, frozen=True):
    """Router to all ranks of an engine: do one thing, in the same iteration.

    Attributes:
        id: names the call in its reply; unique within one start of the engine.
        epoch: the layout that the call belongs to; ranks refuse one below the last.
        name: what to do (`engine/control.py`).
        payload: its arguments, plain values and bytes; the same for all ranks.
    """

    id: int
    epoch: int
    name: str
    payload: dict[str, Any]


class RankAnswer(msgspec.Struct, frozen=True):
    """What one rank did: its answer, or the error that kept it from doing anything.

    Attributes:
        answer: plain values and bytes.
        error: why not.
        began_s: when it began, and
        ended_s: when it had done it, by `time.monotonic`, which all processes of a machine share.
    """

    answer: dict[str, Any] | None = None
    error: str | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


class EngineReply(msgspec.Struct, frozen=True, tag=True):
    """An engine's reply to one call: an entry for each rank."""

    id: int
    epoch: int
    ranks: list[RankAnswer]


class EngineNotice(msgspec.Struct, frozen=True, tag=True):
    """An engine to the router, unasked, in order with its replies and outputs: one of `core.handover.HandoverNotice`,
    as plain values and bytes."""

    payload: dict[str, Any]


FrontToRouter = (
    DrainRequest
    | NoMoreRequests
    | StatusRequest
    | SwitchRequest
    | LayoutRequest
    | PlanRequest
    | ViewRequest
    | AdmitRequest
    | PlaceReturned
    | TiersOrder
)
RouterToFront = RouterStatus | LayoutAnswer | AdmitAnswer | RequestReport

encode = msgspec.msgpack.Encoder().encode
decode_front_to_router = msgspec.msgpack.Decoder(FrontToRouter).decode
decode_router_to_front = msgspec.msgpack.Decoder(RouterToFront).decode

decode_engine_call = msgspec.msgpack.Decoder(EngineCall).decode
decode_engine_reply = msgspec.msgpack.Decoder(EngineReply | EngineNotice).decode


def no_engine_is_up(layout: object) -> str:
    """Why a request is turned away while the engines of a layout are down and come back: the front says it as soon as
    it knows, and the router of what has passed the front by then."""
    return f"no engine of layout {layout} is up; try again shortly"
