"""Systems under one load: ours with a layout that stays or follows the traffic, stock, and stock split by tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.core.layout import Layout, uniform_layout
from sglang_adapt.core.slo import SloConfig
from sglang_adapt.policy.price import Price
from sglang_adapt.simulate.control import Control, SwitchMade
from sglang_adapt.simulate.engine import Request
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.load import Arrival
from sglang_adapt.simulate.node import Node
from sglang_adapt.simulate.outcome import Judged, counted, judge, met, timeline
from sglang_adapt.simulate.routing import ByTiers, LeastLoad, Routing

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class System:
    """What is simulated.

    Attributes:
        hardware: what engines can do.
        gpus: of the deployment.
        layout: that serves first.
        admission: requests are placed by tiers; else as stock does.
        interval_s: of the planner's windows; None: the layout stays.
        price: that switches really have; None: that of `hardware`.
    """

    hardware: Hardware
    gpus: int
    layout: Layout
    admission: bool = True
    interval_s: float | None = None
    price: Price | None = None


@dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
        judged: by tier and in total.
        first: the layout that served first.
        switches: that were made.
        seconds: in which requests arrived.
        took_s: of CPU time.
        batches: that engines have run.
        requests: each one.
        notes: what was chosen, in words.
    """

    judged: Judged
    first: Layout | None
    switches: tuple[SwitchMade, ...]
    seconds: float
    took_s: float
    batches: int
    requests: Sequence[Request] = field(repr=False, default=())
    notes: str = ""

    @property
    def attainment(self) -> float:
        return float(self.judged["total"]["attainment"] or 0.0)

    @property
    def goodput_rps(self) -> float:
        return float(self.judged["total"]["goodput_rps"] or 0.0)

    def report(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "tiers": self.judged,
            "layouts": [] if self.first is None else timeline(self.first, self.switches),
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
            "batches": self.batches,
            "took_s": round(self.took_s, 2),
        }


def carries(system: System, arrivals: Sequence[Arrival], config: SloConfig, least: float) -> Run | None:
    """The run of a system, if at least this share of all requests is good; it is broken off when that cannot be."""
    tiers = {tier.name: tier for tier in config.tiers}
    most, bad = len(arrivals) * (1 - least), 0

    def ended(node: Node, request: Request) -> None:
        nonlocal bad
        bad += not all(met(request, tiers[request.arrival.tier]))
        node.stop = node.stop or bad > most

    found = _run(system, arrivals, config, None, ended)
    return found if found is not None and found.attainment >= least else None


def run(system: System, arrivals: Sequence[Arrival], config: SloConfig, progress: Progress | None = None) -> Run:
    """Simulate a system until all requests have ended.

    Args:
        system: what is simulated.
        arrivals: in order of time, none longer than the longest request.
        config: the tiers by which requests are placed and judged.
        progress: told (ended, of all, ms of simulated time) now and then.
    """
    found = _run(system, arrivals, config, progress, lambda node, request: None)
    assert found is not None
    return found


def _run(
    system: System,
    arrivals: Sequence[Arrival],
    config: SloConfig,
    progress: Progress | None,
    ended: Callable[[Node, Request], None],
) -> Run | None:
    began = time.process_time()
    node = Node(arrivals, system.hardware, system.gpus, progress or (lambda ended, of, now_ms: None))
    tp_of = {name: spec.tp for name, spec in node.specs.items()}
    routing: Routing
    if system.admission:
        routing = ByTiers(config, system.hardware, tp_of, node.place, lambda: node.now_ms)
    else:
        routing = LeastLoad(system.hardware, node.place)
    node.use(routing)
    control = Control(node, system.hardware, system.gpus, config, system.layout, system.interval_s, system.price)
    node.finished.append(lambda request: ended(node, request))
    node.run()
    if node.stop:
        return None
    seconds = _seconds(arrivals)
    judged = judge(node.requests, config, seconds)
    took = time.process_time() - began
    return Run(judged, system.layout, tuple(control.switches), seconds, took, node.batches, node.requests)


def split(
    hardware: Hardware, gpus: int, arrivals: Sequence[Arrival], config: SloConfig, *, admission: bool = False
) -> Run:
    """*Split* of Nitsum: GPUs divided between the tiers, each part at the static TP size at which it is best.

    All divisions and TP sizes are tried on the load itself, so the rival knows what comes. Tiers without a request get
    no GPU. Stock in each part, or ours with `admission`.

    Raises:
        ValueError: there are fewer GPUs than tiers with requests.
    """
    began = time.process_time()
    tiers = [tier.name for tier in config.tiers if any(one.tier == tier.name for one in arrivals)]
    loads = {name: [one for one in arrivals if one.tier == name] for name in tiers}
    known: dict[tuple[str, int, int], Run] = {}

    def best(tier: str, share: int) -> tuple[int, Run]:
        for tp in (tp for tp in hardware.tp_sizes if share % tp == 0):
            if (tier, share, tp) not in known:
                part = System(hardware, share, uniform_layout(tp, share), admission)
                known[tier, share, tp] = run(part, loads[tier], config)
        runs = [(tp, known[tier, share, tp]) for tp in hardware.tp_sizes if (tier, share, tp) in known]
        return max(runs, key=lambda one: (_good(one[1], tier), -one[0]))

    chosen: tuple[int, list[tuple[str, int, int, Run]]] | None = None
    for shares in _divisions(gpus, len(tiers), _unit(gpus)):
        if any(not any(share % tp == 0 for tp in hardware.tp_sizes) for share in shares):
            continue
        parts = [(tier, share, *best(tier, share)) for tier, share in zip(tiers, shares, strict=True)]
        good = sum(_good(one, tier) for tier, _, _, one in parts)
        if chosen is None or good > chosen[0]:
            chosen = (good, parts)
    if chosen is None:
        raise ValueError(f"{gpus} GPUs cannot be divided between {len(tiers)} tiers")
    requests = sorted((one for *_, part in chosen[1] for one in part.requests), key=lambda one: one.arrival.at_ms)
    seconds = _seconds(arrivals)
    notes = ", ".join(f"{tier}: {counted(part.first)}" for tier, _, _, part in chosen[1] if part.first is not None)
    batches = sum(part.batches for *_, part in chosen[1])
    took = time.process_time() - began
    return Run(judge(requests, config, seconds), None, (), seconds, took, batches, requests, notes)


def _seconds(arrivals: Sequence[Arrival]) -> float:
    """How long a load lasts, which is more than nothing."""
    return max(arrivals[-1].at_ms / 1e3, 1e-3)


def _good(one: Run, tier: str) -> int:
    return int(one.judged[tier]["good"] or 0)


def _unit(gpus: int) -> int:
    """GPUs are divided by eighths of a large deployment, else one by one."""
    return max(1, gpus // 8)


def _divisions(gpus: int, parts: int, unit: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide GPUs into so many parts of at least a unit, in multiples of it."""
    if parts == 1:
        yield (gpus,)
        return
    for first in range(unit, gpus - unit * (parts - 1) + 1, unit):
        for rest in _divisions(gpus - first, parts - 1, unit):
            yield (first, *rest)
