"""Where requests go: by the router's own admission, or, as stock, at once to the engine with the least load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation
from sglang_adapt.core.layout import Role
from sglang_adapt.core.messages import AdmitRequest, RequestReport
from sglang_adapt.core.profile import ProfileKey
from sglang_adapt.core.slo import SloConfig, request_terms
from sglang_adapt.policy.dispatch import LeastLoaded
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import OPEN, Limits
from sglang_adapt.policy.profile import Corrected, Times, shared_corrections
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.simulate.engine import Progress, Request, SimulatedEngine
from sglang_adapt.simulate.hardware import Hardware

_KEY = ProfileKey("simulated", "", "", "", "", "")

Place = Callable[[Request, str], None]
"""Sends a request to an engine."""


class Routing(Protocol):
    """Decides where requests go. Engines are named; `serving` are those that get requests now."""

    def serve(self, names: Sequence[str]) -> None:
        """These engines get requests from now on; what waits for one goes there."""
        ...

    def arrive(self, request: Request) -> None:
        """A request has come: it is placed, waits, or is refused."""
        ...

    def progressed(self, engine: SimulatedEngine, progress: Progress) -> None:
        """An engine has given tokens; `let_go` comes next, if requests have begun to decode or ended."""
        ...

    def let_go(self) -> None:
        """There may be room for what waits."""
        ...

    def moved(self, request: Request, engine: str) -> None:
        """A switch has carried a request to another engine."""
        ...

    def left(self, engine: SimulatedEngine, requests: Sequence[Request]) -> None:
        """Requests have left an engine in a switch, or for one that decodes, with what they have given."""
        ...

    def use_roles(self, roles: Mapping[str, Role]) -> None:
        """Engines by name do this from now on."""
        ...

    def decode_within(self, request: Request, names: Sequence[str]) -> set[str]:
        """Those of these engines that a request with its first token may go to, so that no target suffers."""
        ...

    def handed_over(self, request: Request, engine: str) -> None:
        """A request that another engine has read goes on at this one, which gets none from clients."""
        ...

    def limits(self, name: str) -> Limits:
        """Of an engine's iterations now."""
        ...

    def speeds(self) -> tuple[Speed, ...]:
        """Of the engines, as they are believed to be."""
        ...

    def assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        """Which tiers are promised their targets on which engines, by name."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that are in no engine."""
        ...

    def held(self) -> Iterable[Request]:
        """Those requests."""
        ...

    @property
    def ages(self) -> bool:
        """Does what waits get room as time passes, too?"""
        ...


class LeastLoad:
    """As stock: no tiers, nothing is refused, each goes at once to the engine with the least load."""

    ages = False

    def __init__(self, hardware: Hardware, place: Place) -> None:
        self._hardware = hardware
        self._place = place
        self._dispatch: LeastLoaded[str] = LeastLoaded()
        self._queue: list[Request] = []
        self._load: dict[str, tuple[int, int]] = {}
        self._serving: tuple[str, ...] = ()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def held(self) -> Iterable[Request]:
        return tuple(self._queue)

    def serve(self, names: Sequence[str]) -> None:
        for name in set(self._serving) - set(names):
            self._dispatch.remove(name)
        for name in names:
            if name not in self._dispatch:
                self._dispatch.add(name)
        self._serving = tuple(names)
        queue, self._queue = self._queue, []
        for request in queue:
            self.arrive(request)

    def arrive(self, request: Request) -> None:
        name = self._dispatch.least()
        if name is None:
            self._queue.append(request)
            return
        self._dispatch.assign(name, request.arrival.prompt)
        self._place(request, name)

    def progressed(self, engine: SimulatedEngine, progress: Progress) -> None:
        if engine.name in self._dispatch:  # Else it has its requests from another one, which it serves for.
            for request in progress.first:
                self._dispatch.read(engine.name, request.arrival.prompt)
            for _ in progress.ended:
                self._dispatch.release(engine.name, 0)

    def let_go(self) -> None:
        pass

    def moved(self, request: Request, engine: str) -> None:
        if engine not in self._dispatch:
            self._dispatch.add(engine)
        self._dispatch.assign(engine, _unread(request))

    def left(self, engine: SimulatedEngine, requests: Sequence[Request]) -> None:
        for request in requests:
            self._dispatch.release(engine.name, _unread(request))

    def use_roles(self, roles: Mapping[str, Role]) -> None:
        pass

    def decode_within(self, request: Request, names: Sequence[str]) -> set[str]:
        return set(names)

    def handed_over(self, request: Request, engine: str) -> None:
        pass

    def limits(self, name: str) -> Limits:
        return OPEN

    def speeds(self) -> tuple[Speed, ...]:
        return _speeds(self._hardware, self._hardware.times)

    def assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        pass


def _unread(request: Request) -> int:
    """Prompt tokens of a request that count in an engine's load: none once it has its first token."""
    return request.arrival.prompt if math.isnan(request.first_ms) else 0


@dataclass(frozen=True)
class _Settings(TierSettings):
    """Tiers, and times that are given."""

    known: Mapping[int, Times] = field(default_factory=dict)

    def times(self, tp: int) -> Times:
        return self.known[tp]


class ByTiers:
    """By the router's `Admission`, called as the router calls it.

    Args:
        config: the tiers.
        hardware: what engines can do.
        tp_of: TP size of every engine, by name.
        place: sends a request to an engine.
        clock_ms: the time.
        report: told how each request has ended.
        ablation: what is switched off of admission.
    """

    ages = True

    def __init__(
        self,
        config: SloConfig,
        hardware: Hardware,
        tp_of: Mapping[str, int],
        place: Place,
        clock_ms: Callable[[], float],
        report: Callable[[RequestReport], None] = lambda report: None,
        ablation: Ablation = NOTHING_OFF,
    ) -> None:
        sizes = hardware.tp_sizes
        settings = _Settings(config, "simulated", _KEY, sizes, 0, hardware.profile, (), known=hardware.times)
        self.admission = Admission(settings, tp_of, hardware.bounds, report, clock_ms, ablation)
        self._hardware = hardware
        self._place = place
        self._terms = {tier.name: request_terms(config, tier.name) for tier in config.tiers}
        self._engines = {name: Engine(name, _nowhere, EngineState.READY) for name in tp_of}
        self._serving: list[Engine] = []
        self._held: dict[str, Request] = {}
        self._queue: list[Request] = []
        self._told: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        return len(self._held) + len(self._queue)

    def held(self) -> Iterable[Request]:
        return (*self._queue, *self._held.values())

    def serve(self, names: Sequence[str]) -> None:
        self._serving = [self._engines[name] for name in names]
        if self._serving:
            queue, self._queue = self._queue, []
            for request in queue:
                self._enter(request)
            self.let_go()

    def arrive(self, request: Request) -> None:
        arrival = request.arrival
        asked = AdmitRequest(request.number, self._terms[arrival.tier], arrival.prompt, arrival.output, arrival.at_ms)
        if not self.admission.ask(asked, self._serving).admitted:
            request.refused = True
            return
        self.admission.named(request.rid, asked)
        if self._serving:
            self._enter(request)
        else:
            self._queue.append(request)

    def _enter(self, request: Request) -> None:
        name = self.admission.offer(request.rid, request.arrival.prompt, b"", self._serving)
        if name is not None:
            self._send(request, name)
        else:
            self._held[request.rid] = request
            self.let_go()

    def _send(self, request: Request, name: str) -> None:
        request.rank = self.admission.priority(request.rid)
        self.admission.moved(request.rid, name, request.arrival.prompt)
        self.admission.placed(request.rid, self._engines[name])
        self._told[request.number] = 0
        self._place(request, name)

    def let_go(self) -> None:
        if not self._held:
            return
        while (found := self.admission.next_held(self._serving)) is not None:
            rid, name = found
            self._send(self._held.pop(rid), name)

    def progressed(self, engine: SimulatedEngine, progress: Progress) -> None:
        view = self._engines[engine.name]
        if progress.tokens:
            self.admission.grown(engine.name, progress.tokens)
            self._watch(engine, view)
        for request in progress.first:
            self._told[request.number] = 1
            self.admission.output(request.rid, 1, view)
        for request in progress.ended:
            self._tell(request, view)
            del self._told[request.number]
            self.admission.ended(request.rid, view, finished=True)
            self.admission.left(request.rid)

    def _watch(self, engine: SimulatedEngine, view: Engine) -> None:
        """Tell of one request that decodes, whose tokens say how long a step takes."""
        seen = engine.next_to_end
        if seen is not None:
            request, given = seen
            if (ahead := given - self._told[request.number]) > 0:
                self.admission.grown(engine.name, -ahead)
                self.admission.output(request.rid, given, view)
                self._told[request.number] = given

    def _tell(self, request: Request, engine: Engine) -> None:
        """Tell of a request's tokens that were told as the engine's only."""
        ahead = request.given - self._told[request.number]
        if ahead > 0:
            self.admission.grown(engine.name, -ahead)
            self.admission.output(request.rid, request.given, engine)
            self._told[request.number] = request.given

    def moved(self, request: Request, engine: str) -> None:
        self.admission.moved(request.rid, engine, request.arrival.prompt)

    def left(self, engine: SimulatedEngine, requests: Sequence[Request]) -> None:
        for request in requests:
            self._tell(request, self._engines[engine.name])

    def use_roles(self, roles: Mapping[str, Role]) -> None:
        self.admission.roles = lambda: roles

    def decode_within(self, request: Request, names: Sequence[str]) -> set[str]:
        return self.admission.decode_within(request.rid, [self._engines[name] for name in names])

    def handed_over(self, request: Request, engine: str) -> None:
        self.admission.moved(request.rid, engine, request.arrival.prompt)

    def limits(self, name: str) -> Limits:
        return self.admission.limits(self._engines[name])

    def assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        self.admission.assign(tiers_of)

    def speeds(self) -> tuple[Speed, ...]:
        known = shared_corrections(self.admission.corrections, measured=self._hardware.profile is not None)
        times = {tp: Corrected(times, known[tp]) for tp, times in self._hardware.times.items()}
        return _speeds(self._hardware, times)


def _speeds(hardware: Hardware, times: Mapping[int, Times]) -> tuple[Speed, ...]:
    longest = hardware.request_tokens
    return tuple(Speed(tp, times[tp], hardware.bounds[tp], hardware.kv_tokens[tp], longest) for tp in hardware.tp_sizes)


def _nowhere(data: bytes) -> None:
    raise AssertionError("a simulated engine gets no messages")
