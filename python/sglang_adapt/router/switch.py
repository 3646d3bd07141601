"""What a switch of layout is made of, as data: what was handed out, what goes where, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from sglang_adapt.core.block_ids import pack_ids
from sglang_adapt.core.handoff import AdoptCall, CarriedRequest, KvSource
from sglang_adapt.core.layout import EngineSpec, Layout
from sglang_adapt.kv.plan import CopyBatch, IntArray, RequestCopy
from sglang_adapt.policy.carry import Strategy

Blocks = list[list[int]]
"""Blocks of one request in token order, a list a rank."""


class SwitchRefusedError(RuntimeError):
    """The layout was not switched; the text says why. All requests go on as before."""


@dataclass(frozen=True)
class Export:
    """What an engine has handed out and holds.

    Attributes:
        spec: the engine.
        deaths: how often it had died then; if it has died since, its requests' KV is gone.
        epoch: of the export.
        requests: in the order in which they should be taken up.
        blocks: by request id, the blocks of each rank in token order.
        pages: `[TP size, n]`, the blocks that have left the ranks' leases.
    """

    spec: EngineSpec
    deaths: int
    epoch: int
    requests: tuple[CarriedRequest, ...]
    blocks: dict[str, Blocks]
    pages: IntArray

    @property
    def rids(self) -> list[str]:
        return [request.rid for request in self.requests]


@dataclass(frozen=True)
class Arrival:
    """A request on its way to an engine; `source` is None if its KV is left behind."""

    request: CarriedRequest
    source: Export | None

    @property
    def kv_source(self) -> KvSource:
        if self.source is None:
            return KvSource([], [])
        return KvSource(list(self.source.spec.gpus), self.source.blocks[self.request.rid])


def deal(arrivals: Sequence[Arrival], page: int, reserved: IntArray) -> list[Blocks]:
    """Blocks for each request out of the reserved ones: `[rank][request][n]`.

    Args:
        page: tokens of a block.
        reserved: `[TP size, n]`, as many blocks on each rank as the requests' KV fills.
    """
    counts = [-(-arrival.request.kv_tokens // page) for arrival in arrivals]
    ends = np.cumsum([0, *counts]).tolist()
    return [[rank[start:end] for start, end in pairwise(ends)] for rank in reserved.tolist()]


def copies_of(spec: EngineSpec, arrivals: Sequence[Arrival], blocks: Sequence[Blocks]) -> list[CopyBatch]:
    """The copies that bring the arrivals' KV to an engine, for the ledgers."""
    batches: dict[tuple[int, ...], list[RequestCopy]] = {}
    for at, arrival in enumerate(arrivals):
        if arrival.source is not None and arrival.request.kv_tokens:
            copy = RequestCopy(
                arrival.request.rid,
                arrival.request.kv_tokens,
                np.asarray(arrival.source.blocks[arrival.request.rid], dtype=np.int32),
                np.asarray([rank[at] for rank in blocks], dtype=np.int32),
            )
            batches.setdefault(tuple(arrival.source.spec.gpus), []).append(copy)
    return [CopyBatch(gpus, tuple(spec.gpus), tuple(requests)) for gpus, requests in batches.items()]


def adopt_call(epoch: int, arrivals: Sequence[Arrival], blocks: Sequence[Blocks], grow: IntArray) -> AdoptCall:
    return AdoptCall(
        epoch,
        [arrival.request for arrival in arrivals],
        [list(rank) for rank in blocks],
        sources=[arrival.kv_source for arrival in arrivals],
        grow=[pack_ids(rank) for rank in grow],
    )


@dataclass
class Switch:
    """One switch, and what is known of it so far.

    Attributes:
        before, after: the layouts.
        strategy: as asked for.
        reason: who asked, or why.
        epoch: 0 until the engines are told to stop.
        requests: how many went which way.
        kv_tokens: tokens whose KV was copied.
        kv_bytes: bytes that were copied.
        phases_ms: milliseconds of each phase, in order; the requests of the engines that leave are paused from
            "export" to "adopt".
        steps_ms: by phase, then by step, what the slowest rank said that it took; the rest of the phase is messages
            and this process.
        failures: what went wrong on the way, although the layout was switched.
    """

    before: Layout
    after: Layout
    strategy: Strategy
    reason: str
    epoch: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    kv_tokens: int = 0
    kv_bytes: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)
    steps_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def leaving(self) -> list[EngineSpec]:
        return [spec for spec in self.before.engines if spec not in self.after.engines]

    @property
    def entering(self) -> list[EngineSpec]:
        return [spec for spec in self.after.engines if spec not in self.before.engines]

    @property
    def pause_ms(self) -> float:
        return sum(self.phases_ms.get(name, 0.0) for name in ("export", "plan", "adopt"))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = self.phases_ms.get(name, 0.0) + 1e3 * (perf_counter() - began)

    def note_steps(self, phase: str, ranks: Iterable[Mapping[str, float]]) -> None:
        """Ranks have said how long their steps of a phase took."""
        steps = self.steps_ms.setdefault(phase, {})
        for rank in ranks:
            for step, ms in rank.items():
                steps[step] = max(steps.get(step, 0.0), ms)

    def report(self) -> dict[str, Any]:
        """For the control endpoint and the log."""
        return {
            "from": str(self.before),
            "to": str(self.after),
            "epoch": self.epoch,
            "strategy": self.strategy.value,
            "reason": self.reason,
            "requests": dict(self.requests),
            "kv_tokens": self.kv_tokens,
            "kv_bytes": self.kv_bytes,
            "pause_ms": round(self.pause_ms, 2),
            "phases_ms": {name: round(ms, 2) for name, ms in self.phases_ms.items()},
            "steps_ms": self.steps_ms,
            "failures": self.failures,
        }

    def __str__(self) -> str:
        requests = ", ".join(f"{count} {way}" for way, count in self.requests.items()) or "none"
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in self.phases_ms.items())
        failed = f"; {'; '.join(self.failures)}" if self.failures else ""
        return (
            f"layout {self.before} -> {self.after} (epoch {self.epoch}, {self.reason}): requests {requests}; "
            f"{self.kv_bytes / 1e6:.1f} MB of KV; pause {self.pause_ms:.1f} ms ({phases}){failed}"
        )
