"""Views of a region at each TP size, and a rank's lease."""

from __future__ import annotations

import pytest
import torch

from sglang_adapt.kv.adaptor import CannotShrinkError, LeaseError, LeasePages, layer_views
from sglang_adapt.kv.geometry import GeometryError, PoolGeometry

GEOMETRY = PoolGeometry(layers=3, kv_heads=4, head_dim=8, itemsize=2, finest_tp=8, block_bytes=4 * 4 * 16, blocks=12)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_views_lie_in_the_region_at_fixed_addresses(tp: int) -> None:
    region = torch.zeros(GEOMETRY.region_shape, dtype=torch.bfloat16)
    keys, values = layer_views(region, GEOMETRY, tp)
    size = GEOMETRY.tokens_per_block(tp)
    assert len(keys) == len(values) == 3
    for layer in range(3):
        for kind, view in ((0, keys[layer]), (1, values[layer])):
            assert view.shape == (12 * size, GEOMETRY.local_heads(tp), 8)
            assert view.is_contiguous()
            assert view.data_ptr() == region[layer, kind].data_ptr()
    values[1][5 * size + size - 1, -1, -1] = 1
    assert region[1, 1, 5, -1] == 1, "the last token of page 5 ends where block 5 ends"
    assert region.sum() == 1


def test_a_region_of_another_pool_has_no_views() -> None:
    with pytest.raises(GeometryError, match="elements of 4 bytes"):
        layer_views(torch.zeros(GEOMETRY.region_shape), GEOMETRY, 1)
    with pytest.raises(GeometryError, match="shape"):
        layer_views(torch.zeros(2, 2, 12, 128, dtype=torch.bfloat16), GEOMETRY, 1)


def test_a_lease_grows_and_gives_back_free_pages_only() -> None:
    lease = LeasePages("tp1@0", GEOMETRY)
    assert (len(lease), lease.unleased) == (0, 11)
    assert lease.add([5, 3, 4, 9]).tolist() == [5, 3, 4, 9]
    assert (len(lease), lease.unleased, lease.ids().tolist()) == (4, 7, [3, 4, 5, 9])
    given, kept = lease.choose([9, 4, 3], 2)
    assert (given.tolist(), kept.tolist()) == ([4, 3], [9])
    lease.remove(given)
    lease.check(kept)
    assert lease.ids().tolist() == [5, 9]
    with pytest.raises(
        CannotShrinkError,
        match="tp1@0: the lease of 2 pages is to give 2 back, but only 1 are free; 1 are held",
    ):
        lease.choose(kept, 2)
    with pytest.raises(CannotShrinkError):
        lease.choose(kept, -1)


def test_pages_outside_the_lease_are_named() -> None:
    lease = LeasePages("tp2@0-1", GEOMETRY)
    lease.add([1, 2])
    for action, pages, message in [
        (lease.add, [2], "page 2 is in its lease already"),
        (lease.add, [0], "page 0 cannot be leased; pages are 1 to 11"),
        (lease.add, [12], "page 12 cannot be leased"),
        (lease.add, [3, 3], "page 3 is named twice"),
        (lease.remove, [1, 3], "page 3 is not in its lease"),
        (lease.check, [1, 4], "page 4 is free to allocate, but not in its lease"),
        (lease.check, [1, 1], "page 1 is named twice"),
    ]:
        with pytest.raises(LeaseError, match=f"tp2@0-1: {message}"):
            action(pages)
    assert lease.ids().tolist() == [1, 2]
