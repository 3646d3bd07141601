"""Messages that hand single requests over from an engine that prefills to one that decodes, while both serve.

The source says of itself that requests have their first token (`Prefilled`); the destination takes them up
(`TakeOverCall`) and says when their KV is there and they run (`Arrived`), or that it has not come (`NotArrived`, where
GPUs have no peer access); the source forgets them (`LetGoCall`), or
goes on with them itself (`KeepCall`). Leases do not change: a source's blocks stay its own until it lets go, a
destination takes blocks out of its own lease. All ranks of an engine get a call in the same iteration.

While a prompt is read, the source says so (`PartRead`), and of one that is read in parts, which are done; the
destination makes room for the request and brings its KV ahead (`AheadCall`). What it has so far it knows best: a
TakeOverCall has all blocks of the source and the number of what went ahead, and the destination copies what it has
not. It may give up what came ahead when its own requests need the blocks, and is told to when nothing follows
(`ForgetCall`).
"""

from __future__ import annotations

import msgspec

from sglang_adapt.core.handoff import CarriedRequest, KvSource


class LeaveCall(msgspec.Struct, frozen=True, tag=True):
    """To a source: from now on hand over, or do not hand over, what has its first token. What is held stays held.

    Attributes:
        unit: parts of prompts are told in multiples of so many tokens: whole blocks at every TP size. 0: not told.
    """

    on: bool
    unit: int = 0


class TakeOverCall(msgspec.Struct, frozen=True, tag=True):
    """To a destination: make room for requests, bring their KV, and let them run.

    Attributes:
        requests: from `Prefilled`.
        sources: for each where its KV lies, which nobody changes until all of them have `Arrived`.
        ahead: for each the number of its AheadCalls, 0 if there were none.
    """

    requests: list[CarriedRequest]
    sources: list[KvSource]
    ahead: list[int]


class AheadCall(msgspec.Struct, frozen=True, tag=True):
    """To a destination: make room for a request that is being read elsewhere, and begin to bring the KV of a part.

    Attributes:
        number: of the request's way here, the same for all its parts, unique in the life of the router.
        rid: of the request.
        first, end: the part is tokens `first` to `end - 1`, both multiples of `LeaveCall.unit`; `first` is where the
            part before ended. The first one may be empty.
        tokens: that the request will have when it is handed over: there must be room for all of them.
        source: where the part lies, blocks from `first` on.
    """

    number: int
    rid: str
    first: int
    end: int
    tokens: int
    source: KvSource


class ForgetCall(msgspec.Struct, frozen=True, tag=True):
    """To a destination: nothing follows what came ahead by these numbers; its blocks are free when this is answered,
    and nothing is copied into them any more. Numbers that it does not know are ignored.
    """

    numbers: list[int]


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
        ahead_tokens: of a TakeOverCall, how many tokens had come ahead.
        steps_ms: how long the rank took for what, in milliseconds.
    """

    kept: list[int] = []
    ahead_tokens: int = 0
    steps_ms: dict[str, float] = {}


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """From a source: these have their first token, which has been sent, and are held.

    Attributes:
        requests: of kind RUNNING.
        holds: for each the number by which it is held, unique in the life of the engine. Its id is not: a request
            whose taker has died may come back while it is held still.
        blocks: for each request, by rank of the engine, its blocks in token order.
        settled_s: when their batch was settled, by `time.monotonic`, a clock that all processes of a machine share.
    """

    requests: list[CarriedRequest]
    holds: list[int]
    blocks: list[list[list[int]]]
    settled_s: float = 0.0


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """From a destination: the KV of these is there, on all ranks, and they run.

    Attributes:
        ran_s: since when, by `time.monotonic`.
        steps_ms: what took how long from the answer to the TakeOverCall until then, in milliseconds.
    """

    rids: list[str]
    ran_s: float = 0.0
    steps_ms: dict[str, float] = {}


class NotArrived(msgspec.Struct, frozen=True, tag=True):
    """From a destination: the KV of these has not come, because who sends it is gone or silent. They are not on the
    engine any more, and nothing is copied.

    Attributes:
        aborted: of these, those that their clients have given up meanwhile.
        why: of the first rank that knows.
    """

    rids: list[str]
    aborted: list[str]
    why: str


class PartRead(msgspec.Struct, frozen=True, tag=True):
    """From a source: a prompt is being read, or more of it is done. The blocks hold it until the request ends or is let
    go, whatever else the engine does.

    Attributes:
        rid: of the request.
        first: how many tokens have been told before.
        end: how many are done, a multiple of `LeaveCall.unit`; those of a prompt that has just begun are in the cache.
        length: tokens that it will have when it is handed over: the prompt and one more.
        most_tokens: the most it may come to have.
        blocks: by rank of the engine, of tokens `first` to `end - 1`, in token order.
    """

    rid: str
    first: int
    end: int
    length: int
    most_tokens: int
    blocks: list[list[int]]


class PartsStay(msgspec.Struct, frozen=True, tag=True):
    """From a source: of these parts were told, and they are not handed over."""

    rids: list[str]


HandoverCall = LeaveCall | TakeOverCall | LetGoCall | KeepCall | AheadCall | ForgetCall
HandoverNotice = Prefilled | Arrived | NotArrived | PartRead | PartsStay
