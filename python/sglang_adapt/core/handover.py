"""Messages that hand single requests over from an engine that prefills to one that decodes, while both serve.

The source says of itself that requests have their first token (`Prefilled`); the destination takes them up
(`TakeOverCall`) and says when their KV is there and they run (`Arrived`); the source forgets them (`LetGoCall`), or
goes on with them itself (`KeepCall`). Leases do not change: a source's blocks stay its own until it lets go, a
destination takes blocks out of its own lease. All ranks of an engine get a call in the same iteration.
"""

from __future__ import annotations

import msgspec

from sglang_adapt.core.handoff import CarriedRequest, KvSource


class LeaveCall(msgspec.Struct, frozen=True, tag=True):
    """To a source: from now on hand over, or do not hand over, what has its first token. What is held stays held."""

    on: bool


class TakeOverCall(msgspec.Struct, frozen=True, tag=True):
    """To a destination: make room for requests, bring their KV, and let them run.

    Attributes:
        requests: from `Prefilled`.
        sources: for each where its KV lies, which nobody changes until all of them have `Arrived`.
    """

    requests: list[CarriedRequest]
    sources: list[KvSource]


class LetGoCall(msgspec.Struct, frozen=True, tag=True):
    """To a source: these live elsewhere, or are given up; free what they hold.

    Attributes:
        holds: as in `Prefilled`.
    """

    holds: list[int]


class KeepCall(msgspec.Struct, frozen=True, tag=True):
    """To a source: go on with these, less those given up meanwhile.

    Attributes:
        holds: as in `Prefilled`.
    """

    holds: list[int]


class HandoverAnswer(msgspec.Struct, frozen=True):
    """One rank's answer to any of the calls.

    Attributes:
        kept: of a KeepCall those that run again.
        steps_ms: how long the rank took for what, in milliseconds.
    """

    kept: list[int] = []
    steps_ms: dict[str, float] = {}


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """From a source: these have their first token, which has been sent, and are held.

    Attributes:
        requests: of kind RUNNING.
        holds: for each the number by which it is held, unique in the life of the engine. Its id is not: a request
            whose taker has died may come back while it is held still.
        blocks: for each request, by rank of the engine, its blocks in token order.
    """

    requests: list[CarriedRequest]
    holds: list[int]
    blocks: list[list[list[int]]]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """From a destination: the KV of these is there, on all ranks, and they run."""

    rids: list[str]


HandoverCall = LeaveCall | TakeOverCall | LetGoCall | KeepCall
HandoverNotice = Prefilled | Arrived
