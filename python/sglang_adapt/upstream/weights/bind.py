"""Binding the parameters of a stock model to views of a store."""

from __future__ import annotations

import torch
from torch import nn

from sglang_adapt.upstream.weights.block_fp8 import allow_strided_block_fp8
from sglang_adapt.upstream.weights.block_order import BlockOrderReport, read_block_order
from sglang_adapt.upstream.weights.experts import allow_strided_experts
from sglang_adapt.upstream.weights.params import ModelParam, describe_model, expected_param, model_params
from sglang_adapt.upstream.weights.row_fp8 import allow_row_fp8
from sglang_adapt.weights import WeightStore


def bind_views(
    model: nn.Module, store: WeightStore, rank: int, tp_size: int, filling: bool = False
) -> BlockOrderReport:
    """Make every parameter of a model of rank `rank` of `tp_size` a view of the store.

    Attributes that stock hangs on parameters (`weight_loader`, `output_dim`, ...) and their classes are kept.

    Args:
        filling: the store is about to be filled through this model: it takes over the values that layers have
            initialised themselves with, and the model's parameters may be written.

    Raises:
        ViewMismatchError: the store is of another model, dtype or set of TP sizes; names the parameter.
        UnshareableError: a layer that cannot take its weights from a shared copy.
    """
    params = model_params(model, tp_size)
    words = describe_model(model.config, type(model).__name__)
    views = store.views(words, [expected_param(param, store.finest_tp) for param in params], rank, tp_size)
    for param in params:
        if filling:
            _keep_initial_values(param, views[param.name])
        # Stock writes to single scales after loading (of the KV cache), which an engine must not do to the store.
        is_scale = views[param.name].numel() == 1 and not filling
        _replace(param, views[param.name].clone() if is_scale else views[param.name])
    allow_strided_experts(model)
    allow_strided_block_fp8(model)
    allow_row_fp8(model, store.finest_tp, filling)
    if store.blocks_per_rank(tp_size) == 1:
        return BlockOrderReport()
    return read_block_order(model, store.finest_tp)


def _keep_initial_values(param: ModelParam, view: torch.Tensor) -> None:
    """Put what a layer has initialised itself with into the store, for parameters that a checkpoint may lack."""
    if param.param.device.type != "meta":
        view.copy_(param.param)


def _replace(param: ModelParam, view: torch.Tensor) -> None:
    old = param.param
    new = torch.Tensor._make_subclass(type(old), view, False)
    new.__dict__.update(old.__dict__)
    for module, attribute in param.owners:
        module._parameters[attribute] = new


def assert_owns_no_weights(model: nn.Module, store: WeightStore) -> None:
    """Raise RuntimeError if a parameter lies outside the store, or anything is still on the meta device.

    Stock may repack or move weights after loading; on shared weights that would be a second copy.
    """
    for name, param in model.named_parameters():
        if param.device.type == "meta" or (param.numel() > 1 and not store.region.holds(param.data)):
            raise RuntimeError(
                f"{name} ({param.numel() * param.element_size()} bytes on {param.device}) is not a view of the "
                f"shared weights: something replaced it after it was bound"
            )
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise RuntimeError(f"the buffer {name} was made on the meta device and never filled")
