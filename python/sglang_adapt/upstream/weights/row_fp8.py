"""FP8 linear layers with a scale a tensor or a row (output channel), over a store.

Stock multiplies by a scale for each row; what a checkpoint has a single scale of (each of q, k, v, gate and up), it
expands to rows after loading. Neither changes the weights, so that weights and scales stay views of the store, and
the values are stock's at every TP size. Two things differ here:
- the expansion follows the order of the store's blocks, `[q0 k0 v0 | q1 k1 v1 | ...]`;
- a row-parallel weight is a range of columns. Stock's CUTLASS kernel assumes contiguous weights, its Triton kernel
  for the same takes strides, so that those layers run on that one.

Where stock would requantise fused layers to one scale (`requantize_with_max_scale`: compressed-tensors with a scale a
tensor, GPUs without CUTLASS's FP8) it would write to the shared copy; that is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.utils import convert_to_channelwise
from torch import nn

from sglang_adapt.upstream.patch import PATCHES, Patch
from sglang_adapt.upstream.weights.refusals import WAY_OUT, UnshareableError


class StridedRowFp8(Patch):
    """Runs FP8 products with weights whose rows do not follow each other on stock's Triton kernel.

    Stock runs them on a CUTLASS kernel, which would read the elements between the rows.
    """

    target = "sglang.srt.layers.quantization.fp8_utils.fp8_scaled_mm"
    kind = "around"

    @staticmethod
    def hook(
        original: Any,
        activation: torch.Tensor,
        weight: torch.Tensor,
        scales_a: torch.Tensor,
        scales_b: torch.Tensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Both kernels take weights as [columns, rows], the transpose of how they lie in memory.
        if weight.stride() == (1, weight.shape[0]):
            return original(activation, weight, scales_a, scales_b, out_dtype, bias)
        flat = activation.view(-1, activation.shape[-1])
        return fp8_utils.triton_scaled_mm(flat, weight, scales_a, scales_b, out_dtype, bias)


class TensorFp8OnViews(LinearMethodBase):
    """Stock's method for FP8 weights with a scale a tensor, leaving the layer's parameters as they are.

    Args:
        stock: the layer's own method.
        widths: rows of the layer's fused parts in the order of the store; the scales repeat over them.
        filling: the layer is only loaded through, never run.
    """

    def __init__(self, stock: Fp8LinearMethod, widths: list[int], filling: bool) -> None:
        self.stock = stock
        self._widths = widths
        self._filling = filling
        self._row_scales: torch.Tensor | None = None
        self._input_scale: torch.Tensor | None = None

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.stock.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Expand the scales to float32 `[rows, 1]`, 4 bytes a row that each engine has for itself."""
        if self._filling:
            return
        scales = layer.weight_scale.data
        self._row_scales = convert_to_channelwise(scales.repeat(len(self._widths) // len(scales)), self._widths)
        self._input_scale = None if layer.input_scale is None else layer.input_scale.data.max()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fp8_utils.apply_fp8_linear(
            input=x,
            weight=layer.weight.t(),
            weight_scale=self._row_scales,
            input_scale=self._input_scale,
            bias=bias,
            cutlass_fp8_supported=True,
        )


def allow_row_fp8(model: nn.Module, finest_tp: int, filling: bool) -> None:
    """Make the FP8 layers of a model that have scales a tensor or a row, if any, take views of a store.

    Args:
        finest_tp: TP size that the store is laid out for.
        filling: the model is only loaded through.

    Raises:
        UnshareableError: a layer that stock would requantise or repack.
    """
    found = False
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8LinearMethod) and not method.block_quant:
            _check_tensor_fp8(name, method)
            module.quant_method = TensorFp8OnViews(method, part_widths(module, finest_tp), filling)
            found = True
        elif isinstance(method, CompressedTensorsLinearMethod):
            _check_channel_fp8(name, module.scheme)
            found = True
    if found and not filling and fp8_utils._is_cuda:
        PATCHES.apply(StridedRowFp8)


def part_widths(layer: nn.Module, finest_tp: int) -> list[int]:
    """Rows of each part of a rank's output in the store's order: q, k, v (or gate, up) of each block in turn."""
    if isinstance(layer, QKVParallelLinear):
        kv_heads = max(1, layer.total_num_kv_heads // finest_tp)
        heads = (layer.total_num_heads // finest_tp, kv_heads, kv_heads)
        sizes = (layer.head_size, layer.head_size, layer.v_head_size)
        parts = [count * size for count, size in zip(heads, sizes, strict=True)]
    elif isinstance(layer, MergedColumnParallelLinear):
        parts = [size // finest_tp for size in layer.output_sizes]
    else:
        return [layer.weight.shape[0]]
    return parts * (finest_tp // layer.tp_size)


def _check_tensor_fp8(name: str, method: Fp8LinearMethod) -> None:
    if not method.is_checkpoint_fp8_serialized:
        raise UnshareableError(f"{name}: of FP8 weights only those that were quantised beforehand can be shared")
    if method.use_marlin or not method.cutlass_fp8_supported:
        raise UnshareableError(
            f"{name}: on this device stock sglang changes FP8 weights with a scale a tensor after loading them, and "
            f"shared ones must not change. It does not on GPUs with FP8 of their own (Ada, Hopper). {WAY_OUT}"
        )


def _check_channel_fp8(name: str, scheme: Any) -> None:
    if not isinstance(scheme, CompressedTensorsW8A8Fp8) or scheme.strategy != "channel":
        raise UnshareableError(
            f"{name} is quantised by {type(scheme).__name__}; of compressed-tensors only FP8 with a scale for each "
            f"output channel can be shared, on GPUs with FP8 of their own (Ada, Hopper). {WAY_OUT}"
        )
