"""What the parameters of a stock model are: how its layers shard them, and which views they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.parameter import PerTensorScaleParameter
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import nn

from sglang_adapt.upstream.weights.refusals import UnshareableError
from sglang_adapt.weights import ExpectedParam, ParamKind, ShardSpec

BLOCK_SCALE = "weight_scale_inv"
"""A block-wise FP8 weight's scales, one for each block of rows and columns; sharded as the weight is."""

_EXPERT_PARAMS = {"w13_weight": (ParamKind.COLUMN, 1), "w2_weight": (ParamKind.ROW, 2)}
"""Fused experts: `[experts, gate and up, hidden]` and `[experts, hidden, intermediate]`."""


@dataclass(frozen=True)
class ModelParam:
    """One parameter of a stock model.

    Attributes:
        name: the first of its names in the model.
        owners: the modules that have it, each with the attribute's name; several if weights are tied.
        kind, dim: how it is sharded, as in `weights.ShardSpec`.
    """

    name: str
    owners: tuple[tuple[nn.Module, str], ...]
    kind: ParamKind
    dim: int | None

    @property
    def module(self) -> nn.Module:
        return self.owners[0][0]

    @property
    def attribute(self) -> str:
        return self.owners[0][1]

    @property
    def param(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        found = module._parameters[attribute]
        assert found is not None, f"{self.name} was removed from its module"
        return found


def model_params(model: nn.Module, tp_size: int) -> list[ModelParam]:
    """All parameters of a model that was built for `tp_size` ranks, each once.

    Raises:
        UnshareableError: a layer of a kind that is not known here, or sharded over another number of ranks.
    """
    found: dict[int, ModelParam] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            owner = (module, attribute)
            if (first := found.get(id(param))) is not None:
                found[id(param)] = ModelParam(first.name, (*first.owners, owner), first.kind, first.dim)
                continue
            if isinstance(param, PerTensorScaleParameter):
                # One scale for each part of a fused layer, the same on all ranks.
                kind, dim = ParamKind.REPLICATED, None
            else:
                kind, dim = _sharding(name, module, attribute, tp_size)
            found[id(param)] = ModelParam(name, (owner,), kind, dim)
    return list(found.values())


def _sharding(name: str, module: nn.Module, attribute: str, tp_size: int) -> tuple[ParamKind, int | None]:
    if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)):
        if module.tp_size != tp_size:
            raise UnshareableError(
                f"{name} is sharded over {module.tp_size} ranks in an engine of {tp_size}; its layer cannot "
                f"take its weights from a shared copy"
            )
        if not isinstance(module, RowParallelLinear):
            return ParamKind.COLUMN, 0
        if attribute in ("weight", BLOCK_SCALE):
            return ParamKind.ROW, 1
        return ParamKind.REPLICATED, None
    if isinstance(module, FusedMoE):
        if module.moe_tp_size != tp_size:
            raise UnshareableError(f"{name} is sharded over {module.moe_tp_size} ranks in an engine of {tp_size}")
        if attribute in _EXPERT_PARAMS:
            return _EXPERT_PARAMS[attribute]
    if isinstance(module, (RMSNorm, ReplicatedLinear, RadixAttention)):
        return ParamKind.REPLICATED, None
    raise UnshareableError(
        f"{name} belongs to a layer of type {type(module).__name__}, of which it is not known how to share it"
    )


def shard_spec(param: ModelParam) -> ShardSpec:
    """The parameter as the layout wants it; for a model of the finest TP size."""
    tensor = param.param
    return ShardSpec(param.name, param.kind, param.dim, tuple(tensor.shape), _dtype_name(tensor.dtype))


def expected_param(param: ModelParam, finest_tp: int) -> ExpectedParam:
    """The view that an engine's parameter needs of a store of `finest_tp`.

    It has the stock parameter's shape, but for a fused QKV: the store repeats KV heads for each of its shards
    if there are fewer of them than shards, and the view takes the copies along.
    """
    tensor, module = param.param, param.module
    shape = list(tensor.shape)
    if isinstance(module, QKVParallelLinear) and param.kind is ParamKind.COLUMN:
        block_rows = module.quant_method.weight_block_size[0] if param.attribute == BLOCK_SCALE else 1
        blocks = finest_tp // module.tp_size
        heads = module.total_num_heads // finest_tp
        kv_heads = max(1, module.total_num_kv_heads // finest_tp)
        rows = (heads + kv_heads) * module.head_size + kv_heads * module.v_head_size
        shape[0] = blocks * rows // block_rows
    return ExpectedParam(param.name, param.kind, tuple(shape), tensor.dtype)


def describe_model(config: Any, architecture: str) -> str:
    """A model in words: what must be equal for weights to mean the same, beyond the shapes of parameters.

    Shapes alone would let a model with more KV heads pass for one whose heads the store repeats.

    Args:
        config: its Hugging Face configuration.
        architecture: name of the stock class.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_experts", None)
    return (
        f"{architecture} ({config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} "
        f"query and {config.num_key_value_heads} KV heads of {head_dim}, vocabulary of {config.vocab_size}"
        f"{f', {experts} experts' if experts else ''})"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
