"""How fast KV gets from one GPU to another, by the way that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_adapt.core.copy_path import CopyPath

COPY_BYTES_PER_S: Mapping[CopyPath, float] = {CopyPath.PEER: 392e9, CopyPath.STAGED: 21e9}
"""Out of one GPU and into one, measured on 2 H200 (`bench_kv_copy_2xH200.json`; STAGED is its `staged_host`)."""
