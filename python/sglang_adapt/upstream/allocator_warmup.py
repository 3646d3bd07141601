"""Compiling stock's allocation kernels before the first request needs them.

Stock's paged allocator launches a kernel specialised by the batch size, rounded up to a power of two. It is compiled
when a batch of that size is first met, for a third of a second with everything waiting.
"""

from __future__ import annotations

from typing import Any

import torch

LARGEST_BATCH = 256
"""Larger batches are rare, and compile when they come."""


def warm_up_allocator(allocator: Any, largest_batch: int) -> int:
    """Let a paged allocator serve one batch of every size class, on a free list that is not its own; returns how many.

    Nothing is allocated: slots are only computed, and the free list is put back.

    Args:
        allocator: stock's PagedTokenToKVPoolAllocator.
        largest_batch: the largest batch that the engine runs.
    """
    free = allocator.free_pages, allocator.release_pages
    device = allocator.device
    batch, count = 1, 0
    try:
        while batch <= min(largest_batch, LARGEST_BATCH):
            none = torch.zeros(batch, dtype=torch.int64)
            one = torch.ones(batch, dtype=torch.int64)
            last = torch.full((batch,), -1, dtype=torch.int64, device=device)
            pages = torch.arange(batch + 1, dtype=torch.int64, device=device)
            # Triton compiles once more for a list that begins at no multiple of 16 bytes, as the rest of one may.
            for start in (0, 1):
                allocator.free_pages = pages[start:]
                slots = allocator.alloc_extend(none.to(device), none, one.to(device), one, last, batch)
                allocator.free_pages = pages[start:]
                allocator.alloc_decode((one + 1).to(device), one + 1, slots.to(torch.int32))
            batch, count = 2 * batch, count + 1
    finally:
        allocator.free_pages, allocator.release_pages = free
    return count
