"""Putting the KV that arrived with requests into the prefix cache: later, a little in each iteration, while they run.

A request runs as well without; the cache matters to those that come after it. At the moment of a move nothing is worth
waiting for but the next token, so nothing is cached before the first batch has been launched: with overlap scheduling
the device computes that one meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_adapt.upstream.handoff.iteration import before_each_batch

PER_ITERATION = 2
"""Requests that are cached before a batch; each takes about half a millisecond on the host."""


@dataclass(frozen=True)
class _Arrived:
    """A running request whose pages are all its own, and what tells that it still is as it arrived."""

    req: Any
    slot: int
    retractions: int

    @property
    def unchanged(self) -> bool:
        req = self.req
        here = req.req_pool_idx == self.slot and req.retraction_count == self.retractions
        return here and not req.finished() and req.cache_protected_len == 0


_waiting: deque[_Arrived] = deque()


def cache_later(reqs: Iterable[Any]) -> None:
    """Note requests that have just been seated, their fill ids and extend range those of their KV."""
    _waiting.extend(_Arrived(req, req.req_pool_idx, req.retraction_count) for req in reqs)


def forget() -> None:
    """The engine's requests are being taken out: those that are not cached yet will not be."""
    _waiting.clear()


@before_each_batch
def cache_some(scheduler: Any) -> bool:
    """Put a few of the noted requests into the cache, as stock does after a prefill; same order on all ranks. Stock
    knows no running request that is not cached."""
    if not _waiting or scheduler.last_batch is None:
        return False
    from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

    for _ in range(min(PER_ITERATION, len(_waiting))):
        arrived = _waiting.popleft()
        if arrived.unchanged:
            maybe_cache_unfinished_req(arrived.req, scheduler.tree_cache)
    return False
