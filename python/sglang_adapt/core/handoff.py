"""Messages that move requests from one engine to another: what a control channel carries to and from the ranks.

One struct a message. All ranks of an engine get the same message in the same
iteration; each answers for itself. Every message has the epoch of the switch it belongs to.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from sglang_adapt.core.block_ids import BlockIds


class RequestKind(StrEnum):
    """Where a request was when its engine exported it.

    RUNNING: has given its first token; KV of all tokens but the last.
    PREFILLING: KV of a part of its prompt.
    WAITING: no KV; it may have given tokens already, if it was retracted.
    """

    RUNNING = "running"
    PREFILLING = "prefilling"
    WAITING = "waiting"


class CarriedRequest(msgspec.Struct, frozen=True):
    """One request on the move.

    Attributes:
        rid: its id.
        kind: where it was.
        kv_tokens: its first tokens, prompt before output, whose KV moves with it.
        length: tokens it has, prompt and output.
        most_tokens: the most it may come to have.
        priority: stock's, higher first; None where priorities are off.
        state: everything else that it needs to go on, for `upstream.handoff` alone: a pickle, because the values are
            stock's own objects, whose fields are stock's business. It is made and read by engine ranks of one run only;
            a router forwards it unread. Empty if it is what the SnapshotAnswer of the same epoch had.
        recompute: it had KV, which was left behind.
        delta: what has changed of the state since the snapshot, if it was in one; a pickle likewise.
        ahead: of `kv_tokens`, the first ones whose KV has been where it was since the snapshot: what was copied ahead
            is still right. In a snapshot, the tokens that can be copied ahead.
    """

    rid: str
    kind: RequestKind
    kv_tokens: int
    length: int
    most_tokens: int
    priority: int | None
    state: bytes
    recompute: bool = False
    delta: bytes = b""
    ahead: int = 0

    def without_kv(self) -> CarriedRequest:
        """The same request, its KV left behind: it waits, and the engine that adopts it computes the KV again."""
        return msgspec.structs.replace(self, kind=RequestKind.WAITING, kv_tokens=0, recompute=True, ahead=0)

    def from_snapshot(self, state: bytes) -> CarriedRequest:
        """The same request for an engine that has got nothing ahead: with the state that its snapshot had."""
        return msgspec.structs.replace(self, state=self.state or state, ahead=0)


class KvSource(msgspec.Struct, frozen=True):
    """Where the KV of a request on the move lies.

    Attributes:
        gpus: the deployment's GPUs that the ranks of the source engine are on, by rank.
        blocks: by rank of the source, the request's blocks there in token order.
    """

    gpus: list[int]
    blocks: list[list[int]]


class SnapshotCall(msgspec.Struct, frozen=True, tag=True):
    """Say what the requests that decode now consist of; they run on. What does not change any more can be brought to
    their destination ahead, so that little is left to do while they are paused (pre-copy, as in the live migration of
    virtual machines).

    Attributes:
        epoch: of the switch that begins.
        unit: `CarriedRequest.ahead` is a multiple of so many tokens: whole blocks at every TP size.
        leave: how many free blocks each rank keeps for the requests that run on; the others, and evictable prefixes,
            are given back.
    """

    epoch: int
    unit: int
    leave: int


class SnapshotAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to SnapshotCall.

    Attributes:
        epoch: that of the call.
        requests: those that decode; from rank 0, empty from all others.
        blocks: for each request this rank's blocks of the tokens in `ahead`, in token order.
        given: the free blocks that have left the rank's lease, ascending.
    """

    epoch: int
    requests: list[CarriedRequest]
    blocks: list[list[int]]
    given: BlockIds
    steps_ms: dict[str, float] = {}


class PrecopyCall(msgspec.Struct, frozen=True, tag=True):
    """Make requests from their snapshots and bring their KV here, for an AdoptCall of the same epoch. What is not taken
    up by that is forgotten at the next PrecopyCall.

    Attributes:
        epoch: that of the switch.
        requests: from SnapshotAnswers of rank 0.
        blocks: by rank of this engine, for each request: blocks for the tokens in `ahead`, in token order.
        sources: for each request where its KV is copied from.
    """

    epoch: int
    requests: list[CarriedRequest]
    blocks: list[list[list[int]]]
    sources: list[KvSource]


class PrecopyAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to PrecopyCall: all is there."""

    epoch: int
    steps_ms: dict[str, float] = {}


class ExportCall(msgspec.Struct, frozen=True, tag=True):
    """Stop after the batch in flight and hand out all requests; they and their blocks stay held. Those that were in a
    snapshot of the same epoch are told as what has changed since.

    Attributes:
        epoch: of the switch that begins.
        keep: how many blocks the lease of each rank may keep; free ones and evictable prefixes beyond that are given
            back. None to keep the lease as it is.
    """

    epoch: int
    keep: int | None = None


class ExportAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to ExportCall.

    Attributes:
        epoch: that of the call.
        requests: what is exported, in the order in which it should be taken up; from rank 0, empty from all others.
        blocks: for each request this rank's blocks in token order, from the one after its tokens in `ahead` to the
            `ceil(kv_tokens / tokens per block)`-th. Requests with a common prefix name the same blocks.
        exported: the blocks that have left the rank's lease, ascending: those that belong to one request alone. The
            other blocks of the requests are in the prefix cache, locked, and still leased.
        staying: requests that go on running here, with the reason why they cannot be carried.
        given: the free blocks that have left the rank's lease, ascending; see `ExportCall.keep`.
        steps_ms: how long the rank took for what, in milliseconds; in the other answers as well.
    """

    epoch: int
    requests: list[CarriedRequest]
    blocks: list[list[int]]
    exported: BlockIds
    staying: dict[str, str]
    given: BlockIds = b""
    steps_ms: dict[str, float] = {}


class AdoptCall(msgspec.Struct, frozen=True, tag=True):
    """Take requests up whose KV lies, or is put by the engine's copy, in blocks that now join the lease.

    The engine decodes at once: grow its lease before. Stock retracts requests for which there is no free block, and
    aborts the last one. The same holds for RestoreCall.

    Attributes:
        epoch: that of the switch.
        requests: from an ExportAnswer of rank 0.
        blocks: by rank of the adopting engine, for each request: blocks in token order, after those of the tokens in
            `ahead`, which came with the PrecopyCall; none for waiting requests.
        sources: for each request where its KV after `ahead` is copied from, blocks from there on; empty if the router
            has had it copied already.
        grow: by rank, free blocks that join the lease as well.
        aborted: ids of requests that their clients have given up meanwhile; they are left out, and so are their blocks.
    """

    epoch: int
    requests: list[CarriedRequest]
    blocks: list[list[list[int]]]
    sources: list[KvSource] = []
    grow: list[BlockIds] = []
    aborted: list[str] = []


class AdoptAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to AdoptCall.

    Attributes:
        epoch: that of the call.
        adopted: ids of the requests that are the engine's now.
        spilled: those of them that had to go to the waiting queue for want of a request slot; their KV is cached.
    """

    epoch: int
    adopted: list[str]
    spilled: list[str]
    steps_ms: dict[str, float] = {}


class ReleaseCall(msgspec.Struct, frozen=True, tag=True):
    """Forget what was exported: the requests in `taken` live elsewhere.

    Attributes:
        epoch: that of the export.
        taken: ids.
        keep: as in ExportCall; what was locked in the prefix cache can be given back now.
    """

    epoch: int
    taken: list[str]
    keep: int | None = None


class ReleaseAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to ReleaseCall.

    Attributes:
        epoch: that of the call.
        freed: the blocks that belong to no one now, ascending: `ExportAnswer.exported`. They are not in the lease.
        aborted: requests that were taken and then given up by their clients: abort them where they live.
        given: the free blocks that have left the rank's lease, ascending.
    """

    epoch: int
    freed: BlockIds
    aborted: list[str]
    given: BlockIds = b""
    steps_ms: dict[str, float] = {}


class RestoreCall(msgspec.Struct, frozen=True, tag=True):
    """Undo the export: all requests go on here.

    Attributes:
        epoch: that of the export.
        grow: by rank, free blocks that join the lease first.
    """

    epoch: int
    grow: list[BlockIds] = []


class RestoreAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to RestoreCall.

    Attributes:
        epoch: that of the call.
        restored: ids of the requests that go on, those given up meanwhile left out.
        leased: the blocks that are back in the rank's lease, ascending: `ExportAnswer.exported`.
    """

    epoch: int
    restored: list[str]
    leased: BlockIds
    steps_ms: dict[str, float] = {}


class AbortHeldCall(msgspec.Struct, frozen=True, tag=True):
    """A client has given up a request that may be held by an export. `rid` may be the beginning of ids, as in stock's
    AbortReq."""

    epoch: int
    rid: str
    abort_all: bool = False


class AbortHeldAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to AbortHeldCall: the held requests that it meant."""

    epoch: int
    aborted: list[str]


class UnexportableCall(msgspec.Struct, frozen=True, tag=True):
    """Which requests could not be carried? Changes nothing but that an export is expected if there are none: see
    `upstream.handoff.soon`."""


class UnexportableAnswer(msgspec.Struct, frozen=True, tag=True):
    """One rank's answer to UnexportableCall: request id to reason."""

    reasons: dict[str, str]


HandoffCall = (
    SnapshotCall | PrecopyCall | ExportCall | AdoptCall | ReleaseCall | RestoreCall | AbortHeldCall | UnexportableCall
)
HandoffAnswer = (
    SnapshotAnswer
    | PrecopyAnswer
    | ExportAnswer
    | AdoptAnswer
    | ReleaseAnswer
    | RestoreAnswer
    | AbortHeldAnswer
    | UnexportableAnswer
)
_TIMED = (SnapshotAnswer, PrecopyAnswer, ExportAnswer, AdoptAnswer, ReleaseAnswer, RestoreAnswer)
"""Answers with `steps_ms`."""

Answer = TypeVar("Answer", bound=HandoffAnswer)

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(HandoffCall).decode
_decode_answer = msgspec.msgpack.Decoder(HandoffAnswer).decode


def call_payload(call: HandoffCall) -> dict[str, Any]:
    """A call as what goes to an engine: bytes, which nothing on the way takes apart."""
    return {"message": encode(call)}


def call_of(payload: dict[str, Any]) -> HandoffCall:
    """What `call_payload` was given. Raises msgspec.ValidationError if it is no such call."""
    return decode_call(payload["message"])


def answer_payload(answer: HandoffAnswer) -> dict[str, Any]:
    """An answer as what comes from an engine; its times beside it, because others are added on the way."""
    steps = {"steps_ms": answer.steps_ms} if isinstance(answer, _TIMED) else {}
    return {"message": encode(answer), **steps}


def answer_of(payload: dict[str, Any], kind: type[Answer]) -> Answer:
    """What `answer_payload` was given, with the times that it has now.

    Raises:
        msgspec.ValidationError: another message, or none.
    """
    answer = decode_answer(payload["message"], kind)
    return msgspec.structs.replace(answer, steps_ms=payload["steps_ms"]) if isinstance(answer, _TIMED) else answer


def to_plain(message: msgspec.Struct) -> dict[str, Any]:
    """A message as the plain values and bytes that calls to an engine, and what it says, are made of."""
    plain: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return plain


def decode_answer(data: bytes, kind: type[Answer]) -> Answer:
    """An answer of the type that was asked for.

    Raises:
        msgspec.ValidationError: another message, or none.
    """
    answer = _decode_answer(data)
    if not isinstance(answer, kind):
        raise msgspec.ValidationError(f"{type(answer).__name__} came where {kind.__name__} was expected")
    return answer
