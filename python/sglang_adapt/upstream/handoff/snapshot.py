"""The source of a move, ahead of it: what the requests that decode consist of now, while they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_adapt.core.handoff import CarriedRequest, RequestKind
from sglang_adapt.upstream.handoff.delta import State, delta_of, state_of
from sglang_adapt.upstream.handoff.pack import describe, pack


@dataclass(frozen=True)
class _Snapshot:
    """One request as it was.

    Attributes:
        req: stock's request.
        retractions: how often it had lost its KV.
        ahead: its first tokens that were to be copied.
        pages: this rank's pages of these tokens, in order.
        state: what its state was; on rank 0 only.
    """

    req: Any
    retractions: int
    ahead: int
    pages: list[int]
    state: State | None


class Snapshots:
    """What this rank has told of its requests in one epoch."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._by_rid: dict[str, _Snapshot] = {}

    def add(self, req: Any, pages: Sequence[int], page_size: int, unit: int, first_rank: bool) -> CarriedRequest | None:
        """Note a running request, the KV of all its tokens but the last in `pages`.

        Args:
            unit: as in SnapshotCall.

        Returns:
            its message, on rank 0.
        """
        tokens = req.seqlen - 1
        ahead = tokens // unit * unit
        state = state_of(req) if first_rank else None
        self._by_rid[req.rid] = _Snapshot(req, req.retraction_count, ahead, list(pages[: ahead // page_size]), state)
        if not first_rank:
            return None
        return pack(req, RequestKind.RUNNING, tokens, ahead)

    def all_pages(self) -> list[list[int]]:
        """For each request, in the order told, this rank's pages of the tokens in `ahead`."""
        return [then.pages for then in self._by_rid.values()]

    def ahead(self, req: Any, pages: Sequence[int]) -> int | None:
        """Tokens of a running request whose KV still is where it was told to be; None if it was not told, or has been
        read, or has lost its KV, since."""
        then = self._by_rid.get(req.rid)
        if then is None or then.req is not req or then.retractions != req.retraction_count:
            return None
        return then.ahead if list(pages[: len(then.pages)]) == then.pages else None

    def describe(self, req: Any, kv_tokens: int, ahead: int) -> CarriedRequest:
        """The message of a running request, of which `ahead` says that it was told; on rank 0."""
        state = self._by_rid[req.rid].state
        delta = None if state is None else delta_of(req, state)
        if delta is None:
            return pack(req, RequestKind.RUNNING, kv_tokens, ahead)
        return describe(req, RequestKind.RUNNING, kv_tokens, b"", delta, ahead)
