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

from sglang_adapt.upstream.sequence.mode import SequenceMode
from sglang_adapt.upstream.weights.block_order import SplitQkvMethod
from sglang_adapt.weights import WeightStore


class WholeLinear:
    """A parallel linear layer with all of its rows and columns, views of the store, run by stock's own method.

    Args:
        layer: the rank's layer.
        name: of it in the model.
        store: that holds its parameters.
    """

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, name: str, store: WeightStore) -> None:
        method = layer.quant_method
        self._method = method.stock if isinstance(method, SplitQkvMethod) else method
        names = [attribute for attribute, param in layer._parameters.items() if param is not None]
        # Not a module: its parameters are not the model's.
        self._params = SimpleNamespace(**{attribute: store.full(f"{name}.{attribute}") for attribute in names})
        self._bias = None if layer.skip_bias_add else getattr(self._params, "bias", None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, input size]` to `[rows, output size]`, the columns in the store's order."""
        return self._method.apply(self._params, x, self._bias)


def run_qkv(layer: QKVParallelLinear, whole: WholeLinear, mode: SequenceMode) -> None:
    """All heads of this rank's tokens are computed, and exchanged for its heads of all tokens."""
    stock = layer.forward
    method = layer.quant_method

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if mode.exchange is None:
            return stock(x)
        qkv = mode.exchange.tokens_to_heads(whole(x))
        return (split_qkv(qkv, method.shape) if isinstance(method, SplitQkvMethod) else qkv), None

    layer.forward = forward


def run_gate_up(layer: ColumnParallelLinear, whole: WholeLinear, mode: SequenceMode) -> None:
    """All columns of this rank's tokens."""
    stock = layer.forward

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return stock(x) if mode.exchange is None else (whole(x), None)

    layer.forward = forward


def run_row(layer: RowParallelLinear, whole: WholeLinear, mode: SequenceMode, has_heads: bool) -> None:
    """The whole product of this rank's tokens, of which no other rank has a part: nothing is summed up.

    Args:
        has_heads: the input is of this rank's heads, and is exchanged for its tokens first.
    """
    stock = layer.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if mode.exchange is None:
            return stock(x, *args, **kwargs)
        return whole(mode.exchange.heads_to_tokens(x) if has_heads else x), None

    layer.forward = forward


def run_embedding(layer: VocabParallelEmbedding, table: torch.Tensor, mode: SequenceMode) -> None:
    """The rows of this rank's tokens in the whole table `[vocabulary, hidden size]`."""
    stock = layer.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return stock(ids) if mode.exchange is None else F.embedding(mode.exchange.slices.own(ids), table)

    layer.forward = forward


def run_communicator(communicator: LayerCommunicator, mode: SequenceMode) -> None:
    """The sum after attention that stock leaves to the next norm (models/qwen3.py) is not needed."""
    stock = communicator._communicate_with_all_reduce_and_layer_norm_fn
    simple = CommunicateWithAllReduceAndLayerNormFn._simple

    def communicate(**kwargs: Any) -> Any:
        return stock(**kwargs) if mode.exchange is None else simple(**kwargs)

    communicator._communicate_with_all_reduce_and_layer_norm_fn = communicate
