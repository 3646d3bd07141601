"""The entry of single requests, handed over while all engines serve, into one engine rank: the calls and notices of
`core.handover`."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_adapt.core.handoff import CarriedRequest, to_plain
from sglang_adapt.core.handover import (
    AheadCall,
    Arrived,
    ForgetCall,
    HandoverAnswer,
    HandoverCall,
    KeepCall,
    LeaveCall,
    LetGoCall,
    NotArrived,
    PartRead,
    PartsStay,
    Prefilled,
    TakeOverCall,
)
from sglang_adapt.core.laps import Laps
from sglang_adapt.engine.copying import KvCopies, Pull, Pulled
from sglang_adapt.kv.lanes import Mark
from sglang_adapt.upstream.awake import stay_awake
from sglang_adapt.upstream.control import at_rank_0, notify
from sglang_adapt.upstream.handoff import arrive, early, leave, reading
from sglang_adapt.upstream.handoff.soon import expect_nothing


class EngineHandover:
    """One rank's part in hand-overs.

    Args:
        scheduler: stock's, of an engine whose requests can be moved (`EngineHandoff`).
        copies: brings KV onto this rank's GPU.
    """

    def __init__(self, scheduler: Any, copies: KvCopies) -> None:
        self._scheduler = scheduler
        self._copies = copies

    def answer(self, call: HandoverCall) -> HandoverAnswer:
        """Carry out one call.

        Raises:
            AdoptError, UnpackError, GrammarError, OtherRankFailedError, CopyRefusedError, PlanError: of a TakeOverCall
                or an AheadCall; nothing has changed.
        """
        laps = Laps()
        match call:
            case LeaveCall():
                # Who hands over looks at what the batch in flight has read.
                expect_nothing()
                leave.hand_over(_tell if call.on else None)
                if call.on and call.unit:
                    reading.tell_parts(call.unit, _tell_part, _tell_staying)
                else:
                    reading.tell_no_parts()
            case TakeOverCall():
                came = arrive.take_over(
                    self._scheduler,
                    call.requests,
                    call.ahead,
                    lambda pages, first, after: self._pull(call, pages, first, after),
                    lambda rids, ran_s, steps: notify(self._scheduler, to_plain(Arrived(rids, ran_s, steps))),
                    lambda rids, aborted, why: _tell_lost(self._scheduler, rids, aborted, why),
                    laps,
                )
                return HandoverAnswer(ahead_tokens=came, steps_ms=laps.ms)
            case AheadCall():
                stay_awake(self._scheduler)
                arrive.bring_ahead(
                    self._scheduler,
                    call,
                    lambda pages, after: self._copies.pull(
                        [Pull(call.rid, call.first, call.end, call.source, pages)], after, ahead=True
                    ),
                )
                laps.lap("start copy")
            case ForgetCall():
                early.forget(self._scheduler, call.numbers)
                laps.lap("forget")
            case LetGoCall():
                leave.let_go(self._scheduler, call.holds)
                laps.lap("let go")
            case KeepCall():
                kept = leave.keep(self._scheduler, call.holds)
                laps.lap("keep")
                return HandoverAnswer(kept, steps_ms=laps.ms)
        return HandoverAnswer(steps_ms=laps.ms)

    def _pull(self, call: TakeOverCall, pages: list[list[int]], first: list[int], after: Mark) -> Pulled:
        """Begin to bring what has not come ahead."""
        pulls = [
            Pull(request.rid, begin, request.kv_tokens, self._copies.from_token(source, begin), mine)
            for request, source, begin, mine in zip(call.requests, call.sources, first, pages, strict=True)
        ]
        return self._copies.pull(pulls, after)


def _tell(
    scheduler: Any, requests: list[CarriedRequest], holds: list[int], pages: list[list[int]], settled_s: float
) -> None:
    """Tell the router which requests have left, with the blocks of all ranks."""
    ranks = at_rank_0(scheduler, pages)
    if ranks is not None:
        blocks = [[rank[at] for rank in ranks] for at in range(len(requests))]
        notify(scheduler, to_plain(Prefilled(requests, holds, blocks, settled_s)))


def _tell_lost(scheduler: Any, rids: list[str], aborted: list[str], why: str | None) -> None:
    """Tell the router that the KV of requests has not come, with the reason of a rank that has one."""
    reasons = at_rank_0(scheduler, why)
    if reasons is not None:
        first = next(reason for reason in reasons if reason is not None)
        notify(scheduler, to_plain(NotArrived(rids, aborted, first)))


def _tell_part(scheduler: Any, part: PartRead) -> None:
    """Tell the router which part of a prompt has been read, with the blocks of all ranks."""
    ranks = at_rank_0(scheduler, part.blocks[0])
    if ranks is not None:
        notify(scheduler, to_plain(msgspec.structs.replace(part, blocks=ranks)))


def _tell_staying(scheduler: Any, rids: list[str]) -> None:
    notify(scheduler, to_plain(PartsStay(rids)))
