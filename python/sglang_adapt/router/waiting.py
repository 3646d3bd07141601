"""Requests that are accepted and in no engine: for the end of a switch, for an engine that holds them, or for room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sglang_adapt.router.long_requests import LongRequests


class Message(NamedTuple):
    """A request as it came: about how many tokens its prompt has, and the stock message."""

    tokens: int
    data: bytes


class Waiting:
    """See the module.

    Args:
        long: has those that wait for an engine that holds them.

    Attributes:
        paused: a switch has taken all engines out of dispatch.
        for_room: no engine has room by their tier's targets; `Admission` says who goes next.
    """

    def __init__(self, long: LongRequests) -> None:
        self._long = long
        self.paused: dict[str, Message] = {}
        self.for_room: dict[str, Message] = {}

    def __len__(self) -> int:
        return len(self.paused) + len(self._long.waiting) + len(self.for_room)

    def __iter__(self) -> Iterator[str]:
        yield from self.paused
        yield from self._long.waiting
        yield from self.for_room

    def drop(self, rid: str) -> None:
        """A request that is here waits no more."""
        if self.paused.pop(rid, None) is None and self.for_room.pop(rid, None) is None:
            self._long.drop(rid)

    def take_after_switch(self) -> list[tuple[str, int, bytes]]:
        """All that another layout may let go, as (id, tokens, message), none of which waits any more: first what waited
        for an engine that holds it."""
        paused, self.paused = self.paused, {}
        return [*self._long.take(), *((rid, one.tokens, one.data) for rid, one in paused.items())]
