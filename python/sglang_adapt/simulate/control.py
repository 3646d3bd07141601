"""Which layout serves in simulated time: the router's planner, and switches that cost what `policy.price` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.core.slo import SloConfig
from sglang_adapt.policy.assign import promises
from sglang_adapt.policy.carry import Mover, Room, Strategy, carry
from sglang_adapt.policy.demand import Terms
from sglang_adapt.policy.pilot import Pilot
from sglang_adapt.policy.planner import plan
from sglang_adapt.policy.price import Price, Running
from sglang_adapt.policy.situation import Plan
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.simulate.engine import Request, SimulatedEngine
from sglang_adapt.simulate.handover import HandingOver
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.node import Node


@dataclass(frozen=True, slots=True)
class SwitchMade:
    """One switch: when it began, the layouts, why, how long it paused, what it carried (and how many without KV)."""

    at_s: float
    before: Layout
    after: Layout
    trigger: str
    pause_ms: float
    requests: int
    recomputed: int


class Control:
    """Plans every `interval_s` and makes the switches; without an interval the layout stays as it is.

    A switch: engines that leave end their batch; then their requests are paused for what the price says of their KV,
    and go on at engines that enter. Meanwhile requests go to engines that stay, or wait. What is brought over before
    the pause costs nothing here.

    Args:
        node: whose engines these are; its routing is in use.
        hardware: what engines can do.
        gpus: of the deployment.
        config: the tiers.
        layout: that serves first.
        interval_s: of the planner's windows; None: nobody plans.
        price: that switches really have; the planner begins with that of `hardware` and learns.
        gives_roles: the planner may give engines roles.
    """

    def __init__(
        self,
        node: Node,
        hardware: Hardware,
        gpus: int,
        config: SloConfig,
        layout: Layout,
        interval_s: float | None,
        price: Price | None = None,
        *,
        gives_roles: bool = False,
    ) -> None:
        self._node = node
        self._hardware = hardware
        self._gpus = gpus
        self._terms = tuple(Terms(tier.name, tier.weight, tier.ttft_ms, tier.tpot_ms) for tier in config.tiers)
        self._interval_ms = None if interval_s is None else interval_s * 1e3
        self._price = price or hardware.price
        self._pilot = Pilot(hardware.price, interval_s or 1.0, gives_roles=gives_roles)
        self.layout = layout
        self.began_with = layout
        self.switches: list[SwitchMade] = []
        self.plans = 0
        self._decided: Plan | None = None
        self._handing_over = HandingOver(node, hardware, self._pilot.learn_handover)
        node.handovers = self._handing_over
        self._enter(layout)
        if self._interval_ms is not None:
            tier_of = {request.rid: request.arrival.tier for request in node.requests}
            self._traffic = Traffic(tier_of.__getitem__, lambda: node.now_ms / 1e3)
            node.accepted.append(lambda request: self._traffic.arrived(request.rid, request.arrival.prompt))
            node.finished.append(self._finished)
            node.at(self._interval_ms, self._plan)

    def _enter(self, layout: Layout) -> None:
        """A layout serves from now on, in its roles."""
        self.layout = layout
        roles = {engine.name: role for engine, role in layout.role_of.items()} if layout.roles else {}
        self._node.routing.use_roles(roles)
        self._handing_over.use(layout)
        self._node.routing.serve([engine.name for engine, role in layout.role_of.items() if role is not Role.DECODE])

    def _finished(self, request: Request) -> None:
        if request.refused:
            self._traffic.refused(request.arrival.tier, request.arrival.prompt)
        else:
            self._traffic.finished(request.rid, request.given)

    def _unfinished(self) -> Iterator[tuple[str, bool]]:
        for name in (engine.name for engine in self.layout.engines):
            for request in self._node.engines[name].requests.values():
                yield request.rid, not request.given
        for request in self._node.routing.held():
            yield request.rid, True

    def _plan(self) -> None:
        assert self._interval_ms is not None
        self._traffic.close()
        engines = [self._node.engines[engine.name] for engine in self.layout.engines]
        longest = max((one.arrival.prompt for engine in engines for one in engine.requests.values()), default=0)
        decided = plan(
            self._pilot.situation(
                terms=self._terms,
                windows=tuple(self._traffic.windows),
                unfinished=self._traffic.unfinished(self._unfinished()),
                speeds=self._node.routing.speeds(),
                gpus=self._gpus,
                layout=self.layout,
                running={engine.name: self._running(engine) for engine in engines},
                longest_tokens=longest,
            )
        )
        self.plans += 1
        self._decided = decided
        self._reassign()
        if self._pilot.may_follow(decided):
            self._begin(decided.layout, decided.trigger.value if decided.trigger is not None else "")
        else:
            self._node.at(self._node.now_ms + self._interval_ms, self._plan)

    def _reassign(self) -> None:
        """As the router's manager does after each plan and switch."""
        decided = self._decided
        planned = decided.serving if decided is not None and decided.layout == self.layout else {}
        self._node.routing.assign(promises(planned, [terms.tier for terms in self._terms], list(planned)))

    def _running(self, engine: SimulatedEngine) -> Running:
        return Running(len(engine.requests), float(engine.context * self._hardware.token_bytes))

    # A switch.

    def _begin(self, after: Layout, trigger: str) -> None:
        node, before = self._node, self.layout
        if before.engines == after.engines:
            # A change of roles alone stops nobody.
            self._enter(after)
            self.switches.append(SwitchMade(node.now_ms / 1e3, before, after, trigger, 0.0, 0, 0))
            self._reassign()
            assert self._interval_ms is not None
            node.at(node.now_ms + self._interval_ms, self._plan)
            return
        self._handing_over.rest()
        leaving = [node.engines[engine.name] for engine in before.engines if engine not in after.engines]
        role = after.role_of
        node.routing.serve(
            [engine.name for engine in before.engines if role.get(engine, Role.DECODE) is not Role.DECODE]
        )
        began = node.now_ms
        stopped = max(began, self._handing_over.until_ms)
        for engine in leaving:
            stopped = max(stopped, engine.pause(began))
            node.schedule(engine)
        # At that time batches that end then have ended.
        node.at(stopped, lambda: self._export(began, before, after, trigger, leaving))

    def _export(
        self, began: float, before: Layout, after: Layout, trigger: str, leaving: list[SimulatedEngine]
    ) -> None:
        node, routing = self._node, self._node.routing
        kv_tokens = 0
        moving: list[tuple[Request, SimulatedEngine]] = []
        for engine in leaving:
            requests = engine.leave()
            engine.paused = False
            routing.left(engine, requests)
            moving += [(request, engine) for request in requests]
        entering = [node.engines[engine.name] for engine in after.engines if engine not in before.engines]
        movers = [
            Mover(one.rid, tuple(engine.spec.gpus), one.read, one.arrival.prompt + one.given) for one, engine in moving
        ]
        role_of = after.role_of
        rooms = [self._room(engine, role_of[engine.spec]) for engine in entering]
        carried = {one.rid: one for one in (carry(movers, rooms, Strategy.AUTO) if movers else ())}
        kv_tokens = sum(request.read for request, _ in moving if carried[request.rid].migrate)
        pause_ms = self._price.pause_ms(kv_tokens * self._hardware.token_bytes)
        recomputed = sum(bool(one.read) and not carried[one.rid].migrate for one, _ in moving)
        made = SwitchMade(began / 1e3, before, after, trigger, pause_ms, len(moving), recomputed)
        arriving = [(one, carried[one.rid].engine, carried[one.rid].migrate) for one, _ in moving]
        node.at(node.now_ms + pause_ms, lambda: self._adopt(made, arriving, kv_tokens))

    def _room(self, engine: SimulatedEngine, role: Role) -> Room:
        page = engine.bounds.page_tokens
        return Room(engine.name, tuple(engine.spec.gpus), engine.free_tokens // page, page, role=role)

    def _adopt(self, made: SwitchMade, arriving: list[tuple[Request, str, bool]], kv_tokens: int) -> None:
        node, routing = self._node, self._node.routing
        for request, name, migrated in arriving:
            engine = node.engines[name]
            routing.moved(request, name)
            if not migrated:
                request.read, request.unread = 0, request.arrival.prompt + request.given
            if request.unread:
                engine.add(request, node.now_ms)
            else:
                engine.resume(request, node.now_ms)
            node.schedule(engine)
        self._enter(made.after)
        self.switches.append(made)
        self._pilot.learn(made.pause_ms, kv_tokens * self._hardware.token_bytes)
        self._reassign()
        assert self._interval_ms is not None
        node.at(node.now_ms + self._interval_ms, self._plan)
