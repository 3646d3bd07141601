"""Block-wise FP8 linear layers over a store: weights and their scales as strided views.

A row-parallel weight is a range of columns, so that its rows do not follow each other in memory. Stock's Triton
kernel for block-wise FP8 takes strides; only a check before its launch insists on contiguous weights. The CUTLASS
kernels assume contiguous weights and would read wrong ones, so that every other backend is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from torch import nn

from sglang_adapt.upstream.patch import PATCHES, Patch
from sglang_adapt.upstream.weights.refusals import UnshareableError


class StridedBlockFp8(Patch):
    """Lets stock's Triton kernel for block-wise FP8 have weights whose rows do not follow each other.

    Everything else that stock checks before the launch is still checked, against the weight's shape.
    """

    target = "sglang.kernels.ops.quantization.fp8_kernel.prepare_block_fp8_matmul_inputs"
    kind = "around"

    @staticmethod
    def hook(original: Any, activation: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if weight.stride(-1) != 1:
            raise ValueError(f"an FP8 weight of strides {weight.stride()}: the elements of a row must be adjacent")
        shape_only = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return original(activation, shape_only, *args, **kwargs)


def allow_strided_block_fp8(model: nn.Module) -> None:
    """Make the block-wise FP8 layers of a model, if it has any, take views of a store (others: `row_fp8`).

    Raises:
        UnshareableError: weights that stock quantises or repacks itself, or another backend than Triton.
    """
    layers = [
        (name, module.quant_method)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), Fp8LinearMethod) and module.quant_method.block_quant
    ]
    for name, method in layers:
        if method.use_mxfp8 or method.use_marlin or not method.is_checkpoint_fp8_serialized:
            raise UnshareableError(f"{name}: of block-wise FP8 weights only those quantised beforehand can be shared")
        if method.w8a8_block_fp8_linear is not fp8_utils.triton_w8a8_block_fp8_linear:
            raise UnshareableError(
                f"{name} runs on {method.w8a8_block_fp8_linear.__name__}, which does not take the strides of shared "
                f"weights; start with --fp8-gemm-backend triton"
            )
    if layers:
        PATCHES.apply(StridedBlockFp8)
