"""What has changed of a request since its state was packed: a few numbers and tokens, where the whole is kilobytes.

Exact by construction: every attribute that is carried is compared with what it was. Values that cannot change are
compared by identity, and if that differs by value; lists of token ids, which stock only appends to, by identity and
length; all else by its pickle.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import compress
from operator import is_not, itemgetter
from typing import Any, NamedTuple

from msgspec.structs import astuple

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.upstream.handoff.pack import Unpacked, UnpackError, read
from sglang_adapt.upstream.handoff.state import CARRIED, PLAIN

_PARAMS = "sampling_params"
_NUMBERS = (int, float)


@dataclass(frozen=True)
class State:
    """A request as it was when it was packed.

    Attributes:
        names: all its attributes, in order.
        carried: those of them that are carried, less the sampling parameters.
        read: takes their values out of all of a request's.
        values: what they were.
        inside: by place in `values`, what can change without being replaced: of a list of token ids its length then, of
            any other object its pickle.
        params: the values of the sampling parameters.
        clocks: all that its `time_stats` had.
    """

    names: tuple[str, ...]
    carried: tuple[str, ...]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    inside: dict[int, int | bytes]
    params: tuple[Any, ...]
    clocks: dict[str, Any]


class _Delta(NamedTuple):
    """What the pickle has, as a plain tuple, which is read in half the time.

    Attributes:
        attributes: those that have another value.
        tails: by name of a list of token ids, those that were appended; int64.
        clocks: numbers of `time_stats` that have changed.
        has_grammar: it is being decoded under a grammar.
    """

    attributes: dict[str, Any]
    tails: dict[str, bytes]
    clocks: dict[str, float]
    has_grammar: bool


def state_of(req: Any) -> State:
    """Note what a request of stock's (`Req`) is like, to be compared later."""
    there = vars(req)
    names = tuple(there)
    carried, read = _carried(names)
    values = read(there)
    inside = {
        at: len(value) if type(value) is array else _pickle(value)
        for at, value in enumerate(values)
        if type(value) not in PLAIN and not isinstance(value, Enum)
    }
    return State(names, carried, read, values, inside, astuple(req.sampling_params), dict(vars(req.time_stats)))


def delta_of(req: Any, before: State) -> bytes | None:
    """What has changed since; None if it must be packed anew."""
    params = req.sampling_params
    if params.custom_params is not None or astuple(params) != before.params:
        # Custom parameters can be changed from within, and hold the request itself.
        return None
    there = vars(req)
    names = before.carried
    attributes: dict[str, Any] = {}
    if tuple(there) != before.names:
        if not there.keys() >= set(names):
            return None
        new = CARRIED & (there.keys() - set(before.names)) - {_PARAMS}
        attributes = {name: there[name] for name in new}
    tails: dict[str, bytes] = {}
    told: set[int] = set()
    now = before.read(there)
    for at in compress(range(len(now)), map(is_not, now, before.values)):
        if at not in before.inside:
            value, was = now[at], before.values[at]
            if type(value) not in PLAIN or type(was) is not type(value) or was != value:
                attributes[names[at]] = value
    for at, then in before.inside.items():
        name, value = names[at], now[at]
        if type(value) is not array:
            if type(value) in PLAIN or then != _pickle(value):
                attributes[name] = value
            continue
        if value is not before.values[at] or not isinstance(then, int) or then > len(value):
            attributes[name] = value
        elif then < len(value) and id(value) not in told:
            tails[name] = value[then:].tobytes()
        # Attributes that are the same list are so at the destination as well.
        told.add(id(value))
    return _pickle(tuple(_Delta(attributes, tails, _clocks(req, before), req.grammar is not None)))


def apply(before: Unpacked, carried: CarriedRequest) -> Unpacked:
    """Bring a request that was unpacked from its snapshot up to date, in place.

    Raises:
        UnpackError: the delta cannot be read.
    """
    content = read(carried.rid, carried.delta, tuple)
    if len(content) != len(_Delta._fields):
        raise UnpackError(f"request {carried.rid}: what has changed of it is not that of a request")
    delta = _Delta(*content)
    req = before.req
    vars(req).update(delta.attributes)
    for name, tail in delta.tails.items():
        getattr(req, name).frombytes(tail)
    vars(req.time_stats).update(delta.clocks)
    return Unpacked(req, carried, delta.has_grammar)


def _clocks(req: Any, before: State) -> dict[str, float]:
    then = before.clocks
    return {
        name: value
        for name, value in vars(req.time_stats).items()
        if value is not then.get(name) and type(value) in _NUMBERS and then.get(name) != value
    }


@lru_cache(maxsize=16)
def _carried(names: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Of the attributes of a request those that are carried, less the sampling parameters, and what reads them."""
    mine = tuple(name for name in names if name in CARRIED and name != _PARAMS)
    return mine, itemgetter(*mine)


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
