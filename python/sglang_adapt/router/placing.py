"""The plan of a switch: to which engine each request goes that was handed out, and with which of its blocks.

Here the state of engines and ledgers becomes the data on which `policy.carry` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sglang_adapt.core.handoff import CarriedRequest
from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.policy.carry import Carriage, Costs, Mover, Room, Strategy, carry
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.precopy import Precopy
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Arrival, Export, Sent, Switch


class Placing:
    """See the module.

    Args:
        router: where requests are.
        pools: whose blocks are whose.
        specs: all candidates by name.
        lives: does the engine still hold what it handed out?
        costs: by which strategies are compared.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        lives: Callable[[Export], bool],
        costs: Costs,
    ) -> None:
        self._router = router
        self._pools = pools
        self._specs = specs
        self._lives = lives
        self._costs = costs

    def ahead(self, movers: Sequence[Mover], rooms: Sequence[Room]) -> Sequence[Carriage]:
        """Where requests should go that are copied ahead."""
        return carry(movers, rooms, Strategy.AUTO, self._costs)

    def arrivals(self, switch: Switch, exports: Sequence[Export], precopy: Precopy) -> dict[EngineSpec, list[Arrival]]:
        """Where each request goes. Raises NoRoomError."""
        # A request is not on the move if its engine was seen to die before its export was.
        there = self._router.moving.in_flight
        by_rid = {
            request.rid: (request, export) for export in exports for request in export.requests if request.rid in there
        }
        role_of = switch.after.role_of
        # Asked once an export, because each request of it is looked at.
        lives = {export.spec: self._lives(export) for export in exports}
        gpus = {export.spec: tuple(export.spec.gpus) for export in exports}
        sent = precopy.place(
            [request for request, export in by_rid.values() if lives[export.spec]],
            [self.room(spec, role_of[spec]) for spec in switch.entering],
        )
        rooms = {spec.name: self.room(spec, role_of[spec]) for spec in switch.entering}
        for rid, ahead in sent.items():
            room, request = rooms[ahead.spec.name], by_rid[rid][0]
            rooms[room.engine] = room.taking(precopy.needs(request, ahead, room), request.length)
        movers = [
            Mover(
                rid,
                gpus[export.spec],
                request.kv_tokens if lives[export.spec] else 0,
                request.length,
                request.most_tokens,
            )
            for rid, (request, export) in by_rid.items()
            if rid not in sent
        ]
        strategy = Strategy.AUTO if switch.strategy is Strategy.DRAIN else switch.strategy
        carried = {carriage.rid: carriage for carriage in carry(movers, list(rooms.values()), strategy, self._costs)}
        arrivals: dict[EngineSpec, list[Arrival]] = {spec: [] for spec in switch.entering}
        for rid, (request, export) in by_rid.items():
            if (early := sent.get(rid)) is not None:
                arrivals[early.spec].append(self._migrated(switch, request, export, early))
                continue
            request = precopy.whole(export.spec, request)
            arrival = self._arrival(switch, carried[rid], request, export)
            arrivals[self._specs[carried[rid].engine]].append(arrival)
        return arrivals

    def _migrated(self, switch: Switch, request: CarriedRequest, export: Export, sent: Sent | None) -> Arrival:
        """A request whose KV is copied, less what was sent ahead."""
        geometry = self._pools.settings.geometry
        switch.requests["migrated"] += 1
        switch.kv_tokens += request.kv_tokens
        switch.kv_bytes += request.kv_tokens * geometry.planes * geometry.kv_heads * geometry.head_bytes
        return Arrival(request, export, sent, geometry.tokens_per_block(export.spec.tp))

    def _arrival(self, switch: Switch, carriage: Carriage, request: CarriedRequest, export: Export) -> Arrival:
        """A request of which nothing was sent ahead that could be used."""
        if carriage.migrate:
            return self._migrated(switch, request, export, None)
        if request.kv_tokens or request.recompute:
            switch.requests["recomputed"] += 1
            return Arrival(request.without_kv())
        switch.requests["waiting"] += 1
        return Arrival(request)

    def room(self, spec: EngineSpec, role: Role = Role.MIXED) -> Room:
        """What an engine can take up now, which has this role in the layout that is entered."""
        engine = self._router.engines[spec.name]
        return Room(
            spec.name,
            tuple(spec.gpus),
            self._pools.available(spec),
            self._pools.settings.geometry.tokens_per_block(spec.tp),
            len(engine.in_flight),
            sum(engine.in_flight.values()),
            self._pools.settings.request_tokens[spec.tp],
            role,
        )
