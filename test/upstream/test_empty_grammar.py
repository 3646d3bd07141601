"""A mask without a token is lifted, and no other one."""

from __future__ import annotations

import torch

from sglang_adapt.upstream.empty_grammar import SomeTokenMayCome


def test_only_a_mask_without_a_token_is_lifted() -> None:
    mask = torch.tensor([[0, 0], [0, 1 << 30], [0, 0]], dtype=torch.int32)
    for row in (0, 1):
        SomeTokenMayCome.hook(None, None, mask, row)
    assert mask.tolist() == [[-1, -1], [0, 1 << 30], [0, 0]]
