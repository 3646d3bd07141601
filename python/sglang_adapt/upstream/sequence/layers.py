"""What a stock model's layers do while a batch runs sequence-parallel; else they do what they did before.

Each function gives an instance a `forward` of its own. What a layer needs of the mode it reads at each call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sgl_kernel_ext.split_qkv_ops import split_qkv
from sglang.srt.layers.communicator import CommunicateWithAllReduceAndLayerNormFn, LayerCommunicator
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_adapt.upstream.sequence.base import Base
from sglang_adapt.upstream.sequence.mode import SequenceMode
from sglang_adapt.upstream.weights.block_order import SplitQkvMethod
from sglang_adapt.weights import WeightStore


class BaseLinear:
    """A parallel linear layer with the rows and columns that this rank has in sequence-parallel batches.

    They are views of the store, run by stock's own method.

    Args:
        layer: the rank's layer.
        name: of it in the model.
        store: that holds its parameters.
        base: the rank's part of them.
    """

    def __init__(
        self, layer: ColumnParallelLinear | RowParallelLinear, name: str, store: WeightStore, base: Base
    ) -> None:
        method = layer.quant_method
        self._method = method.stock if isinstance(method, SplitQkvMethod) else method
        names = [attribute for attribute, param in layer._parameters.items() if param is not None]
        # Not a module: its parameters are not the model's.
        views = {attribute: store.shard(f"{name}.{attribute}", base.shard, base.tp) for attribute in names}
        self._params = SimpleNamespace(**views)
        # To a sum one rank adds the bias, as in stock's RowParallelLinear.
        is_added_elsewhere = isinstance(layer, RowParallelLinear) and base.shard > 0
        self._bias = None if layer.skip_bias_add or is_added_elsewhere else getattr(self._params, "bias", None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, input size / (t or 1)]` to `[rows, output size / (1 or t)]`, the columns in the store's order."""
        return self._method.apply(self._params, x, self._bias)


def run_qkv(layer: QKVParallelLinear, linear: BaseLinear, mode: SequenceMode) -> None:
    """All heads of this rank's shard and tokens are computed, and exchanged for its own heads of all tokens."""
    stock = layer.forward
    method = layer.quant_method

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if mode.exchange is None:
            return stock(x)
        qkv = mode.exchange.tokens_to_heads(linear(x))
        return (split_qkv(qkv, method.shape) if isinstance(method, SplitQkvMethod) else qkv), None

    layer.forward = forward


def run_gate_up(layer: ColumnParallelLinear, linear: BaseLinear, mode: SequenceMode) -> None:
    """All columns of this rank's shard, of its tokens."""
    stock = layer.forward

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return stock(x) if mode.exchange is None else (linear(x), None)

    layer.forward = forward


def run_row(layer: RowParallelLinear, linear: BaseLinear, mode: SequenceMode, has_heads: bool) -> None:
    """The whole product of this rank's tokens: summed up over the shards of the weights, if there are several.

    Args:
        has_heads: the input is of this rank's heads, and is exchanged for its tokens first.
    """
    stock = layer.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if mode.exchange is None:
            return stock(x, *args, **kwargs)
        return mode.exchange.sum_parts(linear(mode.exchange.heads_to_tokens(x) if has_heads else x)), None

    layer.forward = forward


def run_embedding(layer: VocabParallelEmbedding, table: torch.Tensor, mode: SequenceMode) -> None:
    """The rows of this rank's tokens, from its shard `[vocabulary / t, hidden size]` of the table."""
    stock = layer.forward
    first = mode.base.shard * len(table)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if mode.exchange is None:
            return stock(ids)
        own = mode.exchange.slices.own(ids) - first
        if mode.base.tp == 1:
            return F.embedding(own, table)
        absent = (own < 0) | (own >= len(table))
        rows = F.embedding(own.clamp(0, len(table) - 1), table)
        return mode.exchange.sum_parts(rows.masked_fill(absent[:, None], 0))

    layer.forward = forward


def run_communicator(communicator: LayerCommunicator, mode: SequenceMode) -> None:
    """The sum after attention that stock leaves to the next norm (models/qwen3.py) is made already, if it is needed."""
    stock = communicator._communicate_with_all_reduce_and_layer_norm_fn
    simple = CommunicateWithAllReduceAndLayerNormFn._simple

    def communicate(**kwargs: Any) -> Any:
        return stock(**kwargs) if mode.exchange is None else simple(**kwargs)

    communicator._communicate_with_all_reduce_and_layer_norm_fn = communicate
