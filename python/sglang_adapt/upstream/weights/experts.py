"""Fused experts (`FusedMoE`) over a store: strided weights, and gate and up in block order.

A rank's experts are strided views: within each expert a run of rows (w13) or a range of columns (w2). Stock's
Triton kernels take strides, but its shortcut to them insists on contiguous weights; stock's longer way, which it
keeps for the same kernels, does not. Gate and up come out in block order, `[g0 u0 | g1 u1 | ...]`, and the stock
activation on a view with a row for each block gives the natural order, as in a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import nn

from sglang_adapt.upstream.patch import PatchError
from sglang_adapt.upstream.weights.refusals import UnshareableError

_in_place: dict[str, int] = {}
"""The block size by the name of each module in which `_replace` was called."""


def allow_strided_experts(model: nn.Module) -> None:
    """Make the experts of a model whose parameters are views take the way that allows for strides.

    Raises:
        UnshareableError: experts that run on another backend than Triton (or plain PyTorch on a CPU).
    """
    for name, layer in _experts(model):
        method = layer.quant_method
        if not isinstance(method, UnquantizedFusedMoEMethod) or not method.runner.runner_backend.is_triton():
            raise UnshareableError(
                f"{name} runs on {type(method).__name__} and its backend, whose experts are repacked; start with "
                f"--moe-runner-backend triton"
            )
        method.runner.fused_func = None


def read_block_order_of_experts(model: nn.Module, finest_tp: int) -> int:
    """Make all experts of this process's model read gate and up in block order; returns the number of layers.

    To be called for one model of a process only, because stock's activation has no instance to replace.

    Raises:
        UnshareableError: experts with another activation, or of several sizes.
        PatchError: stock is not as expected, or another model of this process was here before.
    """
    layers = _experts(model)
    if not layers:
        return 0
    blocks = set()
    for name, layer in layers:
        config = layer.moe_runner_config
        plain = config.is_gated and config.gemm1_alpha is None and config.gemm1_clamp_limit is None
        if config.activation != "silu" or not plain or config.swiglu_limit is not None:
            raise UnshareableError(f"{name} has an activation that cannot read the order of shared weights")
        blocks.add(2 * layer.intermediate_size_per_partition * layer.moe_tp_size // finest_tp)
    if len(blocks) > 1:
        raise UnshareableError(f"the model has experts of several sizes, with blocks of {sorted(blocks)} rows")
    (block,) = blocks
    if next(model.parameters()).is_cuda:
        _replace(fused_moe, "silu_and_mul", _on_blocks, block)
    else:
        _replace(fused_moe_native, "SiluAndMul", _native_on_blocks, block)
    return len(layers)


def _on_blocks(stock: Callable[..., Any], block: int) -> Callable[..., Any]:
    """The activation between stock's two Triton kernels, seeing a row for each block."""

    def silu_and_mul(gate_up: Any, out: Any, **kwargs: Any) -> Any:
        return stock(gate_up.view(-1, block), out.view(-1, block // 2), **kwargs)

    return silu_and_mul


def _native_on_blocks(stock: type[SiluAndMul], block: int) -> Callable[[], nn.Module]:
    """The activation of stock's plain PyTorch experts, which run on a CPU, seeing a row for each block."""
    from sglang_adapt.upstream.weights.block_order import BlockActivation

    def make_activation() -> nn.Module:
        return BlockActivation(stock(), block)

    return make_activation


def _replace(module: ModuleType, name: str, make: Callable[[Any, int], Any], block: int) -> None:
    """Replace a name in one module of stock, once.

    Not through stock's hook registry: that replaces the same object wherever it was imported, which here is in
    the dense layers' activation too.

    Raises:
        PatchError: the name is not there, or was replaced for another block size.
    """
    known = _in_place.get(module.__name__)
    if known is not None:
        if known != block:
            raise PatchError(
                f"{module.__name__} reads blocks of {known} rows already; this model has blocks of {block}"
            )
        return
    if not hasattr(module, name):
        raise PatchError(f"{module.__name__} has no {name} in this sglang")
    setattr(module, name, make(getattr(module, name), block))
    _in_place[module.__name__] = block


def _experts(model: nn.Module) -> list[tuple[str, FusedMoE]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FusedMoE)]
