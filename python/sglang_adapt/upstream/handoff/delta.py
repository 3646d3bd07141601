"""What has changed of a request since its state was packed: a few numbers and tokens, where the whole is kilobytes.

Exact by construction: every attribute that is carried is compared with what it was, by value where it is plain, by its
pickle where it is not. Lists of token ids, which stock only appends to, are compared by identity and length.
"""

from __future__ import annotations

import pickle
from array import array
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.upstream.handoff.pack import Unpacked, clocks_of, narrow, read, wide
from sglang_adapt.upstream.handoff.state import CARRIED, PLAIN

_PARAMS = "sampling_params"
_NOTHING = array("q")


@dataclass(frozen=True)
class State:
    """A request as it was when it was packed.

    Attributes:
        plain: attributes with plain values.
        lists: token ids: the list itself, and its length then.
        pickles: all other attributes.
        params: the sampling parameters.
        clocks: all numbers of its `time_stats`.
    """

    plain: dict[str, Any]
    lists: dict[str, tuple[array[int], int]]
    pickles: dict[str, bytes]
    params: dict[str, Any]
    clocks: dict[str, float]


@dataclass(frozen=True)
class _Delta:
    """The pickle's content.

    Attributes:
        attributes: those that have another value.
        tails: by name of a list of token ids, those that were appended; int32.
        clocks: numbers of `time_stats` that have changed.
        has_grammar: it is being decoded under a grammar.
    """

    attributes: dict[str, Any]
    tails: dict[str, bytes]
    clocks: dict[str, float]
    has_grammar: bool


def state_of(req: Any) -> State:
    """Note what a request of stock's (`Req`) is like, to be compared later."""
    plain: dict[str, Any] = {}
    lists: dict[str, tuple[array[int], int]] = {}
    pickles: dict[str, bytes] = {}
    for name, value in vars(req).items():
        if name not in CARRIED or name == _PARAMS:
            continue
        if type(value) in PLAIN:
            plain[name] = value
        elif type(value) is array:
            lists[name] = (value, len(value))
        else:
            pickles[name] = _pickle(value)
    return State(plain, lists, pickles, asdict(req.sampling_params), clocks_of(req))


def delta_of(req: Any, before: State) -> bytes | None:
    """What has changed since; None if it must be packed anew."""
    if req.sampling_params.custom_params is not None or asdict(req.sampling_params) != before.params:
        # Custom parameters can be changed from within, and hold the request itself.
        return None
    attributes: dict[str, Any] = {}
    tails: dict[str, bytes] = {}
    told: set[int] = set()
    there = vars(req)
    if any(name not in there for known in (before.plain, before.lists, before.pickles) for name in known):
        return None
    for name, value in there.items():
        if name not in CARRIED or name == _PARAMS:
            continue
        kind = type(value)
        if kind in PLAIN:
            if name not in before.plain or type(before.plain[name]) is not kind or before.plain[name] != value:
                attributes[name] = value
        elif kind is array:
            was, length = before.lists.get(name, (_NOTHING, 0))
            if was is not value or length > len(was):
                attributes[name] = value
            elif length < len(was) and id(value) not in told:
                tail = narrow(was, length)
                if tail is None:
                    return None
                tails[name] = tail
            # Attributes that are the same list are so at the destination as well.
            told.add(id(value))
        elif before.pickles.get(name) != _pickle(value):
            attributes[name] = value
    clocks = {name: value for name, value in clocks_of(req).items() if before.clocks.get(name) != value}
    return _pickle(_Delta(attributes, tails, clocks, req.grammar is not None))


def apply(before: Unpacked, carried: CarriedRequest) -> Unpacked:
    """Bring a request that was unpacked from its snapshot up to date, in place.

    Raises:
        UnpackError: the delta cannot be read.
    """
    delta = read(carried.rid, carried.delta, _Delta)
    req = before.req
    vars(req).update(delta.attributes)
    for name, tail in delta.tails.items():
        getattr(req, name).extend(wide(tail))
    vars(req.time_stats).update(delta.clocks)
    return Unpacked(req, carried, delta.has_grammar)


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
