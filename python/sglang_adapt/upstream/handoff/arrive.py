"""The destination of a hand-over: pages of the lease, the copy into them while the engine runs on, and a place in the
next batch after it. What has come ahead (`early`) is not copied again.

Taken up in the dispatcher, on all ranks in the same iteration: what can fail comes first. The copy starts after the
batch in flight, because a page may just have been left by a request that this batch still computes; where room was made
ahead, at once. Nobody waits for it but the batch that the requests are in, on the GPU: the host makes that batch
meanwhile. An idle engine lets them in at once, and so does a busy one if little is to be copied; else it lets them in
before the batch after the next, so that what runs need not wait. The batch after that the copy has ended, and it is
told.

A copy that is the work of other processes (`UnderWay.by_host`) may fail, and no stream waits for it. Its requests get
in when it has ended on all ranks; an engine with nothing else to do waits for that. If it has failed on one, they are
lost to this engine, which says so; their pages are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import monotonic
from typing import Any

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.core.handover import AheadCall
from sglang_adapt.core.laps import Laps
from sglang_adapt.kv.lanes import NOW, Mark
from sglang_adapt.upstream.awake import awake_while
from sglang_adapt.upstream.handoff import early
from sglang_adapt.upstream.handoff.adopt import AdoptError, Arrival, check_fits, seat
from sglang_adapt.upstream.handoff.agree import UnderWay, on_all_ranks, start_on_all_ranks, true_on_all_ranks
from sglang_adapt.upstream.handoff.batch import join_running
from sglang_adapt.upstream.handoff.grammar import rebuild_grammar
from sglang_adapt.upstream.handoff.iteration import before_each_batch
from sglang_adapt.upstream.handoff.pack import Unpacked, unpack
from sglang_adapt.upstream.handoff.quiesce import requests_of
from sglang_adapt.upstream.kv_lease import EngineLease

AT_ONCE = 2048
"""So many tokens of the requests of a call, less what came ahead, may hold up the next batch of an engine that runs
something: a millisecond at most, and nothing where the copy runs beside the batch in flight."""

StartCopy = Callable[[list[list[int]], list[int], Mark], UnderWay]
"""`start_copy(pages, first, after)`: begins, after a mark, to bring the KV of each request, from its token `first` on,
into these pages of this rank, of which the first holds that token."""

Landed = Callable[[list[str], float, dict[str, float]], None]
"""`landed(rids, ran_s, steps_ms)`: the KV of requests is there; since when they run, and what that took."""


Lost = Callable[[list[str], list[str], str | None], None]
"""`lost(rids, aborted, why)`: on all ranks, the KV of requests has not come, and they are not here any more; which of
them their clients have given up meanwhile; why, on the ranks that know."""


@dataclass
class _Coming:
    """Requests whose KV is being copied.

    Attributes:
        copies: of their KV.
        landed: called when they run and their KV is there.
        lost: called when it has not come.
        due: they get in before the next batch.
        laps: since they were taken over.
        ran_s: when they got in, by `time.monotonic`.
    """

    arrivals: list[Arrival]
    copies: list[UnderWay]
    landed: Landed
    lost: Lost
    due: bool
    laps: Laps
    ran_s: float = 0.0

    @property
    def reqs(self) -> list[Any]:
        return [arrival.req for arrival in self.arrivals]

    @property
    def rids(self) -> list[str]:
        return [arrival.req.rid for arrival in self.arrivals]

    @property
    def by_host(self) -> bool:
        """As of its copies."""
        return any(copy.by_host for copy in self.copies)

    @property
    def ended(self) -> bool:
        """Has the work of processes ended?"""
        return all(copy.ended for copy in self.copies)

    @property
    def fault(self) -> str | None:
        """Why it has failed here."""
        return next((copy.fault for copy in self.copies if copy.fault is not None), None)

    def wait(self) -> None:
        """Until nothing is being copied."""
        for copy in self.copies:
            copy.wait()


_coming: list[_Coming] = []
_let_in: list[_Coming] = []
"""Those that run, by a batch that waits for their KV, and of which it has not been told that it is there."""
_aborted: list[tuple[str, bool]] = []


@awake_while
def some_come() -> bool:
    """Somebody's KV is being copied: the turn in which they get in needs no message."""
    return bool(_coming)


def coming() -> int:
    """Requests whose KV is being copied, and that do not run yet."""
    return sum(len(one.arrivals) for one in _coming)


def abort(rid: str, abort_all: bool) -> None:
    """An abort has come: requests that do not run yet are aborted when they do."""
    if _names_one((rid, abort_all), [rid for one in _coming for rid in one.rids]):
        _aborted.append((rid, abort_all))


def take_over(
    scheduler: Any,
    requests: Sequence[CarriedRequest],
    ahead: Sequence[int],
    start_copy: StartCopy,
    landed: Landed,
    lost: Lost,
    laps: Laps,
) -> int:
    """Make room for requests and begin to bring what has not come ahead of their KV. Returns how many tokens had.

    Args:
        requests: of kind RUNNING.
        ahead: for each the number by which parts of it came ahead, or 0.
        landed: called when they run, and their KV is there on all ranks.
        lost: called if a copy has failed on one, by which they are gone from here.
        laps: gets the time of each step.

    Raises:
        AdoptError: no room or no slot; or a request that is here already, or is too long.
        UnpackError, GrammarError, OtherRankFailedError: likewise nothing has changed.
        Exception: whatever `start_copy` raises; the same. But what came ahead of other requests may be given up.
    """
    size = scheduler.page_size
    there = [early.of(number, request.rid) for number, request in zip(ahead, requests, strict=True)]
    needed = [-(-request.kv_tokens // size) for request in requests]
    counts = [max(0, count - len(one.pages)) for count, one in zip(needed, there, strict=True)]
    early.give_up(scheduler, sum(counts) + _needed_soon(scheduler, len(requests)), keep=ahead)

    def make() -> list[Unpacked]:
        _check_room(scheduler, len(requests), sum(counts))
        return [_make(scheduler, request) for request in requests]

    made = on_all_ranks(scheduler, "take requests over", make)
    laps.lap("make")
    pages = _allocate(scheduler, counts)
    first = [one.tokens for one in there]
    ready = not any(counts) and not any(one.fresh for one in there)
    after = NOW if ready else _after_batch(scheduler)
    whole = [[*one.pages, *mine][:count] for one, mine, count in zip(there, pages, needed, strict=True)]
    rest = [mine[begin // size :] for mine, begin in zip(whole, first, strict=True)]
    try:
        copy = start_on_all_ranks(scheduler, "start the copy", lambda: start_copy(rest, first, after))
    except Exception:
        early.free(scheduler, [page for mine in pages for page in mine])
        raise
    laps.lap("start copy")
    early.take(ahead)
    early.free(scheduler, [page for one, count in zip(there, needed, strict=True) for page in one.pages[count:]])
    arrivals = [Arrival(unpacked, mine, runs=True) for unpacked, mine in zip(made, whole, strict=True)]
    idle = scheduler.last_batch is None or scheduler.running_batch.is_empty()
    little = sum(request.kv_tokens for request in requests) - sum(first) <= AT_ONCE
    copies = [*(before for one in there for before in one.copies), copy]
    _coming.append(_Coming(arrivals, copies, landed, lost, idle or little, Laps()))
    return sum(first)


def bring_ahead(scheduler: Any, call: AheadCall, start_copy: Callable[[list[int], Mark], UnderWay]) -> None:
    """Make room for a request that is read elsewhere, and begin to bring the KV of a part. Raises as `early.bring`."""
    after = _after_batch(scheduler)
    early.bring(
        scheduler, call, lambda pages, fresh: start_copy(pages, after if fresh else NOW), _needed_soon(scheduler, 1)
    )


@before_each_batch
def land(scheduler: Any) -> bool:
    """Let requests in that are due, and tell of those that were let in before."""
    before, _let_in[:] = list(_let_in), []
    due = [one for one in _coming if one.due or scheduler.last_batch is None]
    for one in _coming:
        one.due = True
    due = [one for one in due if _has_come(scheduler, one)]
    _coming[:] = [one for one in _coming if one not in due]
    lost = [one for one in due if one.by_host and not true_on_all_ranks(scheduler, one.fault is None)]
    due = [one for one in due if one not in lost]
    staying = [rid for one in (*_coming, *due) for rid in one.rids]
    for one in lost:
        _lose(scheduler, one, staying)
    if due:
        _seat(scheduler, due)
    if before:
        _tell(scheduler, before)
    return bool(due)


def _has_come(scheduler: Any, one: _Coming) -> bool:
    """May requests get in, as far as the work of processes goes?"""
    if not one.by_host:
        return True
    if scheduler.last_batch is None:
        one.wait()
    return true_on_all_ranks(scheduler, one.ended)


def _lose(scheduler: Any, one: _Coming, staying: Sequence[str]) -> None:
    """Requests whose KV has not come on all ranks: as if they had never been here. `staying`: ids of all others that do
    not run yet."""
    one.wait()
    early.free(scheduler, [page for arrival in one.arrivals for page in arrival.pages])
    # Stock may have found no room before.
    scheduler.running_batch.batch_is_full = False
    aborted = [rid for rid in one.rids if any(_names_one(abort, [rid]) for abort in _aborted)]
    _aborted[:] = [abort for abort in _aborted if _names_one(abort, staying)]
    one.lost(one.rids, aborted, one.fault)


def _names_one(abort: tuple[str, bool], rids: Sequence[str]) -> bool:
    head, abort_all = abort
    return any(abort_all or rid.startswith(head) for rid in rids)


def _seat(scheduler: Any, due: Sequence[_Coming]) -> None:
    """Let requests into the next batch, which waits for their KV."""
    for one in due:
        one.laps.lap("wait for batch")
    seat(scheduler, [arrival for one in due for arrival in one.arrivals])
    join_running(scheduler, [req for one in due for req in one.reqs])
    stream = _forward_stream(scheduler)
    for one in due:
        for copy in one.copies:
            copy.hold_back(stream)
        one.laps.lap("let in")
        one.ran_s = monotonic()
    _let_in.extend(due)
    if _aborted:
        _carry_out_aborts(scheduler)


def _tell(scheduler: Any, ran: Sequence[_Coming]) -> None:
    """Tell that the KV of requests is there. The batch that waits for it has been launched, so nobody else waits."""

    def wait() -> None:
        for one in ran:
            one.wait()

    on_all_ranks(scheduler, "copy", wait)
    for one in ran:
        one.landed(one.rids, one.ran_s, one.laps.ms)


def _carry_out_aborts(scheduler: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    aborts, _aborted[:] = list(_aborted), []
    coming_rids = [rid for one in _coming for rid in one.rids]
    for rid, abort_all in aborts:
        if _names_one((rid, abort_all), coming_rids):
            _aborted.append((rid, abort_all))
        scheduler.abort_request(AbortReq(rid=rid, abort_all=abort_all))


def _make(scheduler: Any, carried: CarriedRequest) -> Unpacked:
    """A request of this engine, with its grammar; nothing changes but the cache of grammars."""
    there = {req.rid for req in requests_of(scheduler)}
    if carried.rid in there or any(arrival.req.rid == carried.rid for one in _coming for arrival in one.arrivals):
        raise AdoptError(f"request {carried.rid} is on this engine already")
    check_fits(scheduler, carried, range(-(-carried.kv_tokens // scheduler.page_size)))
    unpacked = unpack(carried, scheduler)
    if unpacked.has_grammar:
        rebuild_grammar(scheduler, unpacked.req)
    return unpacked


def _check_room(scheduler: Any, requests: int, pages: int) -> None:
    """Raises AdoptError if slots or pages are short."""
    running, others = len(scheduler.running_batch.reqs), coming()
    slots = min(len(scheduler.req_to_token_pool.free_slots) - others, scheduler.max_running_requests - running - others)
    if requests > slots:
        raise AdoptError(f"{requests} requests are to be taken over, there are slots for {max(0, slots)}")
    spare = EngineLease.of(scheduler).spare_pages
    needed = pages + _needed_soon(scheduler, requests)
    if needed > spare:
        raise AdoptError(f"{needed} blocks are needed to take requests over and go on, {spare} can be had")


def _needed_soon(scheduler: Any, requests: int) -> int:
    """Each request that runs, comes, or is one of so many new ones, may need one more page soon."""
    return len(scheduler.running_batch.reqs) + coming() + requests


def _allocate(scheduler: Any, counts: Sequence[int]) -> list[list[int]]:
    """Pages of the lease for each request, after `_check_room`."""
    pages = early.allocate(scheduler, sum(counts))
    return [pages[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def _forward_stream(scheduler: Any) -> Any:
    """The stream that batches are computed in; None on a CPU."""
    if scheduler.device == "cpu":
        return None
    if scheduler.enable_overlap:
        return scheduler.forward_stream
    import torch

    return torch.cuda.current_stream()


def _after_batch(scheduler: Any) -> Mark:
    """Reached when the batch in flight, if there is one, is computed."""
    if scheduler.device == "cpu" or not scheduler.enable_overlap:
        return NOW
    import torch

    event = torch.cuda.Event()
    event.record(scheduler.forward_stream)
    return Mark(event)
