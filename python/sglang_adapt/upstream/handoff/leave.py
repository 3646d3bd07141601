"""The source of a hand-over: requests that have their first token are taken out, told of, and held until someone has
them.

Before a batch, when the one before was of prompts and at least one has been read to its end: its results are settled,
so that the first tokens are sent, and the requests leave the batch without a decode step. What they hold stays theirs,
within the lease. Stock sees them nowhere: the patches of `held` ask here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from sglang_adapt.core.handoff import CarriedRequest, RequestKind
from sglang_adapt.upstream.handoff import reading
from sglang_adapt.upstream.handoff.agree import OtherRankFailedError, on_all_ranks
from sglang_adapt.upstream.handoff.batch import join_running
from sglang_adapt.upstream.handoff.export import ExportError, kv_tokens_of, pages_of
from sglang_adapt.upstream.handoff.iteration import before_each_batch
from sglang_adapt.upstream.handoff.pack import pack
from sglang_adapt.upstream.handoff.quiesce import drain, take
from sglang_adapt.upstream.handoff.refusals import reason_to_stay

logger = logging.getLogger(__name__)

Tell = Callable[[Any, list[CarriedRequest], list[int], list[list[int]], float], None]
"""`tell(scheduler, requests, holds, pages, settled_s)`: the requests on rank 0 only, the number by which each is held,
its pages on every rank, and when the last batch was settled, by `time.monotonic`."""


@dataclass
class _Leaving:
    """This process's rank as a source.

    Attributes:
        tell: what is told of requests that leave; None while none do.
        held: those that have left and are held, by number.
        gone: numbers of those of them whose clients have given up, and have been told so.
        last: number.
    """

    tell: Tell | None = None
    held: dict[int, Any] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    last: int = 0


_leaving = _Leaving()


def hand_over(tell: Tell | None) -> None:
    """From the next batch on requests with their first token leave, and are told; None: they stay."""
    _leaving.tell = tell


def held_requests() -> int:
    """Requests that are held; each has a slot."""
    return len(_leaving.held)


def held_tokens(page_size: int) -> int:
    """Tokens in the pages that they hold alone; the others are in the prefix cache, locked."""
    return sum(
        -(-req.kv.kv_allocated_len // page_size) * page_size - req.cache_protected_len for req in _leaving.held.values()
    )


def abort(scheduler: Any, rid: str, abort_all: bool) -> None:
    """Answer the abort of held requests, as stock answers it for those in its queues. What they hold may be read by
    others: it is freed when the router lets go of it."""
    from sglang.srt.managers.io_struct import AbortReq

    for number, req in _leaving.held.items():
        if number not in _leaving.gone and (abort_all or req.rid.startswith(rid)):
            _leaving.gone.add(number)
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)


@before_each_batch
def leave(scheduler: Any) -> bool:
    """Take out what the last batch has read to its end."""
    if _leaving.tell is None:
        return False
    last = scheduler.last_batch
    ended = []
    if last is not None and last.forward_mode.is_extend():
        ended = [req for req in last.reqs if req is not scheduler.chunked_req]
    reading.launched(scheduler, ended)
    gone = _take_out(scheduler, {req.rid for req in ended}) if ended else []
    reading.left(scheduler, gone)
    return bool(ended)


def _take_out(scheduler: Any, ended: Collection[str]) -> list[Any]:
    """Settle the last batch, and take those out that can be handed over; returns them."""
    drain(scheduler)
    settled_s = monotonic()
    reqs = [req for req in scheduler.running_batch.reqs if req.rid in ended and _may_leave(req)]
    if not reqs:
        return []

    def make() -> tuple[list[CarriedRequest], list[list[int]]]:
        tokens = [kv_tokens_of(req, RequestKind.RUNNING) for req in reqs]
        pages = pages_of(scheduler, reqs, tokens)
        if scheduler.ps.tp_rank != 0:
            return [], pages
        return [pack(req, RequestKind.RUNNING, count) for req, count in zip(reqs, tokens, strict=True)], pages

    try:
        requests, pages = on_all_ranks(scheduler, "hand requests over", make)
    except (ExportError, OtherRankFailedError) as error:
        logger.error("%d requests are decoded here, because they cannot be handed over: %s", len(reqs), error)
        return []
    holds = list(range(_leaving.last + 1, _leaving.last + 1 + len(reqs)))
    _leaving.last += len(reqs)
    # Told first: what others say to it is heard after this.
    assert _leaving.tell is not None
    _leaving.tell(scheduler, requests, holds, pages, settled_s)
    rids = {req.rid for req in reqs}
    take(scheduler, lambda req: req.rid in rids)
    _leaving.held |= dict(zip(holds, reqs, strict=True))
    return reqs


def let_go(scheduler: Any, holds: Collection[int]) -> None:
    """Free what held requests hold; what they have read of their prompts is in the prefix cache. Others are ignored."""
    from sglang.srt.mem_cache.common import release_kv_cache

    for number in holds:
        req = _leaving.held.pop(number, None)
        _leaving.gone.discard(number)
        if req is not None:
            release_kv_cache(req, scheduler.tree_cache)
    scheduler.running_batch.batch_is_full = False


def keep(scheduler: Any, holds: Collection[int]) -> list[int]:
    """Let held requests run here, less those given up, which stay held. Returns the numbers of those that run."""
    drain(scheduler)
    back = [number for number in holds if number in _leaving.held and number not in _leaving.gone]
    join_running(scheduler, [_leaving.held.pop(number) for number in back])
    return back


def _may_leave(req: Any) -> bool:
    """It has more to give, its client is there, and its state can be carried."""
    return req.to_finish is None and len(req.output_ids) > 0 and reason_to_stay(req) is None
