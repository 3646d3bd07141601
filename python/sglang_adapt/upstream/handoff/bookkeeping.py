"""What stock must know of requests on the move, which it sees in no queue: that they are no leak, that the cache must
not be flushed under them, and that their clients may give them up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_adapt.upstream.handoff import arrive, early, leave
from sglang_adapt.upstream.handoff.held import held
from sglang_adapt.upstream.kv_pool import current_pool
from sglang_adapt.upstream.patch import Patch

logger = logging.getLogger(__name__)


class HeldSlotsAreNotLost(Patch):
    """Tells stock's leak check of the slots of held requests, as if sessions held them."""

    target = (
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_req_count"
    )
    kind = "after"

    @staticmethod
    def hook(result: int, self: Any) -> int:
        export = held()
        return result + leave.held_requests() + (0 if export is None else len(export.taken.with_kv))


class HeldTokensAreNotLost(Patch):
    """Tells stock's leak check of the leased pages of requests that wait to be handed over, and of what came ahead."""

    target = (
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens"
    )
    kind = "after"

    @staticmethod
    def hook(result: int, self: Any) -> int:
        size = current_pool().page_size
        return result + leave.held_tokens(size) + early.pages_ahead() * size


class NoFlushUnderHeldRequests(Patch):
    """Refuses to flush the cache while requests are held or come: stock sees an idle engine and would free their KV."""

    target = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
        if held() is None and not (leave.held_requests() or arrive.coming() or early.requests_ahead()):
            return original(self, *args, **kwargs)
        logger.warning("Cache not flushed: requests are on the move from this engine")
        return False


class AbortsReachHeldRequests(Patch):
    """Notes an abort of a request on the move; stock finds it nowhere and drops the abort."""

    target = "sglang.srt.managers.scheduler.Scheduler.abort_request"
    kind = "before"

    @staticmethod
    def hook(self: Any, recv_req: Any) -> None:
        if (export := held()) is not None:
            export.abort(recv_req.rid, recv_req.abort_all)
        leave.abort(self, recv_req.rid, recv_req.abort_all)
        arrive.abort(recv_req.rid, recv_req.abort_all)


BOOKKEEPING_PATCHES: tuple[type[Patch], ...] = (
    HeldSlotsAreNotLost,
    HeldTokensAreNotLost,
    NoFlushUnderHeldRequests,
    AbortsReachHeldRequests,
)
