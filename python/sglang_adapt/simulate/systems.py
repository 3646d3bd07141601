"""Systems under one load: ours with a layout that stays or follows the traffic, stock, and stock split by tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation, TierEngines
from sglang_adapt.core.layout import EngineSpec, Layout, uniform_layout
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

RELOAD_S = 57.0
"""Of a switch by a stop and a start, with the weights loaded anew: measured on 2 H200 (docs/results.md)."""
PAGE_COPIES_BYTES_PER_S = 3.2e9
"""KV copied with a copy for each page: measured on 2 H200 (docs/results.md)."""


def priced(price: Price, ablation: Ablation, reload_s: float = RELOAD_S) -> Price:
    """What a switch costs with mechanisms switched off. All KV is copied in the pause in any case here, so that
    `stop_copy` makes no difference."""
    if ablation.page_copies:
        price = replace(price, bytes_per_s=min(price.bytes_per_s, PAGE_COPIES_BYTES_PER_S))
    if ablation.reload_weights:
        price = replace(price, fixed_ms=max(price.fixed_ms, 1e3 * reload_s))
    return price


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
        ablation: what is switched off of ours; of switches `price` says it.
        gives_roles: the planner may give engines roles.
    """

    hardware: Hardware
    gpus: int
    layout: Layout
    admission: bool = True
    interval_s: float | None = None
    price: Price | None = None
    ablation: Ablation = NOTHING_OFF
    gives_roles: bool = False


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
        flags: of the server that switch off what was switched off.
    """

    judged: Judged
    first: Layout | None
    switches: tuple[SwitchMade, ...]
    seconds: float
    took_s: float
    batches: int
    requests: Sequence[Request] = field(repr=False, default=())
    notes: str = ""
    flags: tuple[str, ...] = ()

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
            **({"flags": list(self.flags)} if self.flags else {}),
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
        clock = lambda: node.now_ms  # noqa: E731
        routing = ByTiers(config, system.hardware, tp_of, node.place, clock, ablation=system.ablation)
    else:
        routing = LeastLoad(system.hardware, node.place)
    node.use(routing)
    control = Control(
        node,
        system.hardware,
        system.gpus,
        config,
        system.layout,
        system.interval_s,
        system.price,
        gives_roles=system.gives_roles,
    )
    node.finished.append(lambda request: ended(node, request))
    node.run()
    if node.stop:
        return None
    seconds = _seconds(arrivals)
    judged = judge(node.requests, config, seconds)
    took = time.process_time() - began
    return Run(
        judged,
        system.layout,
        tuple(control.switches),
        seconds,
        took,
        node.batches,
        node.requests,
        flags=system.ablation.flags,
    )


def split(hardware: Hardware, gpus: int, arrivals: Sequence[Arrival], config: SloConfig) -> Run:
    """*Split* of Nitsum: GPUs divided between the tiers, each part at the static TP size at which it is best.

    All divisions and TP sizes are tried on the load itself, so the rival knows what comes. Tiers without a request get
    no GPU. Stock in each part.

    Raises:
        ValueError: there are fewer GPUs than tiers with requests.
    """
    began = time.process_time()
    parts = _best_parts(System(hardware, gpus, uniform_layout(hardware.tp_sizes[0], gpus), False), arrivals, config)
    requests = sorted((one for *_, part in parts for one in part.requests), key=lambda one: one.arrival.at_ms)
    seconds = _seconds(arrivals)
    notes = ", ".join(f"{tier}: {counted(part.first)}" for tier, _, _, part in parts if part.first is not None)
    batches = sum(part.batches for *_, part in parts)
    took = time.process_time() - began
    return Run(judge(requests, config, seconds), None, (), seconds, took, batches, requests, notes)


def best_tier_engines(system: System, arrivals: Sequence[Arrival], config: SloConfig) -> TierEngines:
    """Engines of its own for each tier, so that the system carries most; found as `split` finds its parts.

    Args:
        system: whose layout does not count.
        arrivals: the load.
        config: its tiers.

    Raises:
        ValueError: there are fewer GPUs than tiers with requests.
    """
    found, first = [], 0
    # The widest engines first, so that all groups are aligned.
    for tier, share, tp, _ in sorted(_best_parts(system, arrivals, config), key=lambda part: -part[2]):
        found.append((tier, tuple(EngineSpec(gpu, tp).name for gpu in range(first, first + share, tp))))
        first += share
    return tuple(found)


def _best_parts(system: System, arrivals: Sequence[Arrival], config: SloConfig) -> list[tuple[str, int, int, Run]]:
    """(tier, GPUs, TP size, run) of each part of the best division of GPUs between tiers.

    Raises:
        ValueError: there are fewer GPUs than tiers with requests.
    """
    hardware, gpus = system.hardware, system.gpus
    tiers = [tier.name for tier in config.tiers if any(one.tier == tier.name for one in arrivals)]
    loads = {name: [one for one in arrivals if one.tier == name] for name in tiers}
    known: dict[tuple[str, int, int], Run] = {}

    def best(tier: str, share: int) -> tuple[int, Run]:
        for tp in (tp for tp in hardware.tp_sizes if share % tp == 0):
            if (tier, share, tp) not in known:
                part = replace(system, gpus=share, layout=uniform_layout(tp, share))
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
    return chosen[1]


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
