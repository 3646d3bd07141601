"""The destination of a hand-over: pages of the lease, the copy into them while the engine runs on, and a place in the
next batch after it.

Taken up in the dispatcher, on all ranks in the same iteration: what can fail comes first. The copy starts after the
batch in flight, because a page may just have been left by a request that this batch still computes. An engine that runs
something goes on meanwhile, and lets the requests in before the batch after the next; an idle one waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.core.laps import Laps
from sglang_adapt.kv.lanes import NOW, Mark
from sglang_adapt.upstream.handoff.adopt import AdoptError, Arrival, check_fits, seat
from sglang_adapt.upstream.handoff.agree import on_all_ranks
from sglang_adapt.upstream.handoff.batch import join_running
from sglang_adapt.upstream.handoff.grammar import rebuild_grammar
from sglang_adapt.upstream.handoff.iteration import before_each_batch
from sglang_adapt.upstream.handoff.pack import Unpacked, unpack
from sglang_adapt.upstream.handoff.quiesce import requests_of
from sglang_adapt.upstream.kv_lease import EngineLease

StartCopy = Callable[[list[list[int]], Mark], Callable[[], None]]
"""`start_copy(pages, after)`: begins, after a mark, to bring the KV of each request into these pages of this rank; what
it returns waits for the end."""


@dataclass
class _Coming:
    """Requests whose KV is being copied.

    Attributes:
        wait: for the copy.
        landed: called when they run, with their ids.
        due: they get in before the next batch.
    """

    arrivals: list[Arrival]
    wait: Callable[[], None]
    landed: Callable[[list[str]], None]
    due: bool


_coming: list[_Coming] = []
_aborted: list[tuple[str, bool]] = []


def abort(rid: str, abort_all: bool) -> None:
    """An abort has come: requests that do not run yet are aborted when they do."""
    if any(abort_all or one.req.rid.startswith(rid) for coming in _coming for one in coming.arrivals):
        _aborted.append((rid, abort_all))


def take_over(
    scheduler: Any,
    requests: Sequence[CarriedRequest],
    start_copy: StartCopy,
    landed: Callable[[list[str]], None],
    laps: Laps,
) -> None:
    """Make room for requests and begin to bring their KV.

    Args:
        requests: of kind RUNNING.
        landed: called when their KV is there on all ranks, and they run.
        laps: gets the time of each step.

    Raises:
        AdoptError: no room or no slot; or a request that is here already, or is too long.
        UnpackError, GrammarError, OtherRankFailedError: likewise nothing has changed.
        Exception: whatever `start_copy` raises; the same.
    """
    size = scheduler.page_size
    counts = [-(-request.kv_tokens // size) for request in requests]

    def make() -> list[Unpacked]:
        _check_room(scheduler, len(requests), sum(counts))
        return [_make(scheduler, request) for request in requests]

    made = on_all_ranks(scheduler, "take requests over", make)
    laps.lap("make")
    pages = _allocate(scheduler, counts)
    try:
        wait = on_all_ranks(scheduler, "start the copy", lambda: start_copy(pages, _after_batch(scheduler)))
    except Exception:
        _free(scheduler, pages)
        raise
    laps.lap("start copy")
    arrivals = [Arrival(unpacked, mine, runs=True) for unpacked, mine in zip(made, pages, strict=True)]
    idle = scheduler.last_batch is None or scheduler.running_batch.is_empty()
    _coming.append(_Coming(arrivals, wait, landed, due=idle))


@before_each_batch
def land(scheduler: Any) -> bool:
    """Let requests in whose copy had a batch to run beside."""
    due = [coming for coming in _coming if coming.due or scheduler.last_batch is None]
    if not due:
        for coming in _coming:
            coming.due = True
        return False
    _coming[:] = [coming for coming in _coming if coming not in due]
    for coming in _coming:
        coming.due = True

    def wait() -> None:
        for coming in due:
            coming.wait()

    on_all_ranks(scheduler, "copy", wait)
    arrivals = [arrival for coming in due for arrival in coming.arrivals]
    seat(scheduler, arrivals)
    join_running(scheduler, [arrival.req for arrival in arrivals])
    for coming in due:
        coming.landed([arrival.req.rid for arrival in coming.arrivals])
    if _aborted:
        _carry_out_aborts(scheduler)
    return True


def _carry_out_aborts(scheduler: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    aborts, _aborted[:] = list(_aborted), []
    for rid, abort_all in aborts:
        if any(abort_all or one.req.rid.startswith(rid) for coming in _coming for one in coming.arrivals):
            _aborted.append((rid, abort_all))
        scheduler.abort_request(AbortReq(rid=rid, abort_all=abort_all))


def _make(scheduler: Any, carried: CarriedRequest) -> Unpacked:
    """A request of this engine, with its grammar; nothing changes but the cache of grammars."""
    there = {req.rid for req in requests_of(scheduler)}
    if carried.rid in there or any(one.req.rid == carried.rid for coming in _coming for one in coming.arrivals):
        raise AdoptError(f"request {carried.rid} is on this engine already")
    check_fits(scheduler, carried, range(-(-carried.kv_tokens // scheduler.page_size)))
    unpacked = unpack(carried, scheduler)
    if unpacked.has_grammar:
        rebuild_grammar(scheduler, unpacked.req)
    return unpacked


def _check_room(scheduler: Any, requests: int, pages: int) -> None:
    """Raises AdoptError if slots or pages are short; each request that runs may need one more page soon."""
    coming = sum(len(one.arrivals) for one in _coming)
    running = len(scheduler.running_batch.reqs)
    slots = min(len(scheduler.req_to_token_pool.free_slots) - coming, scheduler.max_running_requests - running - coming)
    if requests > slots:
        raise AdoptError(f"{requests} requests are to be taken over, there are slots for {max(0, slots)}")
    spare = EngineLease.of(scheduler).spare_pages
    needed = pages + running + coming + requests
    if needed > spare:
        raise AdoptError(f"{needed} blocks are needed to take requests over and go on, {spare} can be had")


def _allocate(scheduler: Any, counts: Sequence[int]) -> list[list[int]]:
    """Pages of the lease for each request, after `_check_room`."""
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    size, total = scheduler.page_size, sum(counts)
    allocator = scheduler.token_to_kv_pool_allocator
    evict_from_tree_cache(scheduler.tree_cache, total * size)
    rows = allocator.alloc(total * size)
    if rows is None:
        raise RuntimeError(f"{total} pages were there and could not be had")
    pages: list[int] = (rows[::size] // size).tolist()
    return [pages[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def _free(scheduler: Any, pages: Sequence[Sequence[int]]) -> None:
    from sglang_adapt.upstream.handoff.adopt import slots_of

    flat = [page for mine in pages for page in mine]
    scheduler.token_to_kv_pool_allocator.free(slots_of(scheduler, flat))


def _after_batch(scheduler: Any) -> Mark:
    """Reached when the batch in flight, if there is one, is computed."""
    if scheduler.device == "cpu" or not scheduler.enable_overlap:
        return NOW
    import torch

    event = torch.cuda.Event()
    event.record(scheduler.forward_stream)
    return Mark(event)
