"""How large the pool of a deployment is: pages, blocks, what is kept for idle engines, what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.kv.geometry import GeometryError
from sglang_adapt.kv.sizing import KvShape, PoolSettings, pool_cost, size_pool

LLAMA_8B = KvShape(layers=32, kv_heads=8, head_dim=128, itemsize=2)
WARMUP = (4, 2)


def settings(tp_sizes: tuple[int, ...], page: int, tokens: int, shape: KvShape = LLAMA_8B) -> PoolSettings:
    return size_pool(shape, tp_sizes, page, tokens, WARMUP)


def test_a_pool_of_llama_8b_for_two_tp_sizes() -> None:
    made = settings((1, 2), 16, 80000)
    geometry = made.geometry
    assert geometry.block_bytes == 16 * 8 * 128 * 2
    assert (geometry.tokens_per_block(1), geometry.tokens_per_block(2)) == (16, 32)
    assert made.standby_blocks == 3
    assert geometry.blocks == 1 + 5000 + 3, "the dummy, what was asked for, and the idle engine's"
    assert geometry.finest_tp == 2
    assert made.request_tokens == {1: 80000 - 2 * 16, 2: 2 * (80000 - 2 * 16)}
    assert size_pool(LLAMA_8B, (1, 2), 16, 80000, WARMUP, 100_000).request_tokens == {1: 80000 - 2 * 16, 2: 99_999}


def test_tokens_count_at_the_smallest_tp_size() -> None:
    made = settings((2, 4), 16, 1600)
    assert made.geometry.tokens_per_block(2) == 16
    assert made.geometry.tokens_per_block(4) == 32
    assert made.geometry.blocks == 1 + 100 + 3


def test_heads_that_are_repeated_make_pages_no_larger() -> None:
    made = settings((1, 2, 4), 16, 1600, KvShape(2, 2, 64, 2))
    assert [made.geometry.tokens_per_block(tp) for tp in (1, 2, 4)] == [16, 32, 32]


def test_tokens_are_rounded_down_to_pages() -> None:
    assert settings((1, 2), 16, 1615).geometry.blocks == settings((1, 2), 16, 1600).geometry.blocks


@pytest.mark.parametrize(
    ("tp_sizes", "page", "tokens", "text"),
    [
        ((1, 2), 1, 1000, "--page-size 1: a page must hold at least 2 tokens at TP 1"),
        ((2, 4), 3, 1000, "--page-size 3: pages of TP 2 must be multiples of 2 tokens"),
        ((1, 2), 16, 47, "--max-total-tokens 47 is too little: with pages of 16 tokens (--page-size) the KV pool"),
        ((1, 3), 16, 1000, "TP size 3 neither divides the 8 KV heads"),
    ],
)
def test_what_cannot_be_is_refused_with_the_flag(tp_sizes: tuple[int, ...], page: int, tokens: int, text: str) -> None:
    with pytest.raises(GeometryError, match=re.escape(text)):
        settings(tp_sizes, page, tokens)


@given(
    tp_sizes=st.sampled_from([(1, 2), (1, 2, 4), (2, 4), (1, 8), (2, 8)]),
    page=st.integers(1, 64).map(lambda half: 2 * half),
    pages=st.integers(0, 1000),
)
def test_the_cost_of_a_pool_is_its_regions_size(tp_sizes: tuple[int, ...], page: int, pages: int) -> None:
    cost = pool_cost(LLAMA_8B, tp_sizes, page, WARMUP)
    tokens = cost.least_tokens + pages * page
    assert cost.fixed_bytes + tokens * cost.token_bytes == settings(tp_sizes, page, tokens).geometry.region_bytes
    with pytest.raises(GeometryError, match="is too little"):
        settings(tp_sizes, page, cost.least_tokens - 1)


@given(
    tp_sizes=st.sampled_from([(1, 2), (1, 2, 4), (2, 4), (1, 8), (2, 8)]),
    page=st.integers(1, 64).map(lambda half: 2 * half),
    tokens=st.integers(0, 20000),
)
def test_the_longest_request_and_the_warm_up_are_always_admitted(
    tp_sizes: tuple[int, ...], page: int, tokens: int
) -> None:
    """Stock starts a request if its prompt in whole pages, its output and one page are less than what is free; a
    request may be all prompt or all output."""
    try:
        made = settings(tp_sizes, page, tokens + 2 * page + 16)
    except GeometryError:
        # Rounded up to whole pages the least can be more; the next page up is always accepted.
        made = settings(tp_sizes, page, tokens + 3 * page + 16)
    geometry = made.geometry
    leased = geometry.blocks - 1 - (len(tp_sizes) - 1) * made.standby_blocks
    assert min(made.request_tokens.values()) >= 2

    def admitted(prompt: int, new: int, blocks: int, size: int) -> bool:
        return -(-prompt // size) * size + new + size < blocks * size

    for tp in tp_sizes:
        size = geometry.tokens_per_block(tp)
        assert admitted(*WARMUP, made.standby_blocks, size)
        longest = made.request_tokens[tp]
        # init_req_max_new_tokens leaves prompt + new <= longest - 1.
        for prompt in {1, longest // 2, longest - 2} - {0, -1}:
            assert admitted(prompt, longest - 1 - prompt, leased, size)
