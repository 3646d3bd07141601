"""FP8 products with strided weights go to the kernel that takes strides; scales follow the store's order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.quantization import fp8_utils

from sglang_adapt.upstream.weights.row_fp8 import StridedRowFp8, TensorFp8OnViews, part_widths


def of_type(layer: type, **attributes: Any) -> Any:
    """A layer with nothing but some attributes."""
    made = layer.__new__(layer)
    made.__dict__.update(attributes)
    return made


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "widths"),
    [
        (4, 4, [64, 32, 32]),
        (4, 2, [64, 32, 32] * 2),
        (4, 1, [64, 32, 32] * 4),
        # Two KV heads, repeated for four shards.
        (2, 1, [64, 32, 32] * 4),
        (8, 2, [64, 64, 64] * 2),
    ],
)
def test_widths_of_fused_qkv_are_those_of_the_stores_blocks(kv_heads: int, tp_size: int, widths: list[int]) -> None:
    layer = of_type(
        QKVParallelLinear,
        total_num_heads=8,
        total_num_kv_heads=kv_heads,
        head_size=32,
        v_head_size=32,
        tp_size=tp_size,
    )
    assert part_widths(layer, 4) == widths


def test_widths_of_other_layers() -> None:
    assert part_widths(of_type(MergedColumnParallelLinear, output_sizes=[512, 512], tp_size=2), 4) == [128] * 4
    assert part_widths(of_type(torch.nn.Linear, weight=torch.empty(48, 16)), 4) == [48]


def test_scales_repeat_over_the_blocks_and_the_parameters_stay() -> None:
    method = TensorFp8OnViews(SimpleNamespace(), [2, 1, 1] * 2, filling=False)
    weight, scales, inputs = torch.ones(8, 4), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.3, 0.2])
    layer: Any = SimpleNamespace(weight=weight, weight_scale=scales, input_scale=inputs)
    method.process_weights_after_loading(layer)
    assert method._row_scales is not None and method._input_scale is not None
    assert method._row_scales.tolist() == [[1], [1], [2], [3], [1], [1], [2], [3]]
    assert method._input_scale.shape == () and method._input_scale == inputs[1]
    assert (layer.weight, layer.weight_scale, layer.input_scale) == (weight, scales, inputs)


def test_only_weights_with_gaps_between_rows_leave_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, torch.Size, tuple[int, ...]]] = []

    def kernel(name: str) -> Any:
        return lambda x, weight, *rest: called.append((name, x.shape, weight.stride()))

    monkeypatch.setattr(fp8_utils, "triton_scaled_mm", kernel("triton"))
    whole = torch.zeros(32, 64)
    x, scales = torch.zeros(3, 64), torch.ones(3, 1)
    for weight in (whole, whole[8:16], whole[:, 16:32]):
        StridedRowFp8.hook(kernel("cutlass"), x[:, : weight.shape[1]], weight.t(), scales, scales, torch.bfloat16)
    assert [(name, stride) for name, _, stride in called] == [
        ("cutlass", (1, 64)),
        ("cutlass", (1, 64)),
        ("triton", (1, 64)),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_range_of_columns_gives_what_its_copy_gives(tokens: int, with_bias: bool) -> None:
    """The product with a strided weight is that of exact arithmetic, as is stock's with a contiguous copy."""
    torch.manual_seed(0)
    whole = torch.randn(512, 1024, device="cuda").to(torch.float8_e4m3fn)
    part = whole[:, 256:768]
    x = torch.randn(tokens, 512, device="cuda").to(torch.float8_e4m3fn)
    x_scale = torch.rand(tokens, 1, device="cuda") + 0.5
    scale = torch.rand(512, 1, device="cuda") + 0.5
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16) if with_bias else None
    stock = fp8_utils.fp8_scaled_mm
    ours = StridedRowFp8.hook(stock, x, part.t(), x_scale, scale, torch.bfloat16, bias)
    copied = stock(x, part.contiguous().t(), x_scale, scale, torch.bfloat16, bias)
    exact = (x.double() * x_scale) @ (part.double() * scale).t()
    exact = exact if bias is None else exact + bias
    torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=0.2)
    torch.testing.assert_close(copied.double(), exact, rtol=2e-2, atol=0.2)
