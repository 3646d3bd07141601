"""The destination of a move: what can fail is done first and changes nothing, then the requests are taken up.

Inside the scheduler's dispatcher, on all ranks in the same iteration. The KV is copied while the requests are made.
Requests with tokens run on in the next batch; the part of a prompt that was read is cached, so that the queue finds it;
all others wait as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_adapt.core.handoff import CarriedRequest, RequestKind
from sglang_adapt.core.laps import Laps
from sglang_adapt.upstream.handoff.agree import on_all_ranks
from sglang_adapt.upstream.handoff.ahead import Ahead
from sglang_adapt.upstream.handoff.batch import join_running
from sglang_adapt.upstream.handoff.grammar import rebuild_grammar
from sglang_adapt.upstream.handoff.held import held
from sglang_adapt.upstream.handoff.late_cache import cache_later
from sglang_adapt.upstream.handoff.pack import Unpacked
from sglang_adapt.upstream.handoff.quiesce import drain, requests_of
from sglang_adapt.upstream.kv_lease import EngineLease


class AdoptError(RuntimeError):
    """Requests that this engine cannot take up; the text names the request and why. Nothing was taken up."""


@dataclass(frozen=True)
class Adoption:
    """What came of it, the same on all ranks.

    Attributes:
        adopted: ids of all requests that are the engine's now.
        spilled: ids of those that run no more for want of a slot, but wait with their KV cached.
    """

    adopted: list[str]
    spilled: list[str]


@dataclass(frozen=True)
class Arrival:
    """A request that is ready to be taken up: its grammar built, its pages in token order."""

    unpacked: Unpacked
    pages: list[int]
    runs: bool

    @property
    def req(self) -> Any:
        return self.unpacked.req

    @property
    def kind(self) -> RequestKind:
        return self.unpacked.carried.kind

    @property
    def kv_tokens(self) -> int:
        return self.unpacked.carried.kv_tokens


def adopt(
    scheduler: Any,
    requests: Sequence[CarriedRequest],
    blocks: Sequence[Sequence[int]],
    laps: Laps,
    start_copy: Callable[[], Callable[[], None]] | None = None,
    epoch: int = 0,
    ahead: Ahead | None = None,
) -> Adoption:
    """Take requests up.

    Args:
        scheduler: stock's.
        requests: as `export` gave them; none that its client has given up.
        blocks: for each request the pages of this rank, which are to join its lease: as many as hold `kv_tokens`, less
            those that came ahead.
        laps: gets the time of each step.
        start_copy: begins to bring the KV into the pages, while the rest goes on; what it returns waits until it is
            there. None if it is there already.
        epoch: of the move.
        ahead: what has come before.

    Raises:
        AdoptError, UnpackError, GrammarError, LeaseError: naming the request.
        OtherRankFailedError: another rank raised one of these.
        Exception: whatever `start_copy` raises.
        After each of them nothing is leased, allocated or queued.
    """
    drain(scheduler)
    laps.lap("drain")
    copies: list[Callable[[], None]] = []

    def prepare() -> list[Arrival]:
        if start_copy is not None:
            copies.append(start_copy())
            laps.lap("start copy")
        return _prepare(scheduler, requests, blocks, epoch, ahead or Ahead())

    try:
        arrivals = on_all_ranks(scheduler, "adopt", prepare)
    except Exception:
        # Nobody may get the pages while they are being written.
        for wait in copies:
            wait()
        raise
    laps.lap("prepare")
    EngineLease.of(scheduler).bring_in([page for arrival in arrivals for page in arrival.pages])
    runs = [arrival for arrival in arrivals if arrival.runs]
    seat(scheduler, runs)
    join_running(scheduler, [arrival.req for arrival in runs])
    _queue(scheduler, [arrival for arrival in arrivals if not arrival.runs])
    laps.lap("take up")
    for wait in copies:
        wait()
    laps.lap("wait for copy")
    return Adoption(
        [arrival.req.rid for arrival in arrivals],
        [arrival.req.rid for arrival in arrivals if arrival.kind is RequestKind.RUNNING and not arrival.runs],
    )


def _prepare(
    scheduler: Any,
    requests: Sequence[CarriedRequest],
    blocks: Sequence[Sequence[int]],
    epoch: int,
    ahead: Ahead,
) -> list[Arrival]:
    """All checks and all work that can fail; changes nothing but the engine's cache of grammars."""
    if len(blocks) != len(requests):
        raise AdoptError(f"{len(requests)} requests come with the blocks of {len(blocks)}")
    there = {req.rid for req in requests_of(scheduler)}
    if (exported := held()) is not None:
        there |= {req.rid for req in exported.taken.all}
    slots = len(scheduler.req_to_token_pool.free_slots)
    arrivals = []
    for carried, rest in zip(requests, blocks, strict=True):
        if carried.rid in there:
            raise AdoptError(f"request {carried.rid} is on this engine already")
        there.add(carried.rid)
        unpacked, first = ahead.take(carried, scheduler, epoch)
        pages = [*first, *rest]
        check_fits(scheduler, carried, pages)
        req = unpacked.req
        if unpacked.has_grammar and (carried.recompute or carried.kind is not RequestKind.WAITING or req.output_ids):
            rebuild_grammar(scheduler, req)
        runs = carried.kind is RequestKind.RUNNING and slots > 0
        slots -= runs
        arrivals.append(Arrival(unpacked, pages, runs))
    EngineLease.of(scheduler).pages.require_addable([page for arrival in arrivals for page in arrival.pages])
    return arrivals


def check_fits(scheduler: Any, carried: CarriedRequest, pages: Sequence[int]) -> None:
    needed = -(-carried.kv_tokens // scheduler.page_size)
    if len(pages) != needed:
        raise AdoptError(
            f"request {carried.rid} has {carried.kv_tokens} tokens of KV, which fill {needed} blocks of "
            f"{scheduler.page_size} tokens; {len(pages)} are given"
        )
    most = min(scheduler.max_req_len, scheduler.max_total_num_tokens - scheduler.page_size)
    if carried.most_tokens > most:
        raise AdoptError(
            f"request {carried.rid} may come to have {carried.most_tokens} tokens, this engine holds {most} of one "
            f"request; leave it where it is, or accept no request that does not fit every layout"
        )


def seat(scheduler: Any, arrivals: Sequence[Arrival]) -> None:
    """Give requests their slots and make them the owners of their KV; the prefix cache gets it later."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    if not arrivals:
        return
    pool = scheduler.req_to_token_pool
    pool.alloc([arrival.req for arrival in arrivals])
    # One write for all, a row for each request: its pages, and the dummy page up to the length of the longest, where
    # nobody looks.
    pages = np.zeros((len(arrivals), max(len(arrival.pages) for arrival in arrivals)), dtype=np.int32)
    for row, arrival in zip(pages, arrivals, strict=True):
        row[: len(arrival.pages)] = arrival.pages
    seats = torch.tensor([arrival.req.req_pool_idx for arrival in arrivals])
    seats = seats.to(pool.req_to_token.device, non_blocking=True)
    rows = slots_of(scheduler, pages)[:, : pool.req_to_token.shape[1]].to(torch.int32)
    pool.write((seats, slice(0, rows.shape[1])), rows)
    for arrival in arrivals:
        req, tokens = arrival.req, arrival.kv_tokens
        req.kv = ReqKvInfo(kv_allocated_len=tokens, swa_evicted_seqlen=0)
        req.kv_committed_len = tokens
        req._refresh_fill_ids()
        req.set_extend_range(0, tokens)
        if not scheduler.tree_cache.is_chunk_cache():
            req.last_node = scheduler.tree_cache.root_node
    cache_later(arrival.req for arrival in arrivals)


def _queue(scheduler: Any, arrivals: Sequence[Arrival]) -> None:
    """Put requests into the waiting queue: those with KV before all others, its full pages in the prefix cache."""
    first = []
    for arrival in arrivals:
        req = arrival.req
        if arrival.kv_tokens:
            _cache(scheduler, arrival)
            expect_prefill(req, spilled=arrival.kind is RequestKind.RUNNING)
            first.append(req)
        elif arrival.unpacked.carried.recompute:
            expect_prefill(req, spilled=len(req.output_ids) > 0)
            scheduler.waiting_queue.append(req)
        elif arrival.unpacked.has_grammar and not req.output_ids:
            if not scheduler.grammar_manager.process_req_with_grammar(req):
                scheduler.waiting_queue.append(req)
        else:
            scheduler.waiting_queue.append(req)
    scheduler.waiting_queue = [*first, *scheduler.waiting_queue]


def _cache(scheduler: Any, arrival: Arrival) -> None:
    """Put the full pages of a request's KV into the prefix cache; the rest, and what it has already, is freed."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    req, size = arrival.req, scheduler.page_size
    rows = _rows(scheduler, arrival)
    full = arrival.kv_tokens // size * size
    if scheduler.tree_cache.disable:
        had = full
    else:
        key = RadixKey((req.origin_input_ids + req.output_ids)[:full], req.extra_key)
        params = InsertParams(key=key, value=rows[:full].clone(), priority=req.priority or 0)
        had = scheduler.tree_cache.insert(params).prefix_len
    scheduler.token_to_kv_pool_allocator.free_segments([(rows[:had], 0), (rows[full:], full)])


def expect_prefill(req: Any, *, spilled: bool) -> None:
    """Make a request whose KV went to the cache ready for a prefill, as stock does with a retracted one.

    What it has of its prompt's logprobs is computed again: the prefill starts no later than where they start. Its
    count of cached tokens stays, which stock no longer touches once a request was retracted.
    """
    req.retracted_stain = True
    req.is_retracted = spilled
    req.already_computed = 0
    req.input_token_logprobs = None
    req.temp_input_top_logprobs_val = None
    req.temp_input_top_logprobs_idx = None
    req.temp_input_token_ids_logprobs_val = None
    req.temp_input_token_ids_logprobs_idx = None


def _rows(scheduler: Any, arrival: Arrival) -> torch.Tensor:
    """KV slots of a request's tokens in order, int64 `[kv_tokens]`."""
    return slots_of(scheduler, arrival.pages)[: arrival.kv_tokens]


def slots_of(scheduler: Any, pages: npt.ArrayLike) -> torch.Tensor:
    """All KV slots of pages `[..., n]` in order, int64 `[..., n * page size]`."""
    size = scheduler.page_size
    table = torch.from_numpy(np.asarray(pages, dtype=np.int32))
    first = table.to(scheduler.token_to_kv_pool_allocator.device, non_blocking=True).to(torch.int64) * size
    return (first[..., None] + torch.arange(size, device=first.device)).flatten(-2)
