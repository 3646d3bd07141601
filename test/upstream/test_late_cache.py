"""What has arrived is put into the prefix cache a little at a time, and never before its first batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import common

from sglang_adapt.upstream.handoff import late_cache


def _req(slot: int) -> Any:
    return SimpleNamespace(req_pool_idx=slot, retraction_count=0, cache_protected_len=0, finished=lambda: False)


def test_the_first_batch_comes_before_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []
    monkeypatch.setattr(common, "maybe_cache_unfinished_req", lambda req, cache: cached.append(req.req_pool_idx))
    scheduler = SimpleNamespace(last_batch=None, tree_cache=None)
    late_cache.forget()
    late_cache.cache_later([_req(1), _req(2), _req(3)])
    assert late_cache.cache_some(scheduler) is False
    assert cached == []
    scheduler.last_batch = object()
    late_cache.cache_some(scheduler)
    assert cached == [1, 2]
    late_cache.cache_some(scheduler)
    late_cache.cache_some(scheduler)
    assert cached == [1, 2, 3]
