"""Making this process's stock scheduler keep its KV in a shared region and allocate from a lease.

An engine's pool spans the whole region, so its page ids are the block ids of the region and its addresses never
change (captured graphs stay valid). What it may use of that is its lease: the allocator's free pages start as
the lease, and `kv_lease` adds and removes pages while the engine is at rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_adapt.kv.adaptor import LeasePages, layer_views
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.memory import RegionHandle, attach
from sglang_adapt.policy.lengths import most_output
from sglang_adapt.upstream.patch import PATCHES, Patch


class PoolMismatchError(RuntimeError):
    """Stock wants a pool of other shapes than the region has; the text names the value and what to set."""


@dataclass(frozen=True)
class RankPool:
    """What a rank needs to know of its GPU's pool to start; picklable.

    Attributes:
        geometry: shapes of the region.
        region: the keeper's handle of it.
        pages: the rank's first lease.
        request_tokens: the longest request of an engine, by TP size, ascending.
        gpus: the deployment's GPUs that the engine's ranks are on, by rank.
    """

    geometry: PoolGeometry
    region: RegionHandle
    pages: tuple[int, ...]
    request_tokens: dict[int, int]
    gpus: tuple[int, ...]


@dataclass(eq=False)
class EnginePool:
    """The pool of the one engine rank of this process.

    Attributes:
        engine: its name, for error texts.
        geometry, tp: shapes of the region, and the engine's TP size.
        region: the GPU's region, `geometry.region_shape`, of any dtype with the right element size.
        pages: the rank's lease.
        request_tokens: the longest request of an engine, by TP size, ascending; or None for what the pool holds.
        built: the pool's buffers have been made.
    """

    engine: str
    geometry: PoolGeometry
    tp: int
    region: torch.Tensor
    pages: LeasePages
    request_tokens: Mapping[int, int] | None = None
    built: bool = False

    @property
    def page_size(self) -> int:
        return self.geometry.tokens_per_block(self.tp)

    @property
    def unleased_tokens(self) -> int:
        """Tokens of the pool that are not in the lease."""
        return self.pages.unleased * self.page_size


_pool: EnginePool | None = None


def current_pool() -> EnginePool:
    """The pool that `use_pool` set. Raises PoolMismatchError if there is none."""
    if _pool is None:
        raise PoolMismatchError("this process has no shared KV region; call use_pool before building the scheduler")
    return _pool


def pool_server_args(geometry: PoolGeometry, tp: int) -> dict[str, int]:
    """The values of stock's ServerArgs that make its pool one with the region at TP size `tp`.

    Raises:
        PoolMismatchError: pages of one token, for which stock has an allocator without pages.
    """
    page_size = geometry.tokens_per_block(tp)
    if page_size == 1:
        raise PoolMismatchError(f"a page holds one token at TP {tp}; blocks must hold at least two")
    return {"page_size": page_size, "max_total_tokens": geometry.capacity_tokens(tp)}


class BuffersInRegion(Patch):
    """Makes the K and V buffers of the plain pool views of the region; stock would allocate them."""

    target = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
    kind = "replace"

    @staticmethod
    def hook(self: Any) -> None:
        pool = current_pool()
        if pool.built:
            raise PoolMismatchError(
                f"{pool.engine}: a second KV pool is asked for (a draft model?); the region has one"
            )
        _check_pool(self, pool)
        region = pool.region.view(self.store_dtype)
        self.k_buffer, self.v_buffer = layer_views(region, pool.geometry, pool.tp)
        pool.built = True


class FreePagesFromLease(Patch):
    """Makes the free pages of a cleared paged allocator those of the lease; stock takes all pages but the
    first.

    Source: sglang/srt/mem_cache/allocator/paged.py. Also called when stock flushes its cache, while nothing
    runs.
    """

    target = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any) -> None:
        pages = torch.from_numpy(current_pool().pages.ids())
        self.free_pages = pages.to(dtype=torch.int64, device=self.device)


class BytesOfRegion(Patch):
    """Sizes the pool by the region, and not by the memory that is free: that is the keeper's already."""

    target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
    kind = "replace"

    @staticmethod
    def hook(self: Any, pre_model_load_memory: Any) -> int:
        return current_pool().geometry.region_bytes


class UnleasedPagesAreNotLost(Patch):
    """Tells stock's leak check of the pages outside the lease: the pool's total includes them."""

    target = (
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_pool_invariant"
    )
    kind = "before"

    @staticmethod
    def hook(
        pool_name: str,
        available: int,
        evictable: int,
        protected: int,
        session_held: int,
        total: int,
        uncached: int = 0,
    ) -> tuple[Any, Any]:
        held = session_held + current_pool().unleased_tokens
        return (pool_name, available, evictable, protected, held, total, uncached), {}


class UsageOfLease(Patch):
    """Reports used tokens and usage against the lease; stock would count what is not leased as used."""

    target = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info"
    kind = "after"

    @staticmethod
    def hook(stats: Any, self: Any) -> Any:
        pool = current_pool()
        used = stats.full_num_used - pool.unleased_tokens
        leased = len(pool.pages) * pool.page_size
        return dataclasses.replace(stats, full_num_used=used, full_token_usage=used / leased if leased else 0.0)


class LongestRequest(Patch):
    """Lowers the length up to which a request is accepted; stock takes what fits into the whole pool.

    The pool is larger than any lease, and a request that fits into no lease would wait for ever.
    """

    target = "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info"
    kind = "after"

    @staticmethod
    def hook(info: tuple[Any, ...], self: Any) -> tuple[Any, ...] | None:
        pool = current_pool()
        if pool.request_tokens is None:
            return None
        limit = pool.request_tokens[pool.tp]
        if limit >= info[_MAX_REQ_LEN]:
            return None
        margin = info[_MAX_REQ_LEN] - info[_MAX_REQ_INPUT_LEN]
        return (*info[:_MAX_REQ_LEN], limit, limit - margin, *info[_MAX_REQ_INPUT_LEN + 1 :])


_MAX_REQ_LEN, _MAX_REQ_INPUT_LEN = 4, 5
"""Positions in what `get_worker_info` returns (managers/tp_worker.py)."""


class OutputOfTheSameLengthEverywhere(Patch):
    """Limits what a request may give by its own length, not by the engine that it meets; stock takes all of an engine.

    A request that began on a wide engine and was given all of it could not go on at a narrow one.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens"
    kind = "before"

    @staticmethod
    def hook(self: Any, req: Any) -> None:
        limits = current_pool().request_tokens
        if limits is not None:
            params = req.sampling_params
            params.max_new_tokens = most_output(len(req.origin_input_ids), params.max_new_tokens, list(limits.values()))


class WhatRunsOutOfBlocksWaits(Patch):
    """Puts the last request that runs back into the queue when there is no block for it; stock ends it with a 500.

    In stock's own pool such a request is too long for the whole of it. A lease may be small for a while, and was large
    enough when the request was accepted: it goes on, from its tokens, when the lease has grown.

    Source: sglang/srt/managers/schedule_batch.py; who calls it queues what is retracted.
    """

    target = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"
    kind = "after"

    @staticmethod
    def hook(
        result: tuple[list[Any], float, list[Any]], self: Any, server_args: Any
    ) -> tuple[list[Any], float, list[Any]]:
        retracted, new_token_ratio, aborted = result
        for req in aborted:
            req.to_finish = None
        return [*retracted, *aborted], new_token_ratio, []


def look_ahead_tokens() -> int:
    """Output tokens beyond what a request has for which stock wants room, at most, before it lets it run."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    ahead: int = CLIP_MAX_NEW_TOKENS
    return ahead


POOL_PATCHES: tuple[type[Patch], ...] = (
    BuffersInRegion,
    FreePagesFromLease,
    BytesOfRegion,
    UnleasedPagesAreNotLost,
    UsageOfLease,
    LongestRequest,
    OutputOfTheSameLengthEverywhere,
    WhatRunsOutOfBlocksWaits,
)


def use_pool(
    engine: str,
    geometry: PoolGeometry,
    tp: int,
    region: torch.Tensor,
    pages: Sequence[int] = (),
    request_tokens: Mapping[int, int] | None = None,
) -> list[str]:
    """Make the scheduler that this process is about to build keep its KV in `region`.

    To be called after stock's plugins are loaded and before `Scheduler(...)`, with the engine's ServerArgs
    holding what `pool_server_args` says.

    Args:
        engine: its name, for error texts.
        geometry: the region's shapes.
        tp: the engine's TP size.
        region: this rank's GPU's region, `geometry.region_shape`, mapped writable for as long as the process
            lives.
        pages: the rank's first lease; an engine may start with none.
        request_tokens: the longest request of an engine, by TP size, ascending; None for what the whole pool holds.

    Returns:
        The names of the patches in place.

    Raises:
        GeometryError: the region has another shape, or the TP size cannot be served.
        LeaseError: a page that cannot be leased.
        PatchError: a patch could not be applied.
    """
    global _pool
    geometry.check_region(tuple(region.shape), region.element_size())
    geometry.tokens_per_block(tp)
    lease = LeasePages(engine, geometry)
    lease.add(list(pages))
    _pool = EnginePool(engine, geometry, tp, region, lease, request_tokens)
    PATCHES.apply(*POOL_PATCHES)
    return PATCHES.verify(*POOL_PATCHES)


def use_rank_pool(engine: str, tp: int, pool: RankPool) -> None:
    """`use_pool` on a keeper's region.

    Raises:
        MemoryGoneError: the keeper has ended.
        GeometryError, LeaseError, PatchError: as `use_pool`.
    """
    region = attach(pool.region, "write")
    geometry = pool.geometry
    view = region.tensor[: geometry.region_bytes].view(_INTEGERS[geometry.itemsize]).view(geometry.region_shape)
    use_pool(engine, geometry, tp, view, pool.pages, pool.request_tokens)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""A dtype by its size, for a region of which only the size of an element is known."""


def require_pool_used() -> None:
    """Raise PoolMismatchError if the scheduler that was built has its KV elsewhere than in the region."""
    if not current_pool().built:
        raise PoolMismatchError(
            f"{current_pool().engine}: stock has built another kind of KV pool than the plain one, which is not in the "
            "shared region; give --adapt-tp-sizes a single value for this model"
        )


def _check_pool(stock: Any, pool: EnginePool) -> None:
    """Raise PoolMismatchError unless stock's pool (`MHATokenToKVPool`) has the shapes of the region."""
    geometry = pool.geometry
    device = torch.empty(0, device=stock.device).device
    if pool.region.device != device:
        raise PoolMismatchError(f"{pool.engine}: stock's pool is on {device}, the region on {pool.region.device}")
    for name, wanted, there in (
        ("layers", stock.layer_num, geometry.layers),
        ("local KV heads", stock.head_num, geometry.local_heads(pool.tp)),
        ("elements of a K head", stock.head_dim, geometry.head_dim),
        ("elements of a V head", stock.v_head_dim, geometry.head_dim),
        ("bytes of an element (--kv-cache-dtype)", stock.store_dtype.itemsize, geometry.itemsize),
        ("tokens of a page (--page-size)", stock.page_size, pool.page_size),
        ("tokens of the pool (--max-total-tokens)", stock.size, geometry.capacity_tokens(pool.tp)),
        ("layout", stock.kv_cache_layout, "nhd"),
    ):
        if wanted != there:
            raise PoolMismatchError(
                f"{pool.engine}: stock's KV pool has {name} {wanted}, the region at TP {pool.tp} has {there}"
            )
