"""How large a deployment's KV pool is: from the model's shapes and two numbers of the command line.

Every GPU's pool has three parts: the dummy block, the blocks that `--max-total-tokens` asks for, and a few for
the engines that are not in the layout. Such an engine keeps a lease of `standby_blocks`, so that it can run
its warm-up request at any time, also when it is started again while the layout's engines use all the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from sglang_adapt.kv.geometry import GeometryError, PoolGeometry

DEFAULT_PAGE_TOKENS = 16
"""Tokens of a page at the smallest TP size where the command line does not say."""

MIN_REQUEST_TOKENS = 16
"""A pool in which no request of this length fits is refused."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What of a model decides the size of its KV.

    Attributes:
        layers: layers that have KV.
        kv_heads: KV heads of the whole model.
        head_dim: elements of one head, the same for K and V.
        itemsize: bytes of one stored element.
    """

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The pool of every GPU of a deployment; picklable.

    Attributes:
        geometry: shapes of a GPU's region.
        standby_blocks: blocks on each rank that an engine outside the layout keeps.
        request_tokens: by TP size, ascending, the longest request (prompt and output) that an engine holds.
    """

    geometry: PoolGeometry
    standby_blocks: int
    request_tokens: dict[int, int]


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What a pool takes of each GPU, by the tokens that it is to hold: `fixed_bytes + tokens * token_bytes`.

    Attributes:
        fixed_bytes: of the dummy block, and of what is kept for the engines that are not in the layout.
        token_bytes: of each token, in whole pages.
        least_tokens: a pool of fewer is refused.
    """

    fixed_bytes: int
    token_bytes: int
    least_tokens: int


def pool_cost(shape: KvShape, tp_sizes: tuple[int, ...], page_tokens: int, warmup: tuple[int, int]) -> PoolCost:
    """What the pools that `size_pool` makes take; arguments and errors as there."""
    least = _least_tokens(max(1, page_tokens))
    region_bytes = size_pool(shape, tp_sizes, page_tokens, least, warmup).geometry.region_bytes
    page_more = size_pool(shape, tp_sizes, page_tokens, least + page_tokens, warmup).geometry.region_bytes
    token_bytes = (page_more - region_bytes) // page_tokens
    return PoolCost(region_bytes - least * token_bytes, token_bytes, least)


def size_pool(
    shape: KvShape,
    tp_sizes: tuple[int, ...],
    page_tokens: int,
    max_total_tokens: int,
    warmup: tuple[int, int],
    context_tokens: int | None = None,
) -> PoolSettings:
    """The pool that holds `max_total_tokens` tokens of one engine of the smallest TP size.

    Args:
        shape: the model's.
        tp_sizes: TP sizes of the deployment, ascending.
        page_tokens: tokens of a block at the smallest TP size; at TP size t a block holds as many times more as a
            rank of it stores fewer heads.
        max_total_tokens: rounded down to whole pages.
        warmup: (prompt tokens, new tokens) of the request that an engine outside the layout must be able to run.
        context_tokens: that the model is made for; a longer request is not served, whatever the pool holds.

    Raises:
        GeometryError: names the flag and what would do.
    """
    smallest = tp_sizes[0]
    local_heads = max(1, shape.kv_heads // smallest)
    token_bytes = local_heads * shape.head_dim * shape.itemsize
    if page_tokens < 2:
        raise GeometryError(f"--page-size {page_tokens}: a page must hold at least 2 tokens at TP {smallest}")
    block_bytes = page_tokens * token_bytes
    whole_token = shape.kv_heads * shape.head_dim * shape.itemsize
    if block_bytes % whole_token:
        raise GeometryError(
            f"--page-size {page_tokens}: pages of TP {smallest} must be multiples of {whole_token // token_bytes} "
            f"tokens, because a rank stores {local_heads} of the model's {shape.kv_heads} KV heads"
        )
    blocks = max_total_tokens // page_tokens
    least = _least_tokens(page_tokens)
    if max_total_tokens < least:
        raise GeometryError(
            f"--max-total-tokens {max_total_tokens} is too little: with pages of {page_tokens} tokens (--page-size) "
            f"the KV pool needs at least {least}"
        )
    engines_beside = len(tp_sizes) - 1
    geometry = PoolGeometry(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        itemsize=shape.itemsize,
        finest_tp=tp_sizes[-1],
        block_bytes=block_bytes,
        blocks=2,
    )
    standby = max(_blocks_to_run(geometry.tokens_per_block(tp), *warmup) for tp in tp_sizes)
    return PoolSettings(
        geometry=replace(geometry, blocks=1 + blocks + engines_beside * standby),
        standby_blocks=standby,
        request_tokens={
            tp: min(longest_request(blocks, geometry.tokens_per_block(tp)), (context_tokens or sys.maxsize) - 1)
            for tp in tp_sizes
        },
    )


def longest_request(blocks: int, page: int) -> int:
    """Tokens, prompt and output, of the longest request for which a lease of `blocks` pages of `page` tokens is enough:
    stock rounds up, and keeps a page more than it needs."""
    return (blocks - 2) * page


def _least_tokens(page_tokens: int) -> int:
    """Stock admits a request if prompt, output and one page more fit into what is free."""
    return -(-(MIN_REQUEST_TOKENS + 2 * page_tokens) // page_tokens) * page_tokens


def _blocks_to_run(page: int, prompt: int, new: int) -> int:
    """Pages with which stock starts a request: rounded prompt + output + one page must be less than what is free
    (sglang/srt/managers/schedule_policy.py, PrefillAdder)."""
    prompt_pages = -(-prompt // page)
    return (prompt_pages * page + new + page) // page + 1
