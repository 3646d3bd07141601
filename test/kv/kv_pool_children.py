"""Stock's pool and allocator on a shared region, without an engine. Run in processes that have loaded
sglang."""

from __future__ import annotations

import types
from typing import Any

import torch

from sglang_adapt.kv.geometry import PoolGeometry

GEOMETRY = PoolGeometry(
    layers=2, kv_heads=4, head_dim=16, itemsize=4, finest_tp=2, block_bytes=4 * 4 * 16 * 4, blocks=10
)
FP8 = PoolGeometry(layers=2, kv_heads=4, head_dim=16, itemsize=1, finest_tp=2, block_bytes=4 * 4 * 16, blocks=10)


def build(geometry: PoolGeometry, tp: int, region: torch.Tensor, **changes: Any) -> Any:
    """Stock's pool as the scheduler of an engine would build it, after `use_pool`."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_adapt.upstream.kv_pool import pool_server_args, use_pool

    sizes = pool_server_args(geometry, tp)
    use_pool("tpX@0", geometry, tp, region, [1, 2, 5])
    return MHATokenToKVPool(**arguments(geometry, tp, sizes["page_size"], sizes["max_total_tokens"]) | changes)


def arguments(geometry: PoolGeometry, tp: int, page_size: int, size: int) -> dict[str, Any]:
    return {
        "size": size,
        "page_size": page_size,
        "dtype": torch.float32 if geometry.itemsize == 4 else torch.float8_e5m2,
        "head_num": geometry.local_heads(tp),
        "head_dim": geometry.head_dim,
        "layer_num": geometry.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }


def new_region(geometry: PoolGeometry) -> torch.Tensor:
    return torch.zeros(geometry.region_shape, dtype=torch.int32 if geometry.itemsize == 4 else torch.int8)


def wrong_pool(changes: dict[str, Any]) -> None:
    build(GEOMETRY, 2, new_region(GEOMETRY), **changes)


def second_pool() -> None:
    build(GEOMETRY, 1, new_region(GEOMETRY))
    build(GEOMETRY, 1, new_region(GEOMETRY))
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    MHATokenToKVPool(**arguments(GEOMETRY, 1, 4, GEOMETRY.capacity_tokens(1)))


def pool_without_a_region() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_adapt.upstream.kv_pool import BuffersInRegion
    from sglang_adapt.upstream.patch import PATCHES

    PATCHES.apply(BuffersInRegion)
    MHATokenToKVPool(**arguments(GEOMETRY, 1, 4, GEOMETRY.capacity_tokens(1)))


def pages_of_one_token() -> None:
    from sglang_adapt.upstream.kv_pool import pool_server_args

    one = PoolGeometry(layers=1, kv_heads=4, head_dim=16, itemsize=4, finest_tp=2, block_bytes=4 * 16 * 4, blocks=10)
    pool_server_args(one, 1)


def fp8_store() -> tuple[bool, bool]:
    """Stores K and V through stock's pool in a region and in stock's own memory: are both equal, and not
    zero?"""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    own = MHATokenToKVPool(**arguments(FP8, 2, 8, FP8.capacity_tokens(2)))
    region = new_region(FP8)
    shared = build(FP8, 2, region)
    slots = torch.tensor([16, 17, 41])
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 2, 16, generator=generator) for _ in range(2))
    layer = types.SimpleNamespace(layer_id=1)
    for pool in (own, shared):
        pool.set_kv_buffer(layer, slots, k, v)
    same = all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(shared.get_kv_buffer(1), own.get_kv_buffer(1), strict=True)
    )
    return same, bool(region[1, :, 2].any() and region[1, :, 5].any()) and not region[0].any()


def lease_of_an_allocator() -> list[list[int]]:
    """What an allocator's free list is after each change of its lease."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictResult

    from sglang_adapt.upstream.cpu.allocator import TorchPagedAllocator
    from sglang_adapt.upstream.kv_lease import EngineLease
    from sglang_adapt.upstream.kv_pool import current_pool

    pool = build(GEOMETRY, 1, new_region(GEOMETRY))
    allocator = TorchPagedAllocator(pool.size, pool.page_size, torch.float32, "cpu", pool, need_sort=False)
    cached = allocator.alloc(4)

    class Cache:
        """A prefix cache that holds one page."""

        held = 4

        def evictable_size(self) -> int:
            return self.held

        def evict(self, params: Any) -> EvictResult:
            assert params.num_tokens == 4
            allocator.free(cached)
            self.held = 0
            return EvictResult(num_tokens_evicted=4)

    lease = EngineLease(current_pool().pages, allocator, Cache(), lambda: None)
    seen = [allocator.free_pages.tolist()]
    lease.grow([9, 7])
    seen.append(allocator.free_pages.tolist())
    seen.append(sorted(lease.give_back(5).tolist()))
    seen.append(allocator.free_pages.tolist())
    lease.grow([3, 4])
    taken = allocator.alloc(4)
    lease.take_out([3])
    lease.check()
    seen.append(current_pool().pages.ids().tolist())
    lease.bring_in([3])
    allocator.free(taken)
    allocator.clear()
    lease.check()
    seen.append(allocator.free_pages.tolist())
    return seen


def change_while_pages_are_freed() -> None:
    from sglang_adapt.upstream.cpu.allocator import TorchPagedAllocator
    from sglang_adapt.upstream.kv_lease import EngineLease
    from sglang_adapt.upstream.kv_pool import current_pool

    pool = build(GEOMETRY, 1, new_region(GEOMETRY))
    allocator = TorchPagedAllocator(pool.size, pool.page_size, torch.float32, "cpu", pool, need_sort=False)
    allocator.free_group_begin()
    EngineLease(current_pool().pages, allocator, None, lambda: None).grow([9])


def warmed_up_allocator() -> tuple[int, list[int], list[int]]:
    """Size classes that a warm-up ran, and the free pages before and after it."""
    from sglang_adapt.upstream.allocator_warmup import warm_up_allocator
    from sglang_adapt.upstream.cpu.allocator import TorchPagedAllocator

    pool = build(GEOMETRY, 1, new_region(GEOMETRY))
    allocator = TorchPagedAllocator(pool.size, pool.page_size, torch.float32, "cpu", pool, need_sort=False)
    before = allocator.free_pages.tolist()
    classes = warm_up_allocator(allocator, 20)
    return classes, before, allocator.free_pages.tolist()
