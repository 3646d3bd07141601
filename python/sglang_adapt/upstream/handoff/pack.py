"""One request as a message, and back: what is carried of it is pickled, the rest is made by the engine that adopts."""

from __future__ import annotations

import copy
import pickle
from array import array
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sglang_adapt.core.handoff import CarriedRequest, RequestKind
from sglang_adapt.upstream.handoff.state import CARRIED, usual

Content = TypeVar("Content")


class UnpackError(RuntimeError):
    """A carried request that this engine cannot take up; the text names the request and what is wrong."""


@dataclass(frozen=True)
class _Packed:
    """The pickle's content.

    Attributes:
        attributes: values of CARRIED, less `tokens`, the usual ones, and the sampling parameters' way back to the
            request.
        tokens: the attributes that are lists of token ids, of which a long prompt has most of a request's bytes; int32.
        aliases: attributes that are the same list as another one.
        clocks: the numbers of its `time_stats` that are not 0. Stock's own pickle drops them; they are readings of a
            clock that all processes of a machine share.
        has_grammar: it was being decoded under a grammar.
    """

    attributes: dict[str, Any]
    tokens: dict[str, bytes]
    aliases: dict[str, str]
    clocks: dict[str, float]
    has_grammar: bool


@dataclass(frozen=True)
class Unpacked:
    """A request of this engine, without slot, KV or grammar, and what it came with."""

    req: Any
    carried: CarriedRequest
    has_grammar: bool


def pack(req: Any, kind: RequestKind, kv_tokens: int, ahead: int = 0) -> CarriedRequest:
    """The message of one request of stock's (`Req`), with its whole state; changes nothing."""
    known = usual()
    attributes = {
        name: value
        for name, value in vars(req).items()
        if name in CARRIED and not (name in known and type(value) is type(known[name]) and value == known[name])
    }
    params = attributes["sampling_params"] = copy.copy(req.sampling_params)
    if isinstance(params.custom_params, dict):
        params.custom_params = {key: value for key, value in params.custom_params.items() if key != "__req__"}
    clocks = {name: value for name, value in clocks_of(req).items() if value}
    tokens, aliases = _take_tokens(attributes)
    packed = _Packed(attributes, tokens, aliases, clocks, req.grammar is not None)
    return describe(req, kind, kv_tokens, pickle.dumps(packed, protocol=pickle.HIGHEST_PROTOCOL), ahead=ahead)


def describe(
    req: Any, kind: RequestKind, kv_tokens: int, state: bytes, delta: bytes = b"", ahead: int = 0
) -> CarriedRequest:
    """The message of a request whose state is packed already."""
    most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return CarriedRequest(req.rid, kind, kv_tokens, req.seqlen, most, req.priority, state, delta=delta, ahead=ahead)


def unpack(carried: CarriedRequest, scheduler: Any) -> Unpacked:
    """A request of `scheduler` from the state in its message.

    Raises:
        UnpackError: the state is not that of a request, or of another one.
    """
    from sglang.srt.managers.schedule_batch import Req

    packed = read(carried.rid, carried.state, _Packed)
    if packed.attributes["rid"] != carried.rid:
        raise UnpackError(f"request {carried.rid}: its state is not that of this request")
    attributes = packed.attributes
    attributes |= {name: wide(data) for name, data in packed.tokens.items()}
    attributes |= {name: attributes[other] for name, other in packed.aliases.items()}
    req = Req(
        carried.rid,
        "",
        attributes["origin_input_ids"],
        attributes.pop("sampling_params"),
        disagg_mode=scheduler.disaggregation_mode,
        metrics_collector=scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None,
    )
    vars(req).update(attributes)
    clocks = {name: type(value)() for name, value in clocks_of(req).items()}
    vars(req.time_stats).update(clocks | packed.clocks)
    req.tokenizer = scheduler.tokenizer
    return Unpacked(req, carried, packed.has_grammar)


def read(rid: str, data: bytes, kind: type[Content]) -> Content:
    """What a pickle in the message of a request has. Raises UnpackError if it is not of that kind."""
    try:
        content = pickle.loads(data)
    except Exception as error:
        raise UnpackError(f"request {rid}: its state cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, kind):
        raise UnpackError(f"request {rid}: its state is not that of this request")
    return content


def clocks_of(req: Any) -> dict[str, float]:
    """The numbers of a request's `time_stats`."""
    return {name: value for name, value in vars(req.time_stats).items() if type(value) in (int, float)}


def _take_tokens(attributes: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Take the lists of token ids out of the attributes: `_Packed.tokens` and `aliases`. One with a number that is no
    int32 stays: stock has hashes in place of the tokens of images."""
    tokens: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    lists: dict[int, str] = {}
    for name, value in list(attributes.items()):
        if type(value) is not array or value.typecode != "q":
            continue
        if (other := lists.get(id(value))) is not None:
            aliases[name] = other
            del attributes[name]
            continue
        if (data := narrow(value)) is not None:
            lists[id(value)] = name
            tokens[name] = data
            del attributes[name]
    return tokens, aliases


def narrow(ids: array[int], first: int = 0) -> bytes | None:
    """Token ids from `first` on, as int32; None if one is no int32."""
    wide_ids = np.frombuffer(ids, np.int64)[first:]
    narrow_ids = wide_ids.astype(np.int32)
    return narrow_ids.tobytes() if np.array_equal(narrow_ids, wide_ids) else None


def wide(data: bytes) -> array[int]:
    """What `narrow` was given."""
    return array("q", np.frombuffer(data, np.int32).astype(np.int64).tobytes())
