"""Which engine gets the next request."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

REQUEST_TOKENS = 512
"""What an unfinished request is counted for beside its prompt: it slows each decode step of the others by a little, in
all about as much as so many tokens of a prompt that is read (Llama-3.1-8B on one H200: 25 us a token of a prompt, 0.06
ms a step and request)."""


class LeastLoaded(Generic[Key]):
    """The engines that may get requests, and the one with the least load.

    Load is counted in prompt tokens: those of all requests that have no token yet, and `REQUEST_TOKENS` for each
    unfinished one. So an engine whose requests all decode comes before one that has as many still to read: requests
    that end together are followed by others that do not all go to the engine where they ended. Equal loads go to the
    engine that was added first, so the choice is determined by the order of calls alone.

    A heap with lazy deletion: `add`, `remove`, `assign`, `read` and `release` push the new load; `least` drops stale
    entries. All are O(log n) amortised.
    """

    def __init__(self, engines: Iterable[Key] = ()) -> None:
        self._load: dict[Key, int] = {}
        self._order: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        for engine in engines:
            self.add(engine)

    def __contains__(self, engine: Key) -> bool:
        return engine in self._load

    def __len__(self) -> int:
        return len(self._load)

    def add(self, engine: Key, requests: int = 0, unread: int = 0) -> None:
        """Let an engine take requests; it may have some already, with so many prompt tokens to read."""
        if engine in self._load:
            raise ValueError(f"engine {engine} is in dispatch already")
        self._order.setdefault(engine, len(self._order))
        self._set(engine, requests * REQUEST_TOKENS + unread)

    def remove(self, engine: Key) -> None:
        """Send an engine no more requests."""
        if engine not in self._load:
            raise ValueError(f"engine {engine} is not in dispatch")
        del self._load[engine]

    def load(self, engine: Key) -> int:
        """The load of an engine in dispatch, tokens."""
        return self._load[engine]

    def least(self) -> Key | None:
        """The engine with the least load, or None if there is none."""
        heap = self._heap
        while heap:
            load, _, engine = heap[0]
            if self._load.get(engine) == load:
                return engine
            heapq.heappop(heap)
        return None

    def assign(self, engine: Key, unread: int) -> None:
        """A request with so many prompt tokens to read went to an engine in dispatch."""
        self._set(engine, self._load[engine] + REQUEST_TOKENS + unread)

    def read(self, engine: Key, tokens: int) -> None:
        """An engine has read a prompt of so many tokens; ignored if it has left dispatch."""
        self._change(engine, -tokens)

    def release(self, engine: Key, unread: int) -> None:
        """A request has left an engine, with so many prompt tokens that were not read; ignored as with `read`."""
        self._change(engine, -REQUEST_TOKENS - unread)

    def _change(self, engine: Key, by: int) -> None:
        load = self._load.get(engine)
        if load is not None:
            self._set(engine, load + by)

    def _set(self, engine: Key, load: int) -> None:
        self._load[engine] = load
        heapq.heappush(self._heap, (load, self._order[engine], engine))
        if len(self._heap) > 8 * len(self._load) + 64:
            self._heap = [(load, self._order[e], e) for e, load in self._load.items()]
            heapq.heapify(self._heap)
