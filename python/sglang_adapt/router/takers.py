"""Which engines can take requests over now, and which of them one goes to.

Here the state of engines and ledgers becomes the data on which `policy.roles` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.policy.roles import Rooms, Taker, choose_taker
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.mappings import Mappings
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router


class Takers:
    """See the module.

    Args:
        router: where requests are, and which engine has which role.
        pools: whose blocks are whose.
        specs: all candidates by name.
        mappings: which engines can read the KV of all GPUs.
        coming: tokens of each request that is on its way to an engine.
        ahead: the same of those of which parts go ahead to it, while they are still being read.

    Attributes:
        full: engines that have refused a request for want of room; until one of theirs has ended they get none.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        mappings: Mappings,
        coming: Callable[[EngineSpec], Iterable[int]],
        ahead: Callable[[EngineSpec], Iterable[int]],
    ) -> None:
        self._router = router
        self._pools = pools
        self._specs = specs
        self._mappings = mappings
        self._coming = coming
        self._ahead = ahead
        self.full: set[EngineSpec] = set()

    def may_take(self, spec: EngineSpec) -> bool:
        """Does an engine take requests over now, if it has room?"""
        return self._decodes(spec) and self._mappings.has(spec)

    def rooms(self) -> Rooms:
        """What those have that can."""
        pressed = self._now()
        return Rooms({name: self._beside(taker) for name, taker in pressed.items()}, pressed)

    def _now(self) -> dict[str, Taker]:
        """The engines that can take requests over now, and their room without what goes ahead to them."""
        takers = {}
        able = [self._specs[name] for name in self._router.roles]
        for spec in self._mappings.those(spec for spec in able if spec not in self.full and self._decodes(spec)):
            engine = self._router.engines[spec.name]
            page = self._pools.settings.geometry.tokens_per_block(spec.tp)
            coming = list(self._coming(spec))
            held = sum(engine.in_flight.values()) + sum(len(self._router.journal[rid].ids) for rid in engine.in_flight)
            requests = len(engine.in_flight) + len(coming)
            takers[spec.name] = Taker(spec.name, page, self._pools.counts(spec)[0], held + sum(coming), requests)
        return takers

    def _beside(self, taker: Taker) -> Taker:
        """An engine's room beside what goes ahead to it."""
        for tokens in self._ahead(self._specs[taker.name]):
            taker = taker.after(tokens)
        return taker

    def _decodes(self, spec: EngineSpec) -> bool:
        """Is an engine there, and not only to read?"""
        role = self._router.roles.get(spec.name)
        there = self._router.engines[spec.name].state is EngineState.READY
        return there and role is not None and role is not Role.PREFILL

    def choose(self, rooms: Rooms, rid: str, length: int, most_tokens: int) -> EngineSpec | None:
        """Who takes over a request that has been read; None if nobody has room."""
        holding = self._holding(rooms.pressed, rid, most_tokens)
        name = rooms.choose(length, holding, self._within_targets(rid, holding))
        return None if name is None else self._specs[name]

    def choose_ahead(self, rid: str, length: int, most_tokens: int) -> EngineSpec | None:
        """Who has room for all of a request that is still being read, beside all others; None if nobody has."""
        takers = self.rooms().beside
        holding = self._holding(takers, rid, most_tokens)
        taker = choose_taker([takers[name] for name in holding], length, self._within_targets(rid, holding))
        return None if taker is None else self._specs[taker.name]

    def exists(self, rid: str, most_tokens: int) -> bool:
        """Is there an engine that decodes and holds a request, whether or not it has room now?"""
        roles = self._router.roles.items()
        return any(role is not Role.PREFILL and self._holds(name, rid, most_tokens) for name, role in roles)

    def _holding(self, names: Iterable[str], rid: str, most_tokens: int) -> list[str]:
        return [name for name in names if self._holds(name, rid, most_tokens)]

    def _holds(self, name: str, rid: str, most_tokens: int) -> bool:
        """Has an engine room for all that a request may come to have, prompt and output?"""
        limit = self._pools.settings.request_tokens[self._specs[name].tp]
        return most_tokens <= limit and self._router.long.holds(name, rid)

    def _within_targets(self, rid: str, names: Collection[str]) -> Collection[str]:
        """Those of its tier that keep a request's target, and those of what they have."""
        admission = self._router.admission
        return (
            names if admission is None else admission.decode_within(rid, [self._router.engines[one] for one in names])
        )
