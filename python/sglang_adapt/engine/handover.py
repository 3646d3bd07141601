"""The entry of single requests, handed over while all engines serve, into one engine rank: the calls and notices of
`core.handover`."""

from __future__ import annotations

from typing import Any

from sglang_adapt.core.handoff import CarriedRequest, to_plain
from sglang_adapt.core.handover import (
    Arrived,
    HandoverAnswer,
    HandoverCall,
    KeepCall,
    LeaveCall,
    LetGoCall,
    Prefilled,
    TakeOverCall,
)
from sglang_adapt.core.laps import Laps
from sglang_adapt.engine.copying import KvCopies
from sglang_adapt.upstream.control import at_rank_0, notify
from sglang_adapt.upstream.handoff import arrive, leave


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
            AdoptError, UnpackError, GrammarError, OtherRankFailedError, CopyRefusedError, PlanError: of a TakeOverCall;
                nothing has changed.
        """
        laps = Laps()
        match call:
            case LeaveCall():
                leave.hand_over(_tell if call.on else None)
            case TakeOverCall():
                arrive.take_over(
                    self._scheduler,
                    call.requests,
                    lambda pages, after: self._copies.pull(call.requests, call.sources, pages, after),
                    lambda rids: notify(self._scheduler, to_plain(Arrived(rids))),
                    laps,
                )
            case LetGoCall():
                leave.let_go(self._scheduler, call.holds)
                laps.lap("let go")
            case KeepCall():
                kept = leave.keep(self._scheduler, call.holds)
                laps.lap("keep")
                return HandoverAnswer(kept, laps.ms)
        return HandoverAnswer(steps_ms=laps.ms)


def _tell(scheduler: Any, requests: list[CarriedRequest], holds: list[int], pages: list[list[int]]) -> None:
    """Tell the router which requests have left, with the blocks of all ranks."""
    ranks = at_rank_0(scheduler, pages)
    if ranks is not None:
        blocks = [[rank[at] for rank in ranks] for at in range(len(requests))]
        notify(scheduler, to_plain(Prefilled(requests, holds, blocks)))
