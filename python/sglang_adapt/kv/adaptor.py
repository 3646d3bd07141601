"""What one rank of an engine sees of the pool: views of its GPU's region, and the pages that it may allocate.

No sglang here; `upstream.kv_pool` gives these to stock's pool and allocator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_adapt.core.block_ids import named_twice
from sglang_adapt.kv.geometry import DUMMY_BLOCK, PoolGeometry
from sglang_adapt.kv.plan import IntArray


class LeaseError(RuntimeError):
    """A change of a rank's lease that is not possible; the text names the engine and the page or the
    count."""


class CannotShrinkError(LeaseError):
    """Fewer pages are free than the lease is to give up: running requests and cached prefixes hold the
    rest."""


def layer_views(region: torch.Tensor, geometry: PoolGeometry, tp: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of each layer as an engine of TP size `tp` has them, without a copy.

    Args:
        region: `geometry.region_shape`, contiguous, of the KV dtype.

    Returns:
        two lists of `[blocks * tokens_per_block, local_heads, head_dim]`, one entry a layer. Slot
        `page * tokens_per_block + i` is token i of a page, as in stock's MHATokenToKVPool.

    Raises:
        GeometryError: another shape or element size, or a TP size that the pool cannot serve.
    """
    geometry.check_region(tuple(region.shape), region.element_size())
    shape = (geometry.blocks * geometry.tokens_per_block(tp), geometry.local_heads(tp), geometry.head_dim)
    keys, values = ([region[layer, kind].view(shape) for layer in range(geometry.layers)] for kind in (0, 1))
    return keys, values


class LeasePages:
    """The pages that one rank of an engine may use: free, in a request, or in the prefix cache.

    The free list itself is the allocator's; this is the set that it must stay within.
    """

    def __init__(self, engine: str, geometry: PoolGeometry) -> None:
        self.engine = engine
        self._leased = np.zeros(geometry.blocks, dtype=bool)

    def __len__(self) -> int:
        return int(self._leased.sum())

    @property
    def unleased(self) -> int:
        """Pages of the pool, less the dummy, that this rank may not use."""
        return len(self._leased) - 1 - len(self)

    def ids(self) -> IntArray:
        """The leased pages, ascending."""
        return np.flatnonzero(self._leased).astype(np.int32)

    def add(self, pages: npt.ArrayLike) -> IntArray:
        """Add pages to the lease; returns them.

        Raises:
            LeaseError: a page that does not exist, is named twice, or is leased already; nothing has changed.
        """
        added = self.require_addable(pages)
        self._leased[added] = True
        return added

    def require_addable(self, pages: npt.ArrayLike) -> IntArray:
        """Check that `add` would succeed; returns the pages. Raises LeaseError as it does."""
        added = self._check(pages)
        for page in added[self._leased[added]]:
            raise LeaseError(f"{self.engine}: page {page} is in its lease already")
        return added

    def remove(self, pages: npt.ArrayLike) -> IntArray:
        """Take pages out of the lease: given back, or on the move with their request; returns them.

        Raises:
            LeaseError: a page that is not in the lease; nothing has changed.
        """
        removed = self._check(pages)
        for page in removed[~self._leased[removed]]:
            raise LeaseError(f"{self.engine}: page {page} is not in its lease")
        self._leased[removed] = False
        return removed

    def choose(self, free: npt.ArrayLike, count: int) -> tuple[IntArray, IntArray]:
        """Split a free list into `count` pages to give back and the rest, which keeps its order.

        The last ones are given: the allocator takes from the front.

        Raises:
            CannotShrinkError: fewer are free; names how many are in use.
        """
        pages = np.asarray(free, dtype=np.int32)
        if not 0 <= count <= len(pages):
            raise CannotShrinkError(
                f"{self.engine}: the lease of {len(self)} pages is to give {count} back, but only {len(pages)} are "
                f"free; {len(self) - len(pages)} are held by requests or cached prefixes"
            )
        kept = len(pages) - count
        return pages[kept:], pages[:kept]

    def check(self, free: npt.ArrayLike) -> None:
        """Check a free list against the lease.

        Raises:
            LeaseError: a free page that is not leased, or is in the list twice.
        """
        pages = self._check(free)
        for page in pages[~self._leased[pages]]:
            raise LeaseError(f"{self.engine}: page {page} is free to allocate, but not in its lease")

    def _check(self, pages: npt.ArrayLike) -> IntArray:
        checked = np.asarray(pages, dtype=np.int32).reshape(-1)
        if not len(checked):
            return checked
        for page in checked[(checked <= DUMMY_BLOCK) | (checked >= len(self._leased))]:
            raise LeaseError(f"{self.engine}: page {page} cannot be leased; pages are 1 to {len(self._leased) - 1}")
        if (twice := named_twice(checked)) is not None:
            raise LeaseError(f"{self.engine}: page {twice} is named twice")
        return checked
