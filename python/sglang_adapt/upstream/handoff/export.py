"""The source of a move: requests are taken out and held, then forgotten or put back as they were.

All of it happens inside the scheduler's dispatcher, on all ranks in the same iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_adapt.core.handoff import CarriedRequest, RequestKind
from sglang_adapt.core.laps import Laps
from sglang_adapt.upstream.handoff import held as holder
from sglang_adapt.upstream.handoff.agree import on_all_ranks
from sglang_adapt.upstream.handoff.held import Held
from sglang_adapt.upstream.handoff.late_cache import forget
from sglang_adapt.upstream.handoff.pack import pack
from sglang_adapt.upstream.handoff.quiesce import check_room, drain, put_back, requests_of, take
from sglang_adapt.upstream.handoff.refusals import reason_to_stay
from sglang_adapt.upstream.handoff.snapshot import Snapshots
from sglang_adapt.upstream.kv_lease import EngineLease


class ExportError(RuntimeError):
    """A request whose state is not what the move relies on; the text names it. Nothing was exported."""


@dataclass(frozen=True)
class Export:
    """What a rank hands out.

    Attributes:
        requests: messages, on rank 0 only.
        blocks: for each request this rank's pages in token order, less those that its snapshot had, if they still hold.
        pages: the pages that have left the lease, ascending.
        staying: id to reason of what cannot be carried.
    """

    requests: list[CarriedRequest]
    blocks: list[list[int]]
    pages: list[int]
    staying: dict[str, str]


@dataclass(frozen=True)
class _Part:
    """One request to hand out: its pages in token order, how many of them, from the front, are the cache's, and for how
    many of its tokens its snapshot still holds (None if it is in none)."""

    req: Any
    kind: RequestKind
    kv_tokens: int
    pages: list[int]
    cached: int
    ahead: int | None


def unexportable(scheduler: Any) -> dict[str, str]:
    """Id to reason of each request that could not be carried now; changes nothing."""
    reasons = {req.rid: reason_to_stay(req) for req in requests_of(scheduler)}
    return {rid: reason for rid, reason in reasons.items() if reason is not None}


def snapshot(scheduler: Any, epoch: int, unit: int, laps: Laps) -> tuple[Snapshots, list[CarriedRequest]]:
    """Let the batch in flight end, and say what the requests that decode and can be carried consist of; they run on.

    Args:
        unit: as in SnapshotCall.

    Returns:
        what was told, and the messages, on rank 0 only.

    Raises:
        ExportError, OtherRankFailedError: with nothing told.
    """
    drain(scheduler)
    laps.lap("drain")

    def note() -> tuple[Snapshots, list[CarriedRequest]]:
        reqs = [req for req in scheduler.running_batch.reqs if reason_to_stay(req) is None]
        tokens = [kv_tokens_of(req, RequestKind.RUNNING) for req in reqs]
        told = Snapshots(epoch)
        size, first = scheduler.page_size, scheduler.ps.tp_rank == 0
        pages = pages_of(scheduler, reqs, tokens)
        requests = [told.add(req, row, size, unit, first) for req, row in zip(reqs, pages, strict=True)]
        return told, [request for request in requests if request is not None]

    told = on_all_ranks(scheduler, "tell its requests", note)
    laps.lap("pack")
    return told


def pages_of_prompt(scheduler: Any) -> int:
    """Pages that the prompt that is being read in chunks still needs: stock goes on with it without looking whether
    they are there."""
    req = scheduler.chunked_req
    if req is None:
        return 0
    tokens = len(req.origin_input_ids) + len(req.output_ids) - req.extend_range.end
    return -(-tokens // scheduler.page_size) + 1


def export(scheduler: Any, epoch: int, laps: Laps, told: Snapshots | None = None) -> Export:
    """Let the batch in flight end, then take out and hold every request that can be carried.

    Args:
        told: what `snapshot` gave in this epoch; requests are told as what has changed since.

    Outputs of the last batch are sent before this returns.

    Raises:
        ExportError: with all requests still running.
        OtherRankFailedError: likewise.
    """
    drain(scheduler)
    forget()
    laps.lap("drain")
    staying = unexportable(scheduler)
    parts, requests = on_all_ranks(scheduler, "export", lambda: _hand_out(scheduler, staying, told or Snapshots()))
    laps.lap("pack")
    pages = sorted(page for part in parts for page in part.pages[part.cached :])
    EngineLease.of(scheduler).take_out(pages)
    holder.hold(Held(epoch, take(scheduler, lambda req: req.rid not in staying), pages))
    laps.lap("take out")
    blocks = [part.pages[(part.ahead or 0) // scheduler.page_size :] for part in parts]
    return Export(requests, blocks, pages, staying)


def release(scheduler: Any, held: Held, taken: set[str]) -> list[str]:
    """Forget held requests: their slots and cache locks are freed, their pages stay out of the lease.

    Args:
        taken: ids of those that live elsewhere. The others must have been given up by their clients, who are told
            here.

    Returns:
        ids that are in `taken` and were given up.

    Raises:
        ExportError: a request is neither taken nor given up: it would be lost. Nothing has changed.
    """
    lost = [req.rid for req in held.taken.all if req.rid not in taken | held.aborted]
    if lost:
        raise ExportError(
            f"epoch {held.epoch} cannot be released: {len(lost)} held requests were taken by no engine, {lost[0]} "
            f"among them; restore the epoch, or say who has them"
        )
    _tell_aborted(scheduler, held, held.aborted - taken)
    for req in held.taken.with_kv:
        if req.last_node is not None:
            scheduler.tree_cache.dec_lock_ref(req.last_node)
        scheduler.req_to_token_pool.free(req)
        req.kv = None
    holder.let_go()
    return sorted(held.aborted & taken)


def restore(scheduler: Any, held: Held) -> list[str]:
    """Put held requests back as they were; those given up meanwhile are aborted as stock does. Returns the ids of the
    others.

    Raises:
        LeaseError: a page is in the lease already: it was given to this engine again.
        NoRoomError: see `check_room`.
        OtherRankFailedError: another rank raised one of these.
        After each of them nothing has changed.
    """
    from sglang.srt.managers.io_struct import AbortReq

    lease = EngineLease.of(scheduler)

    def check() -> None:
        lease.pages.require_addable(held.pages)
        check_room(scheduler, held.taken)

    drain(scheduler)
    on_all_ranks(scheduler, "restore", check)
    lease.bring_in(held.pages)
    put_back(scheduler, held.taken)
    holder.let_go()
    for rid in sorted(held.aborted):
        scheduler.abort_request(AbortReq(rid=rid))
    return [req.rid for req in held.taken.all if req.rid not in held.aborted]


def _hand_out(scheduler: Any, staying: dict[str, str], told: Snapshots) -> tuple[list[_Part], list[CarriedRequest]]:
    """All requests but those that stay, as parts and, on rank 0, as messages; in the order to take them up in."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    wanted = [
        (req, kind)
        for kind, reqs in (
            (RequestKind.RUNNING, scheduler.running_batch.reqs),
            (RequestKind.PREFILLING, chunked),
            (RequestKind.WAITING, waiting),
        )
        for req in reqs
        if req.rid not in staying
    ]
    tokens = [kv_tokens_of(req, kind) for req, kind in wanted]
    pages = pages_of(scheduler, [req for req, _ in wanted], tokens)
    parts = [
        _Part(
            req,
            kind,
            count,
            row,
            req.cache_protected_len // scheduler.page_size if count else 0,
            told.ahead(req, row) if kind is RequestKind.RUNNING else None,
        )
        for (req, kind), count, row in zip(wanted, tokens, pages, strict=True)
    ]
    if scheduler.ps.tp_rank != 0:
        return parts, []
    return parts, [
        pack(part.req, part.kind, part.kv_tokens)
        if part.ahead is None
        else told.describe(part.req, part.kv_tokens, part.ahead)
        for part in parts
    ]


def kv_tokens_of(req: Any, kind: RequestKind) -> int:
    """Tokens of a request that have KV. Raises ExportError if stock says otherwise."""
    if kind is RequestKind.WAITING:
        if req.kv is not None:
            raise ExportError(f"request {req.rid} waits, but holds {req.kv.kv_allocated_len} tokens of KV")
        return 0
    tokens: int = req.seqlen - 1 if kind is RequestKind.RUNNING else req.extend_range.end
    if not tokens == req.kv_committed_len == req.kv.kv_allocated_len or req.inflight_middle_chunks:
        raise ExportError(
            f"request {req.rid} should be {kind} with {tokens} tokens of KV, but has {req.kv_committed_len} committed, "
            f"{req.kv.kv_allocated_len} allocated and {req.inflight_middle_chunks} chunks in flight"
        )
    return tokens


def pages_of(scheduler: Any, reqs: Sequence[Any], tokens: Sequence[int]) -> list[list[int]]:
    """Pages of each request's first tokens, in order; the device is asked once for all."""
    size, most = scheduler.page_size, max(tokens, default=0)
    if not most:
        return [[] for _ in reqs]
    table = scheduler.req_to_token_pool.req_to_token
    # Requests without KV have no slot; row 0 stands in for theirs, of which nothing is taken.
    slots = [req.req_pool_idx if count else 0 for req, count in zip(reqs, tokens, strict=True)]
    rows = table[torch.tensor(slots, device=table.device), :most:size].cpu().numpy() // size
    return [row[: -(-count // size)].tolist() for row, count in zip(rows, tokens, strict=True)]


def _tell_aborted(scheduler: Any, held: Held, rids: set[str]) -> None:
    """Answer the aborts of requests that end here, as stock does for those in its queues."""
    from sglang.srt.managers.io_struct import AbortReq

    for req in held.taken.all:
        if req.rid in rids:
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
