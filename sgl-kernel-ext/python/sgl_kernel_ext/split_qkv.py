"""Splitting a block-ordered QKV output as one Triton launch, with the q/k norm and the rotary embedding in
it.

One kernel serves three uses: the plain split, the split with rotary, the split with RMS norm and rotary. A
program handles a few heads of one block of one token, each head as two halves, as the NeoX rotation wants it.
Arithmetic is in float32; between norm and rotation values are rounded to the element type, as they are
when two kernels do this. The squares of a head are summed in the order of sglang's q/k norm
(`kernels/jit/include/sgl_kernel/impl/norm.cuh`), so that both give the same bits. The plain PyTorch versions are in
`split_qkv_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.split_qkv_reference import QkvBlocks

_HEADS_PER_PROGRAM = 8
_WARPS = 4


@triton.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    """For `tl.reduce`; Triton's own `tl.sum` is compiled, so that an interpreter switched on later could not run it."""
    return a + b


@triton.jit
def _lane_sums(values, HEADS: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of `[HEADS, 16 * EACH]` the sums of each EACH (2, 4, 8) adjacent ones, one after the other: `[HEADS, 16]`."""
    if EACH == 2:
        a, b = tl.split(tl.reshape(values, (HEADS, 16, 2)))
        total = a + b
    elif EACH == 4:
        even, odd = tl.split(tl.reshape(values, (HEADS, 16, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        total = a + b + c + d
    else:
        even, odd = tl.split(tl.reshape(values, (HEADS, 16, 2, 2, 2)))
        ae, cg = tl.split(even)
        bf, dh = tl.split(odd)
        a, e = tl.split(ae)
        b, f = tl.split(bf)
        c, g = tl.split(cg)
        d, h = tl.split(dh)
        total = a + b + c + d + e + f + g + h
    return total


@triton.jit
def _sum_of_squares(x, y, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each head, whose halves are `x` and `y`, `[HEADS, HEAD_DIM / 2]`: `[HEADS]`.

    For 64, 128 and 256 elements as a warp of 32 lanes does it: every lane its adjacent elements, then half of the
    lanes with the other half, and again.
    """
    if HEAD_DIM == 64 or HEAD_DIM == 128 or HEAD_DIM == 256:
        EACH: tl.constexpr = HEAD_DIM // 32
        total = _lane_sums(x * x, HEADS, EACH) + _lane_sums(y * y, HEADS, EACH)
        total = tl.reduce(tl.reshape(total, (HEADS, 2, 8)), 1, _add)
        total = tl.reduce(tl.reshape(total, (HEADS, 2, 4)), 1, _add)
        total = tl.reduce(tl.reshape(total, (HEADS, 2, 2)), 1, _add)
        total = tl.reduce(total, 1, _add)
    else:
        total = tl.reduce(x * x + y * y, 1, _add)
    return total


@triton.jit
def _split_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k,
    v,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    eps,
    qkv_stride,
    q_stride,
    k_stride,
    v_stride,
    cos_sin_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_COPIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """HALF is half of HEAD_DIM rounded up to a power of two; HEADS is how many heads a program handles."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    BLOCK_HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF)
    inside = column < MIDDLE
    live = (head < BLOCK_HEADS)[:, None] & inside[None, :]
    source = qkv + token * qkv_stride + (block * BLOCK_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    first = tl.load(source, mask=live, other=0.0)
    second = tl.load(source + MIDDLE, mask=live, other=0.0)
    is_q = head < Q_HEADS
    is_qk = (head < Q_HEADS + KV_HEADS)[:, None]
    if NORM:
        x, y = first.to(tl.float32), second.to(tl.float32)
        squares = _sum_of_squares(x, y, HEADS, HEAD_DIM)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        wx_q = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        wy_q = tl.load(q_weight + MIDDLE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        wx_k = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        wy_k = tl.load(k_weight + MIDDLE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = (x * scale * tl.where(is_q[:, None], wx_q, wx_k)).to(first.dtype)
        y = (y * scale * tl.where(is_q[:, None], wy_q, wy_k)).to(second.dtype)
        first = tl.where(is_qk, x, first)
        second = tl.where(is_qk, y, second)
    if ROPE:
        row = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + column
        cos = tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(row + MIDDLE, mask=inside, other=0.0).to(tl.float32)[None, :]
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = tl.where(is_qk, (x * cos - y * sin).to(first.dtype), first)
        second = tl.where(is_qk, (y * cos + x * sin).to(second.dtype), second)
    to_q = q + token * q_stride + (block * Q_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    mask = is_q[:, None] & live
    tl.store(to_q, first, mask=mask)
    tl.store(to_q + MIDDLE, second, mask=mask)
    kept = (block % KV_COPIES) == 0
    kv_block = block // KV_COPIES * KV_HEADS
    to_k = k + token * k_stride + (kv_block + head - Q_HEADS)[:, None] * HEAD_DIM + column[None, :]
    mask = ((head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS) & kept)[:, None] & live
    tl.store(to_k, first, mask=mask)
    tl.store(to_k + MIDDLE, second, mask=mask)
    to_v = v + token * v_stride + (kv_block + head - Q_HEADS - KV_HEADS)[:, None] * HEAD_DIM + column[None, :]
    mask = ((head >= Q_HEADS + KV_HEADS) & kept)[:, None] & live
    tl.store(to_v, first, mask=mask)
    tl.store(to_v + MIDDLE, second, mask=mask)


def split_qkv(qkv: torch.Tensor, shape: QkvBlocks) -> torch.Tensor:
    """The output in stock order, `[tokens, q_width + 2 * kv_width]`: queries, keys, values.

    Args:
        qkv: block-ordered output on a GPU, `[tokens, shape.width]`.
        shape: its blocks.
    """
    out = qkv.new_empty(len(qkv), shape.q_width + 2 * shape.kv_width)
    q, k, v = out.split([shape.q_width, shape.kv_width, shape.kv_width], dim=1)
    _launch(qkv, q, k, v, shape)
    return out


def split_qkv_rope(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, shape: QkvBlocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[tokens, q_width]` and keys `[tokens, kv_width]`, both rotated, and values.

    Args:
        qkv: block-ordered output on a GPU, `[tokens, shape.width]`.
        positions: `[tokens]`, int32 or int64.
        cos_sin: float32 `[positions, head_dim]`, cosines and then sines.
        shape: the blocks of `qkv`.
    """
    q, k, v = _empty(qkv, shape)
    _launch(qkv, q, k, v, shape, positions, cos_sin)
    return q, k, v


def split_qkv_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    shape: QkvBlocks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_rope`, with an RMS norm of each query and key head before the rotation.

    Args:
        q_weight, k_weight: `[head_dim]`.
        eps: of the norm.
    """
    q, k, v = _empty(qkv, shape)
    _launch(qkv, q, k, v, shape, positions, cos_sin, q_weight, k_weight, eps)
    return q, k, v


def _empty(qkv: torch.Tensor, shape: QkvBlocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = len(qkv)
    return (
        qkv.new_empty(tokens, shape.q_width),
        qkv.new_empty(tokens, shape.kv_width),
        qkv.new_empty(tokens, shape.kv_width),
    )


def _launch(
    qkv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: QkvBlocks,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    shape.check(qkv)
    if not len(qkv):
        return
    heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(shape.block_heads))
    _split_kernel[(len(qkv), shape.blocks, triton.cdiv(shape.block_heads, heads))](
        qkv,
        q,
        k,
        v,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        eps,
        qkv.stride(0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        Q_HEADS=shape.q_heads,
        KV_HEADS=shape.kv_heads,
        KV_COPIES=shape.kv_copies,
        HEAD_DIM=shape.head_dim,
        HALF=triton.next_power_of_2(shape.head_dim // 2),
        HEADS=heads,
        NORM=q_weight is not None,
        ROPE=positions is not None,
        num_warps=_WARPS,
    )
