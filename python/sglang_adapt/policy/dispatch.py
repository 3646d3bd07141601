"""Which engine gets the next request."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class LeastLoaded(Generic[Key]):
    """The engines that may get requests, and the one with the least load.

    Load is (unfinished requests, their prompt tokens): requests first, because each costs a slot of every
    decode step; tokens break ties. Equal loads go to the engine that was added first, so the choice is
    determined by the order of calls alone.

    A heap with lazy deletion: `add`, `remove`, `assign` and `release` push the new load; `least` drops stale
    entries. All are O(log n) amortised.
    """

    def __init__(self, engines: Iterable[Key] = ()) -> None:
        self._load: dict[Key, tuple[int, int]] = {}
        self._order: dict[Key, int] = {}
        self._heap: list[tuple[int, int, int, Key]] = []
        for engine in engines:
            self.add(engine)

    def __contains__(self, engine: Key) -> bool:
        return engine in self._load

    def __len__(self) -> int:
        return len(self._load)

    def add(self, engine: Key, requests: int = 0, tokens: int = 0) -> None:
        """Let an engine take requests; it may have some already."""
        if engine in self._load:
            raise ValueError(f"engine {engine} is in dispatch already")
        self._order.setdefault(engine, len(self._order))
        self._set(engine, requests, tokens)

    def remove(self, engine: Key) -> None:
        """Send an engine no more requests."""
        if engine not in self._load:
            raise ValueError(f"engine {engine} is not in dispatch")
        del self._load[engine]

    def load(self, engine: Key) -> tuple[int, int]:
        """(unfinished requests, their prompt tokens) of an engine in dispatch."""
        return self._load[engine]

    def least(self) -> Key | None:
        """The engine with the least load, or None if there is none."""
        heap = self._heap
        while heap:
            requests, tokens, _, engine = heap[0]
            if self._load.get(engine) == (requests, tokens):
                return engine
            heapq.heappop(heap)
        return None

    def assign(self, engine: Key, tokens: int) -> None:
        """A request with `tokens` prompt tokens went to an engine in dispatch."""
        requests, total = self._load[engine]
        self._set(engine, requests + 1, total + tokens)

    def release(self, engine: Key, tokens: int) -> None:
        """A request with `tokens` prompt tokens ended; ignored if the engine has left dispatch."""
        load = self._load.get(engine)
        if load is not None:
            self._set(engine, load[0] - 1, load[1] - tokens)

    def _set(self, engine: Key, requests: int, tokens: int) -> None:
        self._load[engine] = (requests, tokens)
        heapq.heappush(self._heap, (requests, tokens, self._order[engine], engine))
        if len(self._heap) > 8 * len(self._load) + 64:
            self._heap = [(r, t, self._order[e], e) for e, (r, t) in self._load.items()]
            heapq.heapify(self._heap)
