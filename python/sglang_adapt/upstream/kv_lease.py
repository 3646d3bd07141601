"""Changing what an engine's rank may allocate while the engine is at rest (between two batches, nothing in
flight).

All ranks of an engine make the same change in the same iteration, each with pages of its own: stock's decisions
depend on counts only, so the ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_adapt.kv.adaptor import CannotShrinkError, LeaseError, LeasePages
from sglang_adapt.kv.plan import IntArray


@dataclass(frozen=True, eq=False)
class EngineLease:
    """The lease of this process's rank, as its allocator and prefix cache have it.

    Attributes:
        pages: the lease.
        allocator: stock's paged allocator.
        tree_cache: stock's prefix cache.
        has_room: called when the lease has grown, so that requests that wait for room are looked at again.
    """

    pages: LeasePages
    allocator: Any
    tree_cache: Any
    has_room: Callable[[], None]

    @classmethod
    def of(cls, scheduler: Any) -> EngineLease:
        """The lease of a scheduler that was built after `use_pool`."""
        from sglang_adapt.upstream.kv_pool import current_pool

        def has_room() -> None:
            # Stock looks at its waiting queue again when a running request ends. In a lease that was small for a while
            # none may run.
            scheduler.running_batch.batch_is_full = False

        return cls(current_pool().pages, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache, has_room)

    @property
    def free_pages(self) -> int:
        return len(self._free())

    @property
    def spare_pages(self) -> int:
        """Pages that `give_back` could give: free ones, and those of cached prefixes that no request uses."""
        return self.free_pages + self.tree_cache.evictable_size() // self.allocator.page_size

    def grow(self, pages: IntArray | Sequence[int]) -> None:
        """Add free pages.

        Raises:
            LeaseError: a page that is leased already or cannot be; or the engine is not at rest.
        """
        free = self._free()
        self._set_free(torch.cat([free, self._tensor(self.pages.add(pages))]))
        self.has_room()

    def give_back(self, count: int) -> IntArray:
        """Give `count` free pages up, evicting cached prefixes as needed; returns them.

        Raises:
            CannotShrinkError: requests hold too many; nothing has changed, nothing was evicted.
            LeaseError: the engine is not at rest.
        """
        size = self.allocator.page_size
        missing = count - self.free_pages
        cached = self.tree_cache.evictable_size() // size
        if count < 0 or missing > cached:
            raise CannotShrinkError(
                f"{self.pages.engine}: the lease of {len(self.pages)} pages is to give {count} back, but only "
                f"{self.free_pages} are free and {cached} more hold cached prefixes; requests hold the rest"
            )
        if missing > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self.tree_cache.evict(EvictParams(num_tokens=missing * size))
        given, kept = self.pages.choose(self._free().cpu().numpy(), count)
        self.pages.remove(given)
        self._set_free(self._tensor(kept))
        return given

    def take_out(self, pages: Sequence[int]) -> None:
        """Take pages that requests hold out of the lease: the requests are exported.

        Raises:
            LeaseError: a page that is not in the lease.
        """
        self.pages.remove(pages)

    def bring_in(self, pages: Sequence[int]) -> None:
        """Add pages that requests hold: the requests are adopted, or their export is undone.

        Raises:
            LeaseError: a page that is in the lease already.
        """
        self.pages.add(pages)

    def check(self) -> None:
        """Check that the allocator's free pages are in the lease, each once. Raises LeaseError."""
        self.pages.check(self._free().cpu().numpy())

    def _free(self) -> torch.Tensor:
        """Free pages, int64, those that stock has set aside to be sorted included."""
        if not self.allocator.is_not_in_free_group:
            raise LeaseError(f"{self.pages.engine}: pages are being freed; change the lease between batches only")
        self.allocator.merge_and_sort_free()
        return self.allocator.free_pages

    def _set_free(self, pages: torch.Tensor) -> None:
        self.allocator.free_pages = pages

    def _tensor(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(pages).to(self.allocator.device, non_blocking=True).to(torch.int64)
