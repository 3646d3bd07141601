"""What this process's rank has exported and still answers for: its requests wait for `release` or `restore`.

Held requests keep their slots, KV and cache locks; the pages that are theirs alone are out of the lease. Stock does not
see them in any queue, so the patches here keep it from taking them for a leak, from flushing the cache under them, and
from losing an abort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.upstream.handoff.quiesce import Taken
from sglang_adapt.upstream.patch import Patch

logger = logging.getLogger(__name__)


@dataclass
class Held:
    """An export that is neither released nor restored.

    Attributes:
        epoch: that of the switch.
        taken: the requests.
        pages: those that are out of the lease, ascending.
        aborted: ids of requests that their clients have given up since.
    """

    epoch: int
    taken: Taken
    pages: list[int]
    aborted: set[str] = field(default_factory=set)

    def abort(self, rid: str, abort_all: bool) -> list[str]:
        """Mark requests as given up; returns the ids meant, as stock's `abort_request` understands `rid`."""
        meant = [req.rid for req in self.taken.all if abort_all or req.rid.startswith(rid)]
        self.aborted.update(meant)
        return meant


_held: Held | None = None


def held() -> Held | None:
    return _held


def hold(export: Held) -> None:
    global _held
    _held = export


def let_go() -> None:
    global _held
    _held = None


class HeldSlotsAreNotLost(Patch):
    """Tells stock's leak check of the slots of held requests, as if sessions held them."""

    target = (
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_req_count"
    )
    kind = "after"

    @staticmethod
    def hook(result: int, self: Any) -> int:
        return result if _held is None else result + len(_held.taken.with_kv)


class NoFlushUnderHeldRequests(Patch):
    """Refuses to flush the cache while requests are held: stock sees an idle engine and would free their KV."""

    target = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
        if _held is None:
            return original(self, *args, **kwargs)
        logger.warning("Cache not flushed: requests of epoch %d are on the move from this engine", _held.epoch)
        return False


class AbortsReachHeldRequests(Patch):
    """Notes an abort of a held request; stock finds it nowhere and drops the abort."""

    target = "sglang.srt.managers.scheduler.Scheduler.abort_request"
    kind = "before"

    @staticmethod
    def hook(self: Any, recv_req: Any) -> None:
        if _held is not None:
            _held.abort(recv_req.rid, recv_req.abort_all)


HELD_PATCHES: tuple[type[Patch], ...] = (HeldSlotsAreNotLost, NoFlushUnderHeldRequests, AbortsReachHeldRequests)
