"""Requests that wait in the router for room, and which of them may still be in time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from sglang_adapt.policy.admission import Outcome


class Held:
    """Two queues, each in order of arrival; best effort goes before background work."""

    def __init__(self) -> None:
        self._queues: dict[Outcome, OrderedDict[str, None]] = {
            Outcome.BEST_EFFORT: OrderedDict(),
            Outcome.BACKGROUND: OrderedDict(),
        }
        self._deadlines: list[tuple[float, str]] = []
        self._tpots: dict[str, float] = {}
        self._of_tpot: Counter[float] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def best_effort(self) -> int:
        """How many wait that are no background work."""
        return len(self._queues[Outcome.BEST_EFFORT])

    @property
    def loosest_ms(self) -> float:
        """The largest TPOT target of best effort that waits; 0 if there is none."""
        return max(self._of_tpot, default=0.0)

    def add(self, rid: str, kind: Outcome, deadline_ms: float | None, tpot_ms: float | None) -> None:
        """A request waits; until `deadline_ms` its first token would be in time."""
        self._queues[kind][rid] = None
        if kind is Outcome.BEST_EFFORT and tpot_ms is not None:
            self._tpots[rid] = tpot_ms
            self._of_tpot[tpot_ms] += 1
        if kind is Outcome.BEST_EFFORT and deadline_ms is not None:
            heappush(self._deadlines, (deadline_ms, rid))

    def drop(self, rid: str) -> None:
        """A request waits no longer, if it did."""
        for queue in self._queues.values():
            queue.pop(rid, None)
        if (tpot_ms := self._tpots.pop(rid, None)) is not None:
            self._of_tpot[tpot_ms] -= 1
            if not self._of_tpot[tpot_ms]:
                del self._of_tpot[tpot_ms]

    def heads(self) -> Iterator[str]:
        """The first of each queue."""
        return (next(iter(queue)) for queue in self._queues.values() if queue)

    def first(self) -> str:
        """The first of all in order of their kind; there is one."""
        return next(self.heads())

    def next_in_time(self, is_late: Callable[[str], bool]) -> str | None:
        """Of best effort that can still be in time, what has the least time left. What is late goes after it."""
        queue = self._queues[Outcome.BEST_EFFORT]
        while self._deadlines:
            rid = self._deadlines[0][1]
            if rid in queue and not is_late(rid):
                return rid
            heappop(self._deadlines)
        return None
