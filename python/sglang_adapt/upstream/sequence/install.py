"""Making a stock model whose parameters are views of a store able to run batches sequence-parallel."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

import torch
from sglang.srt.layers.communicator import LayerCommunicator
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from torch import nn

from sglang_adapt.upstream.sequence.layers import (
    BaseLinear,
    run_communicator,
    run_embedding,
    run_gate_up,
    run_qkv,
    run_row,
)
from sglang_adapt.upstream.sequence.mode import SEQUENCE, TENSOR, SequenceMode, kind_of
from sglang_adapt.upstream.sequence.refusals import UnsliceableError
from sglang_adapt.upstream.weights.block_order import BlockActivation
from sglang_adapt.weights import WeightStore

_ATTENTION = ("qkv_proj", "o_proj")
_MLP = ("gate_up_proj", "down_proj")


def run_sequences(model: nn.Module, store: WeightStore, mode: SequenceMode) -> dict[str, int]:
    """Give the model's layers their second way to run; which one a batch takes is `mode`'s choice.

    Returns:
        How many layers of each kind have one.

    Raises:
        UnsliceableError: a linear layer of which it is not known how it runs sequence-parallel.
    """
    found: Counter[str] = Counter()
    handled: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "qkv_proj", None), QKVParallelLinear):
            qkv, o = (_layer(module, attribute, name, handled) for attribute in _ATTENTION)
            run_qkv(qkv, BaseLinear(qkv, f"{name}.qkv_proj", store, mode.base), mode)
            run_row(o, BaseLinear(o, f"{name}.o_proj", store, mode.base), mode, has_heads=True)
            found["attention"] += 1
        if isinstance(getattr(module, "gate_up_proj", None), MergedColumnParallelLinear):
            gate_up, down = (_layer(module, attribute, name, handled) for attribute in _MLP)
            run_gate_up(gate_up, BaseLinear(gate_up, f"{name}.gate_up_proj", store, mode.base), mode)
            run_row(down, BaseLinear(down, f"{name}.down_proj", store, mode.base), mode, has_heads=False)
            if not isinstance(module.act_fn, BlockActivation):
                # Of one block it does what it did; the product of a larger shard has several.
                module.act_fn = BlockActivation(module.act_fn, sum(gate_up.output_sizes) // store.finest_tp)
            found["mlp"] += 1
        communicator = getattr(module, "layer_communicator", None)
        if isinstance(communicator, LayerCommunicator):
            run_communicator(communicator, mode)
            found["communicator"] += 1
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and module not in handled:
            raise UnsliceableError(
                f"{name} ({type(module).__name__}) is not known to run sequence-parallel; give --adapt-sp off"
            )
    inner = model.model
    run_embedding(inner.embed_tokens, store.shard("model.embed_tokens.weight", mode.base.shard, mode.base.tp), mode)
    _choose_in_forward(inner, mode)
    _gather_before_logits(model.logits_processor, mode)
    return dict(found)


def _layer(module: nn.Module, attribute: str, name: str, handled: set[nn.Module]) -> Any:
    """One of a block's linear layers, checked to give its own part of a product and nothing else."""
    layer = getattr(module, attribute)
    is_row = isinstance(layer, RowParallelLinear)
    if layer.skip_bias_add or (not layer.input_is_parallel if is_row else layer.gather_output):
        raise UnsliceableError(
            f"{name}.{attribute} ({type(layer).__name__}) does more than its product, which is not known to run "
            "sequence-parallel; give --adapt-sp off"
        )
    handled.add(layer)
    return layer


def _choose_in_forward(inner: Any, mode: SequenceMode) -> None:
    """Each batch is chosen for, counted, and if it runs sequence-parallel, cut and made whole again, around stock's
    forward of all layers."""
    stock = inner.forward

    @wraps(stock)
    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        tokens = len(positions) if input_ids is None else len(input_ids)
        exchange = mode.choose(tokens, forward_batch, input_embeds is not None)
        name, kind = TENSOR if exchange is None else SEQUENCE, kind_of(forward_batch)
        capturing = get_is_capture_mode()
        if capturing:
            mode.captured(name, kind, tokens)
        else:
            mode.count(name, kind)
        if exchange is None:
            return stock(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        mode.exchange = exchange
        try:
            hidden = stock(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        finally:
            mode.exchange = None
        # A graph gives its output to code that expects a row for each token; so does who asks for hidden states.
        if capturing or forward_batch.capture_hidden_mode.need_capture():
            return exchange.all_tokens(hidden)
        mode.keep_sliced(hidden, exchange)
        return hidden

    inner.forward = forward


def _gather_before_logits(processor: Any, mode: SequenceMode) -> None:
    """Of sliced hidden states only the rows are brought together of which logits are computed.

    In place of `LogitsProcessor._get_pruned_states` (layers/logits_processor.py), which says which rows they are: it is
    asked with the rows' numbers in place of the rows.
    """
    stock = processor._get_pruned_states

    def prune(hidden: torch.Tensor, before_norm: Any, aux: Any, metadata: Any) -> Any:
        exchange = mode.take_sliced(hidden)
        if exchange is None:
            return stock(hidden, before_norm, aux, metadata)
        numbers = torch.arange(exchange.slices.tokens, device=hidden.device)
        chosen, *rest = stock(numbers[:, None], before_norm, aux, metadata)
        return exchange.chosen_tokens(hidden, chosen[:, 0]), *rest

    processor._get_pruned_states = prune
