"""Reading fused outputs that come in the store's block order, `[q0 k0 v0 | q1 k1 v1 | ...]`.

An engine whose TP size is the store's finest has one block and needs none of this. In others, what reads the
output of a fused layer is replaced in that instance of the model:
- gate and up: the stock activation, on a view with a row for each block, gives the natural order by itself (of
  experts: `experts`);
- q, k and v: one kernel splits, normalises where the model does, and rotates, in place of the stock kernels for
  the same; where something unknown sits between, the split alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sgl_kernel_ext.split_qkv_ops import split_qkv, split_qkv_norm_rope, split_qkv_rope
from sgl_kernel_ext.split_qkv_reference import QkvBlocks
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.qwen2 import Qwen2Attention
from sglang.srt.models.qwen3 import Qwen3Attention
from torch import nn

from sglang_adapt.upstream.weights.experts import read_block_order_of_experts
from sglang_adapt.upstream.weights.refusals import UnshareableError

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class BlockOrderReport:
    """How many layers of a model read the block order, by the way they do it."""

    fused_qkv: int = 0
    split_qkv: int = 0
    activations: int = 0
    experts: int = 0


def read_block_order(model: nn.Module, finest_tp: int) -> BlockOrderReport:
    """Make a model whose parameters are views of a store of `finest_tp` read its fused outputs correctly.

    Raises:
        UnshareableError: a fused layer whose reader is not known here.
    """
    handled: set[nn.Module] = set()
    fused = split = activations = 0
    for module in list(model.modules()):
        qkv = getattr(module, "qkv_proj", None)
        if isinstance(qkv, QKVParallelLinear):
            handled.add(qkv)
            shape = qkv_blocks(qkv, finest_tp)
            if _fuse(module, shape):
                fused += 1
            else:
                qkv.quant_method = SplitQkvMethod(qkv.quant_method, shape)
                split += 1
        gate_up = getattr(module, "gate_up_proj", None)
        if isinstance(gate_up, MergedColumnParallelLinear) and isinstance(module.act_fn, SiluAndMul):
            handled.add(gate_up)
            module.act_fn = BlockActivation(module.act_fn, sum(gate_up.output_sizes) // finest_tp)
            activations += 1
    for name, module in model.named_modules():
        is_fused = isinstance(module, (QKVParallelLinear, MergedColumnParallelLinear))
        if is_fused and module not in handled:
            raise UnshareableError(
                f"{name} is a fused layer ({type(module).__name__}) whose output is read by something that does "
                f"not know the order of shared weights; use one TP size for this model"
            )
    return BlockOrderReport(fused, split, activations, read_block_order_of_experts(model, finest_tp))


def qkv_blocks(layer: QKVParallelLinear, finest_tp: int) -> QkvBlocks:
    """The blocks that a rank's fused QKV output consists of."""
    if layer.v_head_size != layer.head_size:
        raise UnshareableError(
            f"{layer.prefix if hasattr(layer, 'prefix') else 'qkv_proj'} has value heads of {layer.v_head_size} "
            f"and key heads of {layer.head_size} elements; only equal ones can be split"
        )
    blocks = finest_tp // layer.tp_size
    kv_heads = max(1, layer.total_num_kv_heads // finest_tp)
    return QkvBlocks(
        blocks=blocks,
        q_heads=layer.total_num_heads // finest_tp,
        kv_heads=kv_heads,
        kv_copies=blocks * kv_heads // layer.num_kv_heads,
        head_dim=layer.head_size,
    )


class SplitQkvMethod(LinearMethodBase):
    """A linear method whose output is put into stock order, `[q | k | v]`, after the stock method made it."""

    def __init__(self, stock: LinearMethodBase, shape: QkvBlocks) -> None:
        self.stock = stock
        self.shape = shape

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.stock.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.stock.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return split_qkv(self.stock.apply(layer, x, bias), self.shape)


class BlockActivation(nn.Module):
    """A stock gated activation over `[g0 u0 | g1 u1 | ...]`, each block of `block` elements.

    Input `[tokens, blocks * block]`, output `[tokens, blocks * block / 2]` in natural order. No copy is made.
    """

    def __init__(self, stock: nn.Module, block: int) -> None:
        super().__init__()
        self.stock = stock
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stock(x.view(-1, self.block)).view(x.shape[0], -1)


def _fuse(attention: nn.Module, shape: QkvBlocks) -> bool:
    """Replace an attention's way from its input to q, k and v, if all that happens on it is known."""
    fuse = _FUSIONS.get(type(attention))
    if fuse is None or not _is_plain(attention.rotary_emb, shape.head_dim):
        return False
    fuse(attention, shape)
    return True


def _is_plain(rotary: nn.Module, head_dim: int) -> bool:
    """True if a rotary embedding does what the fused kernels do: NeoX style, whole heads, one position a token.

    Variants that only fill the cache otherwise (Llama 3, YaRN, linear scaling) are plain as well.
    """
    return (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == head_dim
        and not rotary.use_fallback_kernel
    )


def _rope_after_split(attention: nn.Module, shape: QkvBlocks) -> Callable[..., Qkv]:
    def prepare(positions: torch.Tensor, hidden_states: torch.Tensor) -> Qkv:
        qkv, _ = attention.qkv_proj(hidden_states)
        # The cache can grow, so that it is read at each call.
        return split_qkv_rope(qkv, positions, attention.rotary_emb.cos_sin_cache, shape)

    return prepare


def _fuse_llama(attention: LlamaAttention, shape: QkvBlocks) -> None:
    """In place of `LlamaAttention.forward_prepare_native` (models/llama.py): QKV, split, rotary."""
    attention.forward_prepare_native = _rope_after_split(attention, shape)


def _fuse_qwen2(attention: Qwen2Attention, shape: QkvBlocks) -> None:
    """In place of `Qwen2Attention.forward` (models/qwen2.py), which does all in one method."""
    prepare = _rope_after_split(attention, shape)

    def forward(positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        q, k, v = prepare(positions, hidden_states)
        output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch))
        return output

    attention.forward = forward


def _fuse_qwen3(attention: Qwen3Attention, shape: QkvBlocks) -> None:
    """In place of `Qwen3Attention.forward_prepare_native` (models/qwen3.py): QKV, split, q/k norm, rotary."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    assert isinstance(q_norm, RMSNorm) and q_norm.variance_epsilon == k_norm.variance_epsilon

    def prepare(positions: torch.Tensor, hidden_states: torch.Tensor) -> Qkv:
        qkv, _ = attention.qkv_proj(hidden_states)
        return split_qkv_norm_rope(
            qkv,
            positions,
            attention.rotary_emb.cos_sin_cache,
            q_norm.weight,
            k_norm.weight,
            q_norm.variance_epsilon,
            shape,
        )

    attention.forward_prepare_native = prepare


_FUSIONS: dict[type, Callable[[Any, QkvBlocks], None]] = {
    LlamaAttention: _fuse_llama,
    Qwen2Attention: _fuse_qwen2,
    Qwen3Attention: _fuse_qwen3,
}
