"""Which way KV goes from GPU to GPU."""

from __future__ import annotations

import pytest

from sglang_adapt.core.copy_path import AUTO, CopyPath, CopyPathError, choose_path, path_text

PAIRS = [(0, 1), (1, 0)]


def test_the_gpus_decide_unless_somebody_else_has() -> None:
    assert choose_path(AUTO, []) is CopyPath.PEER
    assert choose_path(AUTO, PAIRS) is CopyPath.STAGED
    assert choose_path("peer", []) is CopyPath.PEER
    assert choose_path("staged", []) is choose_path("staged", PAIRS) is CopyPath.STAGED


def test_what_the_gpus_cannot_do_is_refused() -> None:
    with pytest.raises(CopyPathError, match="no peer access between GPUs 0-1, 1-0; give staged, or auto"):
        choose_path("peer", PAIRS)
    with pytest.raises(ValueError, match="nccl"):
        choose_path("nccl", [])


def test_it_is_told_why() -> None:
    assert path_text(CopyPath.PEER, AUTO, []).startswith("peer")
    assert path_text(CopyPath.STAGED, AUTO, PAIRS).endswith("(no peer access between GPUs 0-1, 1-0)")
    assert path_text(CopyPath.STAGED, "staged", []).endswith("(--adapt-kv-copy staged)")
