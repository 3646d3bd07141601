"""What a switch of layout is made of, as data: what was handed out, what goes where, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any, Literal

from sglang_adapt.core.handoff import CarriedRequest, KvSource
from sglang_adapt.core.laps import slowest
from sglang_adapt.core.layout import EngineSpec, Layout
from sglang_adapt.kv.plan import IntArray
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.situation import Trigger
from sglang_adapt.router.copying import Blocks

Phase = Literal["prepare", "precopy", "export", "reload", "plan", "adopt", "release"]
Way = Literal["migrated", "recomputed", "waiting", "kept", "resumed", "drained", "stranded"]
"""What becomes of a request: it moves with its KV, without it, or had none; it stays paused, or goes on after that; it
ends first; or it lost its engine and goes on from its tokens."""


class Outcome(StrEnum):
    """What came of a switch.

    SWITCHED: the new layout serves.
    IMPAIRED: it does, and something failed on the way (`Switch.failures`).
    REFUSED: the old one serves on.
    BROKEN_OFF: a fault in this program; the engines of both layouts are started again.
    """

    SWITCHED = "switched"
    IMPAIRED = "impaired"
    REFUSED = "refused"
    BROKEN_OFF = "broken_off"


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
        blocks: by request id, all blocks of each rank in token order.
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
class Snapshot:
    """What an engine has said of one of its requests while it runs.

    Attributes:
        request: with its whole state; `ahead` tokens of it can be copied.
        blocks: of these tokens, of each rank, in token order.
    """

    request: CarriedRequest
    blocks: Blocks


@dataclass(frozen=True)
class Sent:
    """A snapshot that is at an engine, with its KV.

    Attributes:
        snapshot: what was sent.
        spec: the engine.
        deaths: how often it had died then.
        pages: `[TP size, n]`, blocks that are reserved there, and hold the KV of the first `ahead` tokens.
    """

    snapshot: Snapshot
    spec: EngineSpec
    deaths: int
    pages: IntArray


@dataclass(frozen=True)
class Arrival:
    """A request on its way to an engine.

    Attributes:
        request: its message.
        source: None if its KV is left behind.
        sent: what is there of it already.
        page: tokens of a block of the source.
    """

    request: CarriedRequest
    source: Export | None = None
    sent: Sent | None = None
    page: int = 1

    @property
    def kv_source(self) -> KvSource:
        """Of the tokens that are not there yet."""
        if self.source is None:
            return KvSource([], [])
        first = self.request.ahead // self.page
        return KvSource(list(self.source.spec.gpus), [rank[first:] for rank in self.source.blocks[self.request.rid]])

    def blocks(self, page: int) -> int:
        """Blocks of `page` tokens that it needs on each rank, beside those that are there."""
        return -(-self.request.kv_tokens // page) - self.request.ahead // page


@dataclass
class Switch:
    """One switch, and what is known of it so far.

    Attributes:
        before, after: the layouts.
        strategy: as asked for.
        reason: who asked, or why.
        trigger: the same as one of a few words.
        epoch: that began with it, or, if nothing is to be changed, the present one; 0 until then.
        requests: how many went which way.
        kv_tokens: tokens whose KV was copied.
        ahead_tokens: tokens whose KV was copied before the pause; those of requests that ended meanwhile as well.
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
    trigger: Trigger = Trigger.OPERATOR
    epoch: int = 0
    requests: Counter[Way] = field(default_factory=Counter)
    kv_tokens: int = 0
    ahead_tokens: int = 0
    kv_bytes: int = 0
    phases_ms: dict[Phase, float] = field(default_factory=dict)
    steps_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def leaving(self) -> list[EngineSpec]:
        return [spec for spec in self.before.engines if spec not in self.after.engines]

    @property
    def entering(self) -> list[EngineSpec]:
        return [spec for spec in self.after.engines if spec not in self.before.engines]

    @property
    def roles_change(self) -> bool:
        """Do engines that stay get other roles?"""
        after = self.after.role_of
        return any(spec in after and after[spec] is not role for spec, role in self.before.role_of.items())

    @property
    def pause_ms(self) -> float:
        pausing: tuple[Phase, ...] = ("export", "reload", "plan", "adopt")
        return sum(self.phases_ms.get(name, 0.0) for name in pausing)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.phases_ms[name] = self.phases_ms.get(name, 0.0) + 1e3 * (perf_counter() - began)

    def note_steps(self, phase: str, ranks: Iterable[Mapping[str, float]]) -> None:
        """Ranks have said how long their steps of a phase took."""
        self.steps_ms[phase] = slowest([self.steps_ms.get(phase, {}), *ranks])

    def report(self) -> dict[str, Any]:
        """For the control endpoint and the log."""
        return {
            "from": str(self.before),
            "to": str(self.after),
            "epoch": self.epoch,
            "strategy": self.strategy.value,
            "reason": self.reason,
            "trigger": self.trigger.value,
            "requests": dict(self.requests),
            "kv_tokens": self.kv_tokens,
            "ahead_tokens": self.ahead_tokens,
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
