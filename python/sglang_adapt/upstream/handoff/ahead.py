"""The destination of a move, ahead of it: requests made from their snapshots, and the pages their KV was copied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.core.laps import Laps
from sglang_adapt.upstream.handoff.agree import on_all_ranks
from sglang_adapt.upstream.handoff.delta import apply
from sglang_adapt.upstream.handoff.pack import Unpacked, UnpackError, unpack


class Ahead:
    """What has come to this rank before the requests themselves, of one epoch."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._there: dict[str, tuple[Unpacked, list[int]]] = {}

    @classmethod
    def bring(
        cls,
        scheduler: Any,
        epoch: int,
        requests: Sequence[CarriedRequest],
        blocks: Sequence[Sequence[int]],
        laps: Laps,
        start_copy: Callable[[], Callable[[], None]] | None,
    ) -> Ahead:
        """Make requests from their snapshots while their KV is copied; returns when it is there, on all ranks.

        Args:
            blocks: for each request this rank's pages for the tokens in `ahead`.
            start_copy: as in `adopt`.

        Raises:
            UnpackError: naming the request.
            OtherRankFailedError: another rank raised that.
            Exception: whatever `start_copy` raises.
            After each of them nothing is being copied.
        """
        copies: list[Callable[[], None]] = []

        def make() -> Ahead:
            if start_copy is not None:
                copies.append(start_copy())
            laps.lap("start copy")
            ahead = cls(epoch)
            for carried, pages in zip(requests, blocks, strict=True):
                ahead._there[carried.rid] = (unpack(carried, scheduler), list(pages))
            laps.lap("make")
            return ahead

        try:
            return on_all_ranks(scheduler, "copy ahead", make)
        finally:
            for wait in copies:
                wait()
            laps.lap("wait for copy")

    def take(self, carried: CarriedRequest, scheduler: Any, epoch: int) -> tuple[Unpacked, list[int]]:
        """A request of this engine from its message, with what came ahead of it if the message says so, once: the
        request, and its first pages.

        Raises:
            UnpackError: the state cannot be read, or what should have come ahead has not.
        """
        if carried.state and not carried.ahead:
            return self._up_to_date(unpack(carried, scheduler), carried), []
        there = self._there.pop(carried.rid, None) if self.epoch == epoch else None
        if there is None:
            raise UnpackError(
                f"request {carried.rid}: what should have been copied ahead in epoch {epoch} is not there"
            )
        unpacked, pages = there
        if carried.state:
            return unpack(carried, scheduler), pages
        return self._up_to_date(unpacked, carried), pages if carried.ahead else []

    def _up_to_date(self, unpacked: Unpacked, carried: CarriedRequest) -> Unpacked:
        return apply(unpacked, carried) if carried.delta else Unpacked(unpacked.req, carried, unpacked.has_grammar)
