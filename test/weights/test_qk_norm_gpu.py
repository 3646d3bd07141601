"""The q/k norm in the split of block-ordered QKV, bit for bit against stock's own kernel."""

from __future__ import annotations

import pytest
import torch
from sgl_kernel_ext.split_qkv_reference import QkvBlocks, split_qkv_reference

pytestmark = pytest.mark.gpu

EPS = 1e-6


@pytest.mark.parametrize("tokens", [1, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_norm_in_the_split_gives_the_bits_of_stocks(head_dim: int, dtype: torch.dtype, tokens: int) -> None:
    from sgl_kernel_ext.split_qkv import split_qkv_norm_rope
    from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

    torch.manual_seed(head_dim + tokens)
    shape = QkvBlocks(2, 16, 4, 1, head_dim)
    qkv = torch.randn(tokens, shape.width, device="cuda", dtype=dtype)
    q_weight, k_weight = 1 + 0.1 * torch.randn(2, head_dim, device="cuda", dtype=dtype)
    q, k, v = split_qkv_reference(qkv, shape)
    heads = [part.view(tokens, -1, head_dim) for part in (q, k)]
    fused_inplace_qknorm(*heads, q_weight, k_weight, EPS, head_dim=head_dim)
    # At position 0 nothing is rotated.
    unturned = torch.cat((torch.ones(head_dim // 2), torch.zeros(head_dim // 2)))[None].cuda()
    positions = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    ours = split_qkv_norm_rope(qkv, positions, unturned, q_weight, k_weight, EPS, shape)
    for mine, theirs in zip(ours, (q, k, v), strict=True):
        assert torch.equal(mine, theirs), f"{(mine != theirs).sum()} of {mine.numel()} differ"
