"""Splitting a block-ordered QKV output in plain PyTorch: what the Triton kernels must equal, and the CPU
path.

Input: `[tokens, blocks * (q_heads + 2 * kv_heads) * head_dim]`, for each block its query heads, its key heads
and its value heads. With `kv_copies` > 1 that many blocks in a row hold copies of the same key and value
heads, of which the first is kept. Output: all query heads, all key heads, all value heads, in the order of
the blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class QkvBlocks(NamedTuple):
    """Shape of a block-ordered QKV output.

    Attributes:
        blocks: how many blocks a row has.
        q_heads, kv_heads: heads of one block.
        kv_copies: blocks in a row that share their key and value heads; divides `blocks`.
        head_dim: elements of a head; even.
    """

    blocks: int
    q_heads: int
    kv_heads: int
    kv_copies: int
    head_dim: int

    @property
    def block_heads(self) -> int:
        return self.q_heads + 2 * self.kv_heads

    @property
    def width(self) -> int:
        """Elements of an input row."""
        return self.blocks * self.block_heads * self.head_dim

    @property
    def q_width(self) -> int:
        """Elements of a row of queries in the output."""
        return self.blocks * self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a row of keys, and of one of values, in the output."""
        return self.blocks // self.kv_copies * self.kv_heads * self.head_dim

    def check(self, qkv: torch.Tensor) -> None:
        """Raise ValueError unless `qkv` is `[tokens, width]` with contiguous rows."""
        if self.blocks % self.kv_copies or self.head_dim % 2:
            raise ValueError(f"{self}: kv_copies must divide blocks, and head_dim be even")
        if qkv.ndim != 2 or qkv.shape[1] != self.width or qkv.stride(1) != 1:
            raise ValueError(
                f"QKV of shape {list(qkv.shape)} and strides {list(qkv.stride())}; {self} needs rows of "
                f"{self.width} contiguous elements"
            )


def split_qkv_reference(qkv: torch.Tensor, shape: QkvBlocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[tokens, q_width]`, keys and values `[tokens, kv_width]` of a block-ordered output."""
    shape.check(qkv)
    tokens, nq, nk = len(qkv), shape.q_heads, shape.kv_heads
    heads = qkv.view(tokens, shape.blocks, shape.block_heads, shape.head_dim)
    kept = heads[:, :: shape.kv_copies]
    return (
        heads[:, :, :nq].reshape(tokens, shape.q_width),
        kept[:, :, nq : nq + nk].reshape(tokens, shape.kv_width),
        kept[:, :, nq + nk :].reshape(tokens, shape.kv_width),
    )


def rotate_reference(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rotary embedding in NeoX style over whole heads, computed in float32.

    Args:
        x: `[tokens, heads * head_dim]`.
        positions: `[tokens]`, int32 or int64.
        cos_sin: `[positions, head_dim]`, cosines and then sines.
    """
    cos, sin = cos_sin.index_select(0, positions.long()).float()[:, None].chunk(2, dim=-1)
    first, second = x.view(len(x), -1, head_dim).float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype).view(x.shape)


def normalize_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head, computed in float32 and rounded to x's dtype.

    Args:
        x: `[tokens, heads * head_dim]`.
        weight: `[head_dim]`.
    """
    heads = x.reshape(-1, len(weight)).float()
    heads = heads * torch.rsqrt(heads.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (heads * weight).to(x.dtype).view(x.shape)


def split_qkv_rope_reference(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, shape: QkvBlocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_reference`, then `rotate_reference` of queries and keys."""
    q, k, v = split_qkv_reference(qkv, shape)
    return (
        rotate_reference(q, positions, cos_sin, shape.head_dim),
        rotate_reference(k, positions, cos_sin, shape.head_dim),
        v,
    )


def split_qkv_norm_rope_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    shape: QkvBlocks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_reference`, then `normalize_reference` and `rotate_reference` of queries and keys."""
    q, k, v = split_qkv_reference(qkv, shape)
    q, k = normalize_reference(q, q_weight, eps), normalize_reference(k, k_weight, eps)
    return (
        rotate_reference(q, positions, cos_sin, shape.head_dim),
        rotate_reference(k, positions, cos_sin, shape.head_dim),
        v,
    )
