"""The destination of what goes ahead of a hand-over: pages of the lease for the parts of a prompt that is read
elsewhere, and the copies into them.

Requests that run here come first: where they need the pages, what came ahead is given up, and copied again when the
whole request comes. All ranks decide alike, by counts that they all have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.core.handover import AheadCall
from sglang_adapt.upstream.handoff.adopt import AdoptError, slots_of
from sglang_adapt.upstream.handoff.agree import UnderWay, start_on_all_ranks
from sglang_adapt.upstream.handoff.iteration import before_each_batch
from sglang_adapt.upstream.kv_lease import EngineLease


@dataclass
class Early:
    """What has come, or is coming, of one request, and the room for all of it.

    Attributes:
        rid: its id.
        pages: of this rank, for all of the request, in token order.
        tokens: whose KV has come or is coming; they fill pages.
        copies: of the parts.
        fresh: the pages have just been taken: the batch that was in flight then may still write to them, for a request
            that has left them.
    """

    rid: str = ""
    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    copies: list[UnderWay] = field(default_factory=list)
    fresh: bool = True

    def wait(self) -> None:
        """Until nothing is being copied."""
        for copy in self.copies:
            copy.wait()


NOTHING = Early()

_early: dict[int, Early] = {}


def pages_ahead() -> int:
    """Pages that hold what came ahead; in the lease, and of no request."""
    return sum(len(early.pages) for early in _early.values())


def requests_ahead() -> int:
    return len(_early)


def of(number: int, rid: str) -> Early:
    """What has come ahead of a request by a number; nothing, if it was given up since."""
    early = _early.get(number, NOTHING)
    return early if early.rid == rid else NOTHING


def take(numbers: Collection[int]) -> None:
    """What came by these numbers is that of requests of this engine now."""
    for number in numbers:
        _early.pop(number, None)


def bring(scheduler: Any, call: AheadCall, start_copy: Callable[[list[int], bool], UnderWay], needed_soon: int) -> None:
    """Make room for a request, if it has none yet, and begin to bring a part of it.

    Args:
        start_copy: begins to bring the part into these pages of this rank, which are fresh or not.
        needed_soon: pages that others may need.

    Raises:
        AdoptError: no room for the request, or what should have come before is not there.
        OtherRankFailedError: another rank raised what follows.
        Exception: whatever `start_copy` raises.
        After each of them nothing has changed.
    """
    size = scheduler.page_size
    there = of(call.number, call.rid)
    if there.tokens != call.first or call.first % size or call.end % size or call.end < call.first:
        raise AdoptError(
            f"request {call.rid}: tokens {call.first} to {call.end} come ahead, {there.tokens} are here, in blocks of "
            f"{size}; it comes whole when it has been read"
        )
    if there is NOTHING:
        # The KV of the last token is that of the next step.
        whole, spare = -(-(call.tokens - 1) // size), EngineLease.of(scheduler).spare_pages
        if whole + needed_soon > spare:
            raise AdoptError(
                f"request {call.rid} needs {whole} blocks here and others {needed_soon}, {spare} can be had; nothing "
                f"of it comes ahead"
            )
        there = Early(call.rid, allocate(scheduler, whole))
    if call.end > call.first:
        try:
            pages = there.pages[call.first // size : call.end // size]
            copy = start_on_all_ranks(scheduler, "start a copy ahead", lambda: start_copy(pages, there.fresh))
        except Exception:
            if call.number not in _early:
                free(scheduler, there.pages)
            raise
        there.copies.append(copy)
    there.tokens = call.end
    _early[call.number] = there


def forget(scheduler: Any, numbers: Collection[int]) -> None:
    """Free what came by these numbers, when nothing is copied into it any more. Others are ignored."""
    for number in numbers:
        early = _early.pop(number, None)
        if early is not None:
            early.wait()
            free(scheduler, early.pages)
            # Stock may have found no room before.
            scheduler.running_batch.batch_is_full = False


def give_up(scheduler: Any, needed: int, keep: Collection[int] = ()) -> None:
    """Give up what came ahead, the last first, until so many pages can be had, or nothing is left but `keep`."""
    for number in [number for number in reversed(_early) if number not in keep]:
        allocator = scheduler.token_to_kv_pool_allocator
        if allocator.available_size() + scheduler.tree_cache.evictable_size() >= needed * scheduler.page_size:
            break
        forget(scheduler, [number])


@before_each_batch
def give_way(scheduler: Any) -> bool:
    """Each request that runs may need a page for its next token. What is in flight now has ended before the messages of
    the next iteration come."""
    if _early:
        give_up(scheduler, len(scheduler.running_batch.reqs) + 1)
        for early in _early.values():
            early.fresh = False
    return False


def allocate(scheduler: Any, count: int) -> list[int]:
    """Pages of the lease, evicting prefixes that no request uses; they must be there."""
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    size = scheduler.page_size
    if not count:
        return []
    evict_from_tree_cache(scheduler.tree_cache, count * size)
    rows = scheduler.token_to_kv_pool_allocator.alloc(count * size)
    if rows is None:
        raise RuntimeError(f"{count} pages were there and could not be had")
    pages: list[int] = (rows[::size] // size).tolist()
    return pages


def free(scheduler: Any, pages: Collection[int]) -> None:
    """Give pages of the lease back that no request has."""
    if pages:
        scheduler.token_to_kv_pool_allocator.free(slots_of(scheduler, list(pages)))
