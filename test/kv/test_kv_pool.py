"""Stock's pool and allocator on a region: what is refused, FP8, and a lease that changes."""

from __future__ import annotations

from typing import Any

import kv_pool_children as children
import pytest
from weights_engines import forkserver, in_child

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_num": 3}, "has layers 3, the region at TP 2 has 2"),
        ({"head_num": 4}, "has local KV heads 4, the region at TP 2 has 2"),
        ({"head_dim": 32}, "has elements of a K head 32"),
        ({"v_head_dim": 32}, "has elements of a V head 32"),
        ({"page_size": 4}, r"has tokens of a page \(--page-size\) 4, the region at TP 2 has 8"),
        ({"size": 64}, r"has tokens of the pool \(--max-total-tokens\) 64, the region at TP 2 has 72"),
        ({"kv_cache_layout": "vectorized_5d"}, "has layout vectorized_5d"),
    ],
)
def test_a_pool_of_other_shapes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"PoolMismatchError: tpX@0: stock's KV pool {message}"):
        in_child(forkserver(), children.wrong_pool, changes)


def test_what_has_no_place_in_a_region_is_refused() -> None:
    context = forkserver()
    with pytest.raises(RuntimeError, match=r"PoolMismatchError: tpX@0: a second KV pool is asked for"):
        in_child(context, children.second_pool)
    with pytest.raises(RuntimeError, match=r"PoolMismatchError: this process has no shared KV region"):
        in_child(context, children.pool_without_a_region)
    with pytest.raises(RuntimeError, match=r"PoolMismatchError: a page holds one token at TP 1"):
        in_child(context, children.pages_of_one_token)
    with pytest.raises(RuntimeError, match=r"LeaseError: tpX@0: pages are being freed"):
        in_child(context, children.change_while_pages_are_freed)


def test_fp8_keys_and_values_lie_in_the_region_as_in_stocks_memory() -> None:
    assert in_child(forkserver(), children.fp8_store) == (True, True)


def test_a_lease_is_what_the_allocator_has() -> None:
    first, grown, given, kept, exported, cleared = in_child(forkserver(), children.lease_of_an_allocator)
    assert first == [2, 5]
    assert grown == [2, 5, 9, 7]
    assert given == [1, 2, 5, 7, 9], "page 1 was cached and is evicted for it"
    assert kept == []
    assert exported == [4]
    assert cleared == [3, 4]


def test_a_warm_up_of_the_allocator_takes_nothing() -> None:
    classes, before, after = in_child(forkserver(), children.warmed_up_allocator)
    assert classes == 5
    assert before == after
