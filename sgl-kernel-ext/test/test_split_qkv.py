"""The QKV splits: the reference against loops, the kernel against the reference, the operators."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from sgl_kernel_ext import split_qkv_ops as ops
from sgl_kernel_ext import split_qkv_reference as reference
from sgl_kernel_ext.split_qkv_reference import (
    QkvBlocks,
    split_qkv_norm_rope_reference,
    split_qkv_reference,
    split_qkv_rope_reference,
)

SHAPES = [
    QkvBlocks(2, 16, 4, 1, 128),  # Llama-3.1-8B at TP 1 of a TP-2 store
    QkvBlocks(4, 5, 1, 1, 64),
    QkvBlocks(3, 4, 1, 1, 96),  # half a head is no power of two
    QkvBlocks(4, 2, 1, 2, 32),  # fewer KV heads than ranks: every block but the first of two drops its copy
    QkvBlocks(8, 4, 1, 4, 16),
    QkvBlocks(1, 3, 2, 1, 8),
]
POSITIONS = 50


def make(shape: QkvBlocks, tokens: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """A block-ordered output whose copies of KV heads are equal, positions, a rotary cache, norm weights."""
    generator = torch.Generator().manual_seed(hash(shape) % 1000 + tokens)
    heads = torch.randn(tokens, shape.blocks, shape.block_heads, shape.head_dim, generator=generator)
    for block in range(shape.blocks):
        original = block // shape.kv_copies * shape.kv_copies
        heads[:, block, shape.q_heads :] = heads[:, original, shape.q_heads :]
    angles = torch.rand(POSITIONS, shape.head_dim // 2, generator=generator) * 6
    weights = 1 + 0.3 * torch.randn(2, shape.head_dim, generator=generator)
    return {
        "qkv": heads.view(tokens, shape.width).to(device, dtype),
        "positions": torch.randint(0, POSITIONS, (tokens,), generator=generator).to(device),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        "q_weight": weights[0].to(device, dtype),
        "k_weight": weights[1].to(device, dtype),
    }


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A second copy of the kernel's module, decorated while Triton's interpreter is on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = Path(reference.__file__).with_name("split_qkv.py")
    spec = importlib.util.spec_from_file_location("split_qkv_interpreted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def compare(kernels: ModuleType, shape: QkvBlocks, tokens: int, dtype: torch.dtype, device: str) -> None:
    x = make(shape, tokens, dtype, device)
    rope = (x["positions"], x["cos_sin"])
    norm = (x["q_weight"], x["k_weight"], 1e-6)
    packed = kernels.split_qkv(x["qkv"], shape)
    assert torch.equal(packed, torch.cat(split_qkv_reference(x["qkv"], shape), dim=1))
    roped = kernels.split_qkv_rope(x["qkv"], *rope, shape)
    close(roped, split_qkv_rope_reference(x["qkv"], *rope, shape), dtype)
    normed = kernels.split_qkv_norm_rope(x["qkv"], *rope, *norm, shape)
    close(normed, split_qkv_norm_rope_reference(x["qkv"], *rope, *norm, shape), dtype)


def close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Equal but for one rounding: fused multiply-adds and the order of a sum may differ."""
    eps = torch.finfo(dtype).eps
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * eps, atol=8 * eps)
        if mine.is_cuda or dtype == torch.float32:  # the interpreter truncates to bfloat16
            assert (mine == theirs).float().mean() > 0.5, "most elements must not differ at all"
    assert torch.equal(got[2], want[2]), "values are only moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_interpreted_kernel_equals_the_reference(
    interpreted: ModuleType, shape: QkvBlocks, dtype: torch.dtype
) -> None:
    compare(interpreted, shape, 3, dtype, "cpu")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_norm_sums_squares_in_the_order_of_a_warp(interpreted: ModuleType, head_dim: int) -> None:
    """To the last bit, for it is stock's order (`test/weights/test_qk_norm_gpu.py`)."""
    shape = QkvBlocks(2, 3, 1, 1, head_dim)
    x = make(shape, 4, torch.float32)
    unturned = torch.cat((torch.ones(head_dim // 2), torch.zeros(head_dim // 2)))[None]
    at_0 = torch.zeros(4, dtype=torch.int64)
    norm = (x["q_weight"], x["k_weight"], 1e-6)
    got = interpreted.split_qkv_norm_rope(x["qkv"], at_0, unturned, *norm, shape)
    for mine, plain, weight in zip(got[:2], split_qkv_reference(x["qkv"], shape)[:2], norm[:2], strict=True):
        heads = plain.view(4, -1, head_dim)
        squares = (heads * heads).view(4, -1, 32, head_dim // 32)
        lanes = squares[..., 0]
        for number in range(1, head_dim // 32):
            lanes = lanes + squares[..., number]
        while (half := lanes.shape[-1] // 2) > 0:
            lanes = lanes[..., :half] + lanes[..., half:]
        # By NumPy, as in the interpreter: PyTorch's root of a vector may differ in the last bit.
        scale = torch.from_numpy(1 / numpy.sqrt((lanes / head_dim + numpy.float32(norm[2])).numpy()))
        assert torch.equal(mine.view_as(heads), heads * scale * weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_reference_on_a_gpu(shape: QkvBlocks, dtype: torch.dtype) -> None:
    from sgl_kernel_ext import split_qkv

    for tokens in (1, 7, 513):
        compare(split_qkv, shape, tokens, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_keeps_the_heads_that_the_order_names(shape: QkvBlocks) -> None:
    """Checked against loops over labels, so that the reference is not its own witness."""
    labels = [
        (kind, block, head)
        for block in range(shape.blocks)
        for kind, count in (("q", shape.q_heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        for head in range(count)
    ]
    row = torch.arange(len(labels)).repeat_interleave(shape.head_dim)[None].float()
    for kind, part in zip("qkv", split_qkv_reference(row, shape), strict=True):
        heads = part.view(-1, shape.head_dim)
        assert bool((heads == heads[:, :1]).all())
        kept = [
            (k, block, head) for k, block, head in labels if k == kind and (kind == "q" or block % shape.kv_copies == 0)
        ]
        assert [labels[int(value)] for value in heads[:, 0]] == kept


def test_the_reference_rotates_by_the_angle_of_the_position() -> None:
    shape = QkvBlocks(1, 1, 1, 1, 4)
    angles = torch.tensor([[0.0, 0.0], [torch.pi / 2, torch.pi]])
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 3])
    q, k, v = split_qkv_rope_reference(qkv, torch.tensor([1]), cos_sin, shape)
    torch.testing.assert_close(q, torch.tensor([[-3.0, -2.0, 1.0, -4.0]]))
    assert torch.equal(q, k) and v.tolist() == [[1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_operators_take_the_reference_on_a_cpu_and_pass_torchs_checks(shape: QkvBlocks) -> None:
    x = make(shape, 5, torch.float32)
    rope = (x["positions"], x["cos_sin"])
    norm = (x["q_weight"], x["k_weight"], 1e-5)
    packed = ops.split_qkv(x["qkv"], shape)
    assert torch.equal(packed, torch.cat(split_qkv_reference(x["qkv"], shape), dim=1))
    roped, want = ops.split_qkv_rope(x["qkv"], *rope, shape), split_qkv_rope_reference(x["qkv"], *rope, shape)
    assert all(torch.equal(a, b) for a, b in zip(roped, want, strict=True))
    normed = ops.split_qkv_norm_rope(x["qkv"], *rope, *norm, shape)
    want = split_qkv_norm_rope_reference(x["qkv"], *rope, *norm, shape)
    assert all(torch.equal(a, b) for a, b in zip(normed, want, strict=True))
    checks = ("test_schema", "test_faketensor")
    library = torch.ops.sgl_kernel_ext
    torch.library.opcheck(library.split_qkv, (x["qkv"], *shape), test_utils=checks)
    torch.library.opcheck(library.split_qkv_rope, (x["qkv"], *rope, *shape), test_utils=checks)
    torch.library.opcheck(library.split_qkv_norm_rope, (x["qkv"], *rope, *norm, *shape), test_utils=checks)


def test_no_tokens_give_no_rows(interpreted: ModuleType) -> None:
    shape = SHAPES[1]
    x = make(shape, 0, torch.float32)
    assert interpreted.split_qkv(x["qkv"], shape).shape == (0, shape.q_width + 2 * shape.kv_width)
    q, k, v = interpreted.split_qkv_rope(x["qkv"], x["positions"], x["cos_sin"], shape)
    assert (q.shape, k.shape, v.shape) == ((0, shape.q_width), (0, shape.kv_width), (0, shape.kv_width))


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"QKV of shape \[2, 7\]"):
        split_qkv_reference(torch.zeros(2, 7), SHAPES[0])
    with pytest.raises(ValueError, match="kv_copies must divide blocks"):
        split_qkv_reference(torch.zeros(2, 7), QkvBlocks(3, 1, 1, 2, 8))


@pytest.mark.parametrize(("norm", "rope"), [(False, False), (False, True), (True, True)])
def test_the_kernel_compiles_for_an_h100_with_wide_accesses(
    norm: bool, rope: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled without one: heads are loaded and stored 8 bytes a thread, and no shared memory is needed."""
    import triton
    from sgl_kernel_ext.split_qkv import _split_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = dict.fromkeys(("qkv", "q", "k", "v"), "*bf16")
    signature |= {"positions": "*i64", "cos_sin": "*fp32"} if rope else {}
    signature |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") if norm else {}
    signature |= {"eps": "fp32"}
    signature |= dict.fromkeys(("qkv_stride", "q_stride", "k_stride", "v_stride", "cos_sin_stride"), "i32")
    constants: dict[str, Any] = {"Q_HEADS": 16, "KV_HEADS": 4, "KV_COPIES": 1, "HEAD_DIM": 128, "HALF": 64}
    constants |= {"HEADS": 8, "NORM": norm, "ROPE": rope}
    constants |= {name: None for name in ("positions", "cos_sin", "q_weight", "k_weight") if name not in signature}
    names = [parameter.name for parameter in _split_kernel.params]
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name.endswith("_stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(_split_kernel, types, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert set(re.findall(r"st\.global[.\w]*", compiled.asm["ptx"])) == {"st.global.v2.b32"}
    assert "ld.global.v2.b32" in compiled.asm["ptx"]
    assert compiled.metadata.shared == 0
