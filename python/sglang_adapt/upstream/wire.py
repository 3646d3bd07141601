"""Stock sglang's IPC messages, read as little as needed.

A stock message is a tagged msgpack array `[tag, field, field, ...]` (sglang/srt/managers/io_struct.py). The router
looks at the tag, decodes the leading fields with a shorter struct of the same tag (msgspec skips the rest) and
forwards the bytes untouched. Only merged control answers and errors are decoded and encoded as stock's own types.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import msgspec

from sglang_adapt.core.messages import (
    AdmitRequest,
    EngineCall,
    EngineNotice,
    EngineReply,
    decode_engine_call,
    decode_engine_reply,
    encode,
)

HEALTH_RID_PREFIX = "HEALTH_CHECK"
WARMUP_RID_PREFIX = "SGLANG_ADAPT_WARMUP"
CONTROL_FAILED_PREFIX = "SGLANG_ADAPT_CONTROL_FAILED:"

GENERATE = b"TokenizedGenerateReqInput"
EMBED = b"TokenizedEmbeddingReqInput"
BATCH_GENERATE = b"BatchTokenizedGenerateReqInput"
BATCH_EMBED = b"BatchTokenizedEmbeddingReqInput"
ABORT = b"AbortReq"
TOKEN_OUTPUT = b"BatchTokenIDOutput"
EMBED_OUTPUT = b"BatchEmbeddingOutput"
HEALTH_OUTPUT = b"HealthCheckOutput"
INTERNAL_STATE = b"GetInternalStateReqOutput"
RPC_REQUEST = b"RpcReqInput"
TICKET = b"SglangAdaptTicket"
SAID = b"SglangAdaptSaid"

CALL_METHOD = "sglang_adapt_call"
"""The method name of stock's RpcReqInput by which our calls are told from stock's own."""


class WireError(ValueError):
    """Bytes that are not a tagged stock message."""


def peek_tag(data: bytes) -> bytes:
    """The tag of a tagged msgpack array, without decoding anything else.

    Raises:
        WireError: not an array that begins with a string.
    """
    try:
        head = data[0]
        if 0x91 <= head <= 0x9F:
            at = 1
        elif head == 0xDC:
            at = 3
        elif head == 0xDD:
            at = 5
        else:
            raise WireError(f"message begins with byte {head:#x}, not with an array")
        kind = data[at]
        if 0xA0 <= kind <= 0xBF:
            return data[at + 1 : at + 1 + (kind & 0x1F)]
        if kind == 0xD9:
            return data[at + 2 : at + 2 + data[at + 1]]
    except IndexError:
        raise WireError(f"message of {len(data)} bytes is cut short") from None
    raise WireError(f"message's first item begins with byte {kind:#x}, not with a string")


class _GenerateHead(msgspec.Struct, tag="TokenizedGenerateReqInput", array_like=True):
    rid: str
    http_worker_ipc: msgspec.Raw
    input_text: msgspec.Raw
    input_ids: msgspec.Raw


class _Sampling(msgspec.Struct, array_like=True):
    """The leading field of stock's SamplingParams."""

    max_new_tokens: int | None


class _Sampled(msgspec.Struct, tag="TokenizedGenerateReqInput", array_like=True):
    rid: msgspec.Raw
    http_worker_ipc: msgspec.Raw
    input_text: msgspec.Raw
    input_ids: msgspec.Raw
    input_embeds: msgspec.Raw
    mm_inputs: msgspec.Raw
    token_type_ids: msgspec.Raw
    sampling_params: _Sampling


class _Ticket(msgspec.Struct, tag="SglangAdaptTicket", array_like=True):
    """Our own message on the socket from the front to the router: the next request of that id was admitted as this."""

    rid: str
    request: AdmitRequest


class _Said(msgspec.Struct, tag="SglangAdaptSaid", array_like=True):
    """Our own message on an engine's output socket, in order with stock's: an EngineReply or EngineNotice, encoded."""

    data: bytes


class _EmbedHead(msgspec.Struct, tag="TokenizedEmbeddingReqInput", array_like=True):
    rid: str
    http_worker_ipc: msgspec.Raw
    input_text: msgspec.Raw
    input_ids: msgspec.Raw


class _BatchGenerate(msgspec.Struct, tag="BatchTokenizedGenerateReqInput", array_like=True):
    rids: msgspec.Raw
    http_worker_ipcs: msgspec.Raw
    batch: list[msgspec.Raw]


class _BatchEmbed(msgspec.Struct, tag="BatchTokenizedEmbeddingReqInput", array_like=True):
    rids: msgspec.Raw
    http_worker_ipcs: msgspec.Raw
    batch: list[msgspec.Raw]


class _AbortHead(msgspec.Struct, tag="AbortReq", array_like=True):
    rid: str
    http_worker_ipc: msgspec.Raw
    abort_all: bool = False


class _TokenOutput(msgspec.Struct, tag="BatchTokenIDOutput", array_like=True):
    rids: list[str]
    http_worker_ipcs: msgspec.Raw
    finished_reasons: list[msgspec.Raw]
    decoded_texts: msgspec.Raw
    decode_ids: list[tuple[str, bytes]]
    read_offsets: msgspec.Raw
    output_ids: msgspec.Raw
    skip_special_tokens: msgspec.Raw
    spaces_between_special_tokens: msgspec.Raw
    no_stop_trim: msgspec.Raw
    prompt_tokens: msgspec.Raw
    reasoning_tokens: msgspec.Raw
    completion_tokens: list[int]


class _Reason(msgspec.Struct):
    type: str = ""


class _EmbedOutputHead(msgspec.Struct, tag="BatchEmbeddingOutput", array_like=True):
    rids: list[str]
    http_worker_ipcs: msgspec.Raw
    finished_reasons: list[msgspec.Raw]


_REQUEST = msgspec.msgpack.Decoder(_GenerateHead | _EmbedHead)
_BATCH = msgspec.msgpack.Decoder(_BatchGenerate | _BatchEmbed)
_IDS = msgspec.msgpack.Decoder(tuple[str, bytes])
_SAMPLED = msgspec.msgpack.Decoder(_Sampled)
_SAID_OF = msgspec.msgpack.Decoder(_Said)
_TICKET_OF = msgspec.msgpack.Decoder(_Ticket)
_ABORT = msgspec.msgpack.Decoder(_AbortHead)
_EMBED_OUTPUT = msgspec.msgpack.Decoder(_EmbedOutputHead)
_TOKEN_OUTPUT = msgspec.msgpack.Decoder(_TokenOutput)

_REASON = msgspec.msgpack.Decoder(_Reason)

_NIL = b"\xc0"
_BYTES_PER_TOKEN = 8
"""Stock sends token ids as `array("q")`: eight bytes each."""


def request_head(data: bytes) -> tuple[str, int]:
    """(request id, prompt tokens) of one tokenized request."""
    head = _REQUEST.decode(data)
    # Around the ids there are 5, 6 or 8 bytes; one byte if there are none.
    return head.rid, (len(head.input_ids) - 1) // _BYTES_PER_TOKEN


def asked_output(data: bytes) -> int | None:
    """Output tokens that a tokenized request asks for at most; None: as many as there is room for; 0 for embeddings."""
    return _SAMPLED.decode(data).sampling_params.max_new_tokens if peek_tag(data) == GENERATE else 0


def prompt_ids(data: bytes) -> bytes:
    """Token ids of a tokenized request's prompt, int64 each; empty if it has none, as one of embeddings."""
    head = _REQUEST.decode(data)
    try:
        return _IDS.decode(head.input_ids)[1]
    except msgspec.DecodeError:
        return b""


@cache
def _request_codec() -> Any:
    """A decoder of stock's tokenized request that leaves all fields but `priority` as they are."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    fields: list[tuple[str, Any]] = [
        (name, int | None if name == "priority" else msgspec.Raw)
        for name in TokenizedGenerateReqInput.__struct_fields__
    ]
    tag = GENERATE.decode()
    return msgspec.msgpack.Decoder(msgspec.defstruct("_Request", fields, tag=tag, array_like=True))


def with_priority(data: bytes, priority: int) -> bytes:
    """A tokenized request with another `priority`, by which stock orders its queue; all else stays as it is."""
    request = _request_codec().decode(data)
    request.priority = priority
    return msgspec.msgpack.encode(request)


def encode_ticket(rid: str, request: AdmitRequest) -> bytes:
    """Says as what the request `rid` was admitted, which comes next on the same socket."""
    return msgspec.msgpack.encode(_Ticket(rid, request))


def ticket_of(data: bytes) -> tuple[str, AdmitRequest]:
    """(request id, as what it was admitted) of such a message."""
    decoded = _TICKET_OF.decode(data)
    return decoded.rid, decoded.request


def split_batch(data: bytes) -> list[bytes]:
    """The requests of a stock batch message, each a message of its own."""
    return [bytes(item) for item in _BATCH.decode(data).batch]


def abort_head(data: bytes) -> tuple[str, bool]:
    """(request id or prefix, abort everything?) of an abort."""
    head = _ABORT.decode(data)
    return head.rid, head.abort_all


class Output(NamedTuple):
    """What a batch of outputs has of one request.

    Attributes:
        rid: its id.
        finished: this is its last output.
        decoded: token ids, int64: its new tokens, before them, in its first output, the end of its prompt.
        total: output tokens that it has now.
        aborted: it is the last one because the request was given up, by its client or by the engine.
    """

    rid: str
    finished: bool
    decoded: bytes
    total: int
    aborted: bool = False


def token_outputs(data: bytes) -> list[Output]:
    """The requests in a batch of generated tokens."""
    batch = _TOKEN_OUTPUT.decode(data)
    return [
        Output(rid, bytes(reason) != _NIL, ids[1], total, _is_abort(reason))
        for rid, reason, ids, total in zip(
            batch.rids, batch.finished_reasons, batch.decode_ids, batch.completion_tokens, strict=True
        )
    ]


def embed_outputs(data: bytes) -> list[Output]:
    """The requests in a batch of embeddings; each output is the last one of its request."""
    batch = _EMBED_OUTPUT.decode(data)
    return [
        Output(rid, True, b"", 0, _is_abort(reason))
        for rid, reason in zip(batch.rids, batch.finished_reasons, strict=True)
    ]


def _is_abort(reason: msgspec.Raw) -> bool:
    return bytes(reason) != _NIL and _REASON.decode(reason).type == "abort"


def encode_unavailable(rid: str, message: str) -> bytes:
    """The stock message that ends a request with a 503 and a text, for the tokenizer manager."""
    return _encode_end(rid, message, 503, "ServiceUnavailable")


def encode_refused(rid: str, message: str) -> bytes:
    """The stock message that ends a request with a 400 and a text, for the tokenizer manager."""
    return _encode_end(rid, message, 400, "BadRequestError")


def _encode_end(rid: str, message: str, status_code: int, err_type: str) -> bytes:
    from sglang.srt.managers.io_struct import AbortReq, msgpack_encode

    reason = {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}
    return msgpack_encode(AbortReq(rid=rid, finished_reason=reason))


def encode_abort(rid: str) -> bytes:
    """The stock message that ends a request which its client has given up, for the tokenizer manager."""
    from sglang.srt.managers.io_struct import AbortReq, msgpack_encode

    return msgpack_encode(AbortReq(rid=rid))


def encode_control_failure(reply_tag: bytes, message: str, status_code: int) -> bytes:
    """What is answered to a control request that failed instead of being answered, for router and front.

    Args:
        reply_tag: tag of the answer that was due.
        message: which engine, and why.
        status_code: HTTP status for the client.
    """
    from sglang.srt.managers.io_struct import msgpack_encode

    return msgpack_encode(control_failure(reply_tag, message, status_code))


def control_failure(reply_tag: bytes, message: str, status_code: int) -> Any:
    """The stock object behind `encode_control_failure`: an abort, with an id that no request can have."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "message": message, "status_code": status_code}
    return AbortReq(rid=CONTROL_FAILED_PREFIX + reply_tag.decode(), finished_reason=reason)


def encode_shutdown() -> bytes:
    """The stock message that makes a scheduler release its resources and leave its loop."""
    from sglang.srt.managers.io_struct import ShutdownReq, msgpack_encode

    return msgpack_encode(ShutdownReq())


def encode_warmup(rid: str, prompt: list[int], new_tokens: int) -> bytes:
    """A tokenized greedy request of our own; the router swallows its outputs."""
    from array import array

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, msgpack_encode
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    params.normalize(tokenizer=None)
    request = TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    request.wrap_pickle_fields()
    return msgpack_encode(request)


def encode_call(call: EngineCall) -> bytes:
    """A call to an engine's ranks as stock's RPC message, which stock hands to all ranks in the same iteration.

    Its parameters are plain values only, so the call is text in one of them: hexadecimal, because that is written and
    read in half the time of base64.
    """
    from sglang.srt.managers.io_struct import RpcReqInput, msgpack_encode

    return msgpack_encode(RpcReqInput(method=CALL_METHOD, parameters={"call": encode(call).hex()}))


def call_of(request: Any) -> EngineCall | None:
    """The call in a stock RpcReqInput; None if it is one of stock's own."""
    if request.method != CALL_METHOD:
        return None
    return decode_engine_call(bytes.fromhex(request.parameters["call"]))


def reply_message(reply: EngineReply) -> Any:
    """What carries a reply to the router; stock's sender encodes it as it does its own messages."""
    return _Said(encode(reply))


def notice_message(notice: EngineNotice) -> Any:
    """What carries a notice, as `reply_message`."""
    return _Said(encode(notice))


def said_in(data: bytes) -> EngineReply | EngineNotice:
    """The reply or notice in such a message, encoded."""
    return decode_engine_reply(_SAID_OF.decode(data).data)


def reply_tags() -> dict[bytes, bytes]:
    """For each stock control request that is answered: its tag and the tag of its answer.

    Stock names them `XReqInput` or `XReq` and `XReqOutput` (some answers are one class under several names); read
    from io_struct, so a new pair needs no change here.
    """
    from sglang.srt.managers import io_struct

    structs: dict[str, str] = {
        name: cast(Any, value).__struct_config__.tag
        for name, value in vars(io_struct).items()
        if isinstance(value, type) and issubclass(value, (io_struct.BaseReq, io_struct.BaseBatchReq))
    }
    pairs = {}
    for request, tag in structs.items():
        for suffix in ("ReqInput", "Req"):
            reply = f"{request.removesuffix(suffix)}ReqOutput"
            if request.endswith(suffix) and reply in structs:
                pairs[tag.encode()] = structs[reply].encode()
    missing = [name for name in _ANSWERED if name.encode() not in pairs]
    if missing:
        raise WireError(f"sglang's io_struct has no answer to {', '.join(missing)}; its control messages have changed")
    return pairs


_ANSWERED = (
    "FlushCacheReqInput",
    "GetInternalStateReq",
    "ProfileReq",
    "LoadLoRAAdapterReqInput",
    "OpenSessionReqInput",
)


def merge_replies(replies: dict[str, bytes]) -> bytes:
    """One answer for the tokenizer manager out of the engines' answers to one control request.

    Success only if every engine succeeded; the messages of failed engines are kept, with the engine's name. The
    internal state is the first engine's, with every engine's main figures beside it under `adapt_engines`. If an engine
    failed instead of answering (`control_failure`), so does the whole.

    Args:
        replies: engine name to encoded answer, all of one type, in the order of preference; not empty.
    """
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    if len(replies) == 1 and peek_tag(next(iter(replies.values()))) not in (INTERNAL_STATE, ABORT):
        return next(iter(replies.values()))
    decoded = {engine: msgpack_decode(data) for engine, data in replies.items()}
    broken = {engine: reply.finished_reason for engine, reply in decoded.items() if peek_tag(replies[engine]) == ABORT}
    if broken:
        merged = next(decoded[engine] for engine in broken)
        merged.finished_reason["message"] = " | ".join(f"{name}: {why['message']}" for name, why in broken.items())
        return msgpack_encode(merged)
    merged = next(iter(decoded.values()))
    if hasattr(merged, "internal_state"):
        merged.internal_state["adapt_engines"] = [
            {"engine": engine, **{key: reply.internal_state.get(key) for key in _STATE_KEYS}}
            for engine, reply in decoded.items()
        ]
        return msgpack_encode(merged)
    failed = {engine: reply for engine, reply in decoded.items() if getattr(reply, "success", True) is False}
    if failed:
        merged = next(iter(failed.values()))
        for field in ("message", "error_message"):
            if hasattr(merged, field):
                texts = [f"{engine}: {getattr(reply, field)}" for engine, reply in failed.items()]
                setattr(merged, field, " | ".join(texts))
    return msgpack_encode(merged)


_STATE_KEYS = ("last_gen_throughput", "memory_usage", "effective_max_running_requests_per_dp")


def assert_wire_format() -> None:
    """Check against this sglang that the leading fields are where this module reads them.

    Raises:
        WireError: the stock structs have changed, or stock is set to send pickles instead of msgpack.
    """
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    if io_struct._USE_PICKLE_IPC:
        raise WireError("SGLANG_USE_PICKLE_IPC is set; sglang_adapt reads msgpack messages only, so unset it")
    heads: tuple[tuple[Any, Any], ...] = (
        (_GenerateHead, io_struct.TokenizedGenerateReqInput),
        (_Sampled, io_struct.TokenizedGenerateReqInput),
        (_Sampling, SamplingParams),
        (_EmbedHead, io_struct.TokenizedEmbeddingReqInput),
        (_BatchGenerate, io_struct.BatchTokenizedGenerateReqInput),
        (_BatchEmbed, io_struct.BatchTokenizedEmbeddingReqInput),
        (_AbortHead, io_struct.AbortReq),
        (_TokenOutput, io_struct.BatchTokenIDOutput),
        (_EmbedOutputHead, io_struct.BatchEmbeddingOutput),
    )
    for head, stock in heads:
        ours, theirs = head.__struct_fields__, stock.__struct_fields__
        if theirs[: len(ours)] != ours:
            raise WireError(f"{stock.__name__} begins with {theirs[: len(ours)]}, but the router reads {ours}")
    probe = encode_warmup("probe", [1, 2, 3], 1)
    if peek_tag(probe) != GENERATE or request_head(probe) != ("probe", 3):
        raise WireError(f"an encoded request reads back as {peek_tag(probe)!r} {request_head(probe)}")
    if asked_output(probe) != 1:
        raise WireError(f"an encoded request asks for one token, and reads back as {asked_output(probe)!r}")
    if len(prompt_ids(probe)) != 3 * _BYTES_PER_TOKEN:
        raise WireError(f"the 3 token ids of an encoded request read back as {prompt_ids(probe)!r}")
    reply_tags()
