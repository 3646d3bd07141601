"""Shapes of the pool at every TP size, and its capacity beside stock's."""

from __future__ import annotations

import pytest

from sglang_adapt.kv.geometry import GeometryError, PoolGeometry

GIB = 1 << 30


def llama_8b(pool_bytes: int = 40 * GIB, page_tokens: int = 16, finest_tp: int = 8) -> PoolGeometry:
    return PoolGeometry.from_pool_bytes(
        pool_bytes,
        layers=32,
        kv_heads=8,
        head_dim=128,
        itemsize=2,
        finest_tp=finest_tp,
        page_tokens=page_tokens,
    )


def test_a_block_holds_t_times_the_tokens_of_tp1() -> None:
    g = llama_8b()
    assert g.block_bytes == 32768
    assert [g.tokens_per_block(t) for t in (1, 2, 4, 8)] == [16, 32, 64, 128]
    assert [g.local_heads(t) for t in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert g.region_shape == (32, 2, g.blocks, 16384)
    assert g.region_bytes <= 40 * GIB < g.region_bytes + 64 * g.block_bytes


def test_more_ranks_than_heads_replicate_each_head_on_neighbours() -> None:
    g = PoolGeometry(layers=2, kv_heads=2, head_dim=64, itemsize=2, finest_tp=8, block_bytes=4096, blocks=9)
    assert [g.local_heads(t) for t in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert [g.replicas(t) for t in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [g.tokens_per_block(t) for t in (1, 2, 4, 8)] == [16, 32, 32, 32]
    assert [g.head_range(8, r).start for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(len(g.head_range(8, r)) == 1 for r in range(8))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8])
def test_ranks_cover_every_head_equally_often(kv_heads: int) -> None:
    g = PoolGeometry(
        layers=1, kv_heads=kv_heads, head_dim=8, itemsize=2, finest_tp=24, block_bytes=kv_heads * 64, blocks=2
    )
    assert 1 in g.tp_sizes()
    for tp in g.tp_sizes():
        seen = [head for rank in range(tp) for head in g.head_range(tp, rank)]
        assert sorted(seen) == sorted(list(range(kv_heads)) * g.replicas(tp))
        assert g.tokens_per_block(tp) * g.token_bytes(tp) == g.block_bytes


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 128])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("pool_gib", [2, 40])
def test_capacity_is_at_least_97_percent_of_stock(page_tokens: int, kv_heads: int, pool_gib: int) -> None:
    """Stock sizes its pool as the KV bytes over the bytes of a token on one rank, cut to whole pages."""
    g = PoolGeometry.from_pool_bytes(
        pool_gib * GIB,
        layers=32,
        kv_heads=kv_heads,
        head_dim=128,
        itemsize=2,
        finest_tp=4,
        page_tokens=page_tokens,
    )
    for tp in (1, 2, 4):
        stock_tokens = pool_gib * GIB // (32 * 2 * max(1, kv_heads // tp) * 128 * 2)
        assert 0.97 * stock_tokens <= g.capacity_tokens(tp) <= stock_tokens


def test_blocks_for_counts_a_partial_last_block() -> None:
    g = llama_8b()
    assert [g.blocks_for(n, 2) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    with pytest.raises(GeometryError, match="-1 tokens"):
        g.blocks_for(-1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"head_dim": 9}, "18 bytes"),
        ({"block_bytes": 100}, "block_bytes 100"),
        ({"blocks": 1}, "blocks is 1"),
        ({"finest_tp": 3}, "TP size 3 neither divides the 4 KV heads"),
    ],
)
def test_impossible_shapes_name_the_value(change: dict[str, int], message: str) -> None:
    good = {
        "layers": 2,
        "kv_heads": 4,
        "head_dim": 8,
        "itemsize": 2,
        "finest_tp": 4,
        "block_bytes": 256,
        "blocks": 8,
    }
    PoolGeometry(**good)
    with pytest.raises(GeometryError, match=message):
        PoolGeometry(**(good | change))


def test_a_pool_too_small_for_two_blocks_says_so() -> None:
    with pytest.raises(GeometryError, match="hold 1 blocks"):
        llama_8b(pool_bytes=64 * 32768)
    with pytest.raises(GeometryError, match="page_tokens is 0"):
        llama_8b(page_tokens=0)


def test_unserved_tp_sizes_and_ranks_are_refused() -> None:
    g = llama_8b(finest_tp=4)
    with pytest.raises(GeometryError, match="TP size 8 does not divide the finest TP size 4"):
        g.tokens_per_block(8)
    with pytest.raises(GeometryError, match="rank 2 does not exist at TP 2"):
        g.head_range(2, 2)


def test_a_region_of_other_shape_or_dtype_is_refused() -> None:
    g = llama_8b()
    g.check_region(g.region_shape, 2)
    with pytest.raises(GeometryError, match="shape"):
        g.check_region((32, 2, g.blocks, 8192), 2)
    with pytest.raises(GeometryError, match="elements of 4 bytes"):
        g.check_region(g.region_shape, 4)
