"""All engines of a deployment in simulated time: a heap of what happens next, and nothing else that knows the time.

Of things at the same time, batches end first, then requests arrive, then the planner plans. So a run depends on its
input alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from sglang_adapt.core.layout import EngineSpec, candidate_engines
from sglang_adapt.simulate.engine import Request, SimulatedEngine
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.load import Arrival
from sglang_adapt.simulate.routing import Routing

LET_GO_MS = 50.0
"""As the router: what waits is looked at again, and limits are told, at least so often."""


class Handovers(Protocol):
    """Takes requests from engines that only read."""

    def first_token(self, request: Request, engine: SimulatedEngine) -> None:
        """A request has its first token, and its engine is between two batches."""
        ...


class SimulationError(RuntimeError):
    """The simulation contradicts itself; a fault of this program."""


class Node:
    """See the module.

    Args:
        arrivals: in order of time.
        hardware: what engines can do.
        gpus: of the deployment.
        progress: told now and then how many requests of all have ended.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        hardware: Hardware,
        gpus: int,
        progress: Callable[[int, int, float], None] = lambda ended, of, now_ms: None,
    ) -> None:
        self.now_ms = 0.0
        self.requests = [Request(n, f"r{n}", one, unread=one.prompt) for n, one in enumerate(arrivals)]
        self.specs: dict[str, EngineSpec] = {spec.name: spec for spec in candidate_engines(hardware.tp_sizes, gpus)}
        self.engines = {
            name: SimulatedEngine(spec, hardware.real(spec.tp), hardware.bounds[spec.tp], hardware.kv_tokens[spec.tp])
            for name, spec in self.specs.items()
        }
        self.ended = 0
        self.batches = 0
        self.handovers: Handovers | None = None
        self._routing: Routing | None = None
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._due: list[tuple[float, int, SimulatedEngine]] = []
        self._sequence = 0
        self._told: dict[str, float] = {}
        self._progress = progress
        self._looking = False
        self.accepted: list[Callable[[Request], None]] = []
        self.finished: list[Callable[[Request], None]] = []
        self.stop = False

    @property
    def routing(self) -> Routing:
        assert self._routing is not None
        return self._routing

    def use(self, routing: Routing) -> None:
        """Requests are placed by this."""
        self._routing = routing

    @property
    def is_over(self) -> bool:
        """Has every request ended?"""
        return self.ended == len(self.requests)

    def at(self, time_ms: float, what: Callable[[], None]) -> None:
        """Do something at a time that has not passed."""
        self._sequence += 1
        heappush(self._events, (max(time_ms, self.now_ms), 1, self._sequence, what))

    def place(self, request: Request, name: str) -> None:
        """A request goes to an engine now."""
        engine = self.engines[name]
        self._limit(engine, placed=True)
        engine.add(request, self.now_ms)
        self.schedule(engine)

    def schedule(self, engine: SimulatedEngine) -> None:
        """An engine's next batch may end at another time now."""
        due = engine.due_ms
        if due < math.inf:
            self._sequence += 1
            heappush(self._due, (due, self._sequence, engine))

    def run(self) -> None:
        """Until every request has ended, or somebody sets `stop`. Raises SimulationError if that never is."""
        coming, number, step = self.requests, 0, max(1, len(self.requests) // 50)
        told = 0
        due, events = self._due, self._events
        while not self.is_over and not self.stop:
            ends = due[0][0] if due else math.inf
            arrives = coming[number].arrival.at_ms if number < len(coming) else math.inf
            other = events[0][0] if events else math.inf
            if ends <= arrives and ends <= other:
                if ends == math.inf:
                    raise SimulationError(self._stuck())
                engine = heappop(due)[2]
                if engine.due_ms == ends:
                    self.now_ms = ends
                    self._batch_ended(engine)
            elif arrives <= other:
                self.now_ms = arrives
                self._arrive(coming[number])
                number += 1
            else:
                self.now_ms = other
                heappop(events)[3]()
            if self.ended >= told + step:
                told = self.ended
                self._progress(told, len(coming), self.now_ms)

    def _arrive(self, request: Request) -> None:
        self.routing.arrive(request)
        if request.refused:
            self.ended += 1
            self._tell(self.finished, request)
        else:
            self._tell(self.accepted, request)
        self._look()

    def _batch_ended(self, engine: SimulatedEngine) -> None:
        self.batches += 1
        progress = engine.finish()
        self.ended += len(progress.ended)
        for request in progress.ended:
            self._tell(self.finished, request)
        self.routing.progressed(engine, progress)
        if self.handovers is not None:
            for request in progress.first:
                if not request.done:
                    self.handovers.first_token(request, engine)
        if progress.first or progress.ended:
            self.routing.let_go()
        self._limit(engine, placed=False)
        engine.start(self.now_ms)
        self.schedule(engine)

    def _limit(self, engine: SimulatedEngine, *, placed: bool) -> None:
        if placed or self.now_ms - self._told.get(engine.name, -math.inf) >= LET_GO_MS:
            self._told[engine.name] = self.now_ms
            engine.limits = self.routing.limits(engine.name)

    @staticmethod
    def _tell(whom: list[Callable[[Request], None]], request: Request) -> None:
        for told in whom:
            told(request)

    def _look(self) -> None:
        """Look at what waits as time passes, while anything does."""
        if not self._looking and self.routing.ages and self.routing.waiting:
            self._looking = True
            self.at(self.now_ms + LET_GO_MS, self._looked)

    def _looked(self) -> None:
        self._looking = False
        self.routing.let_go()
        self._look()

    def _stuck(self) -> str:
        left = [request.rid for request in self.requests if not request.refused and not request.done]
        return (
            f"{len(left)} requests, {left[0]} among them, never end: nothing happens any more at "
            f"{self.now_ms / 1e3:.3f} s, and {self.routing.waiting} of them are in no engine"
        )
