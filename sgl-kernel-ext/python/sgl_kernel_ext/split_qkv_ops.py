"""The QKV splits as torch operators: Triton on a GPU, plain PyTorch on a CPU, shapes alone under
torch.compile.

As operators they are opaque to torch.compile and cost one dispatch, like stock sglang's own kernels.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext import split_qkv_reference as reference
from sgl_kernel_ext.split_qkv_reference import QkvBlocks

_SHAPE = "int blocks, int q_heads, int kv_heads, int kv_copies, int head_dim"
_LIBRARY = torch.library.Library("sgl_kernel_ext", "FRAGMENT")
_LIBRARY.define(f"split_qkv(Tensor qkv, {_SHAPE}) -> Tensor")
_LIBRARY.define(f"split_qkv_rope(Tensor qkv, Tensor positions, Tensor cos_sin, {_SHAPE}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"split_qkv_norm_rope(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor q_weight, Tensor k_weight, "
    f"float eps, {_SHAPE}) -> (Tensor, Tensor, Tensor)"
)

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_qkv(qkv: torch.Tensor, shape: QkvBlocks) -> torch.Tensor:
    """See `split_qkv.split_qkv`; on any device."""
    return torch.ops.sgl_kernel_ext.split_qkv(qkv, *shape)


def split_qkv_rope(qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, shape: QkvBlocks) -> Qkv:
    """See `split_qkv.split_qkv_rope`; on any device."""
    return torch.ops.sgl_kernel_ext.split_qkv_rope(qkv, positions, cos_sin, *shape)


def split_qkv_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    shape: QkvBlocks,
) -> Qkv:
    """See `split_qkv.split_qkv_norm_rope`; on any device."""
    return torch.ops.sgl_kernel_ext.split_qkv_norm_rope(qkv, positions, cos_sin, q_weight, k_weight, eps, *shape)


def _split_cpu(qkv: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.cat(reference.split_qkv_reference(qkv, QkvBlocks(*shape)), dim=1)


def _rope_cpu(qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *shape: int) -> Qkv:
    return reference.split_qkv_rope_reference(qkv, positions, cos_sin, QkvBlocks(*shape))


def _norm_rope_cpu(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *shape: int,
) -> Qkv:
    return reference.split_qkv_norm_rope_reference(qkv, positions, cos_sin, q_weight, k_weight, eps, QkvBlocks(*shape))


def _split_cuda(qkv: torch.Tensor, *shape: int) -> torch.Tensor:
    from sgl_kernel_ext import split_qkv as kernels

    return kernels.split_qkv(qkv, QkvBlocks(*shape))


def _rope_cuda(qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *shape: int) -> Qkv:
    from sgl_kernel_ext import split_qkv as kernels

    return kernels.split_qkv_rope(qkv, positions, cos_sin, QkvBlocks(*shape))


def _norm_rope_cuda(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *shape: int,
) -> Qkv:
    from sgl_kernel_ext import split_qkv as kernels

    return kernels.split_qkv_norm_rope(qkv, positions, cos_sin, q_weight, k_weight, eps, QkvBlocks(*shape))


def _split_fake(qkv: torch.Tensor, *shape: int) -> torch.Tensor:
    blocks = QkvBlocks(*shape)
    return qkv.new_empty(qkv.shape[0], blocks.q_width + 2 * blocks.kv_width)


def _parts_fake(qkv: torch.Tensor, *args: torch.Tensor | float) -> Qkv:
    blocks = QkvBlocks(*args[-len(QkvBlocks._fields) :])  # type: ignore[arg-type]
    q, k, v = (qkv.new_empty(qkv.shape[0], width) for width in (blocks.q_width, blocks.kv_width, blocks.kv_width))
    return q, k, v


for _name, _cpu, _cuda, _fake in (
    ("split_qkv", _split_cpu, _split_cuda, _split_fake),
    ("split_qkv_rope", _rope_cpu, _rope_cuda, _parts_fake),
    ("split_qkv_norm_rope", _norm_rope_cpu, _norm_rope_cuda, _parts_fake),
):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"sgl_kernel_ext::{_name}", _fake, lib=_LIBRARY)
