"""Switching the layout while requests run: copy ahead, export, plan, copy and adopt, resume, release.

While all requests run, what does not change any more is brought over (`precopy`). Then three round trips to the
engines. (1) The engines that leave the layout stop after the batch in flight and hand their requests out, which they
hold. (2) The engines that enter get them together with the blocks that this process has chosen
for their KV; each rank pulls its part of the KV, and the requests run on. From here on the new layout serves. (3) The
first ones forget what they held, and all free blocks go to the new engines.

Until (2) has succeeded anywhere, everything can be undone, and is if anything fails. After that, requests that an
engine could not take up, or whose engine died, are stranded: `repair` lets others go on with them, from their tokens.
Engines of both layouts serve on throughout. Architecture, "A switch".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import EngineSpec, Layout
from sglang_adapt.kv.staged_handle import KvHandle
from sglang_adapt.policy.carry import NoRoomError, Strategy, costs_by
from sglang_adapt.policy.situation import Trigger
from sglang_adapt.router.calls import EngineCallError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.entering import Entering
from sglang_adapt.router.filling import fill
from sglang_adapt.router.handovers import Handovers
from sglang_adapt.router.kept import Kept
from sglang_adapt.router.leaving import Leaving
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.mappings import Mappings
from sglang_adapt.router.placing import Placing
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.precopy import Precopy, leave_tokens
from sglang_adapt.router.preparing import Preparing
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Arrival, Export, Outcome, Switch, SwitchRefusedError
from sglang_adapt.router.tasks import Tasks

logger = logging.getLogger(__name__)


class Modes:
    """The layout that serves, and its changes, one at a time.

    Args:
        router: where requests are.
        pools: whose blocks are whose, and the way to the engines' ranks.
        specs: all candidates by name.
        regions: how the KV of each GPU is reached now.
        drain_timeout_s: how long requests that cannot be moved may take to end.
        kv_copy: the way of KV from GPU to GPU, by which strategies are compared, and time for copies is reckoned.
        ended: called with each switch that was asked for, and what came of it.
        ablation: what is switched off of a switch for a measurement.

    Attributes:
        kept: requests that stay paused at engines outside the layout.
        handovers: single requests on their way from engine to engine.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        regions: Callable[[], dict[int, KvHandle]],
        drain_timeout_s: float,
        kv_copy: CopyPath = CopyPath.PEER,
        ended: Callable[[Switch, Outcome], None] = lambda switch, outcome: None,
        ablation: Ablation = NOTHING_OFF,
    ) -> None:
        self._ablation = ablation
        self._kv_copy = kv_copy
        self._router = router
        self._pools = pools
        self._ended = ended
        self._up = Lives(router, pools)
        mappings = Mappings(pools, regions)
        self._preparing = Preparing(router, pools, mappings, drain_timeout_s)
        self._leaving = Leaving(router, pools, self._up)
        self._placing = Placing(router, pools, specs, self._leaving.holds, costs_by(kv_copy))
        self._current: Switch | None = None
        self.kept = Kept(router, pools, specs, lambda: self._current is None or not self._current.epoch, self._forget)
        self._entering = Entering(router, pools, self._up, self.kept, self._leaving)
        self._tasks = Tasks()
        self.handovers = Handovers(router, pools, specs, mappings, self.engine_gone)

    @property
    def switching(self) -> bool:
        return self._current is not None

    @property
    def current(self) -> Switch | None:
        """The switch that is under way."""
        return self._current

    async def switch(
        self, layout: Layout, strategy: Strategy, reason: str, trigger: Trigger = Trigger.OPERATOR
    ) -> Switch:
        """Go over to a layout; returns when its engines serve and the blocks of the old ones are free.

        Raises:
            SwitchRefusedError: nothing has changed.
        """
        switch = Switch(self._router.layout, layout, strategy, reason, trigger)
        if self._current is not None:
            self._ended(switch, Outcome.REFUSED)
            raise SwitchRefusedError(
                f"a switch from {self._current.before} to {self._current.after} is under way; ask again when it is done"
            )
        self._current = switch
        try:
            if switch.leaving:
                await self.handovers.settle()
                await self._run(switch)
            elif switch.roles_change:
                switch.epoch = self._pools.begin_epoch()
                self._router.activate(layout)
            else:
                switch.epoch = self._pools.epoch
            if switch.before != switch.after:
                logger.info("%s", switch)
        except SwitchRefusedError:
            self._ended(switch, Outcome.REFUSED)
            raise
        except Exception:
            # A fault in this program: no request may stay on the move for ever.
            self._break_off(switch)
            self._ended(switch, Outcome.BROKEN_OFF)
            raise
        finally:
            self._current = None
            # Blocks of engines that died on the way may have come back since.
            self._tasks.start(fill(self._pools, self._up, self._router.layout.engines))
            self.kept.make_room()
            self.handovers.resume()
        self._ended(switch, Outcome.IMPAIRED if switch.failures else Outcome.SWITCHED)
        return switch

    def engine_ready(self, spec: EngineSpec) -> None:
        """An engine has been started again: give it its share of the blocks, if it is in the layout."""
        self._tasks.start(fill(self._pools, self._up, [spec]))
        self.handovers.wake()

    def engine_gone(self) -> None:
        """All processes of an engine have ended and its blocks are free: the layout's engines get them."""
        if self._current is None:
            self._tasks.start(fill(self._pools, self._up, self._router.layout.engines))

    def engine_lost(self, spec: EngineSpec, why: str) -> None:
        """An engine died: what it kept paused goes on elsewhere, from its tokens."""
        self.handovers.engine_lost(spec)
        export = self.kept.exports.pop(spec, None)
        if export is not None:
            self._router.strand(self._router.moving, self._router.unkeep(self._engine(spec)), why)

    def let_go(self, why: str) -> None:
        """What is kept goes on at the engines that serve, from its tokens: its own engine will not serve again."""
        if self._current is None:
            self.kept.let_go(list(self.kept.exports), why)

    async def _forget(self, export: Export, why: str) -> None:
        """An engine need not keep its requests any more; the layout's engines get their blocks."""
        layout = self._router.layout
        await self._leaving.release(Switch(layout, layout, Strategy.RECOMPUTE, why), export)
        await fill(self._pools, self._up, layout.engines)

    # The phases.

    async def _run(self, switch: Switch) -> None:
        router = self._router
        with switch.phase("prepare"):
            await self._preparing.run(switch)
            await self.kept.settled()
        switch.epoch = self._pools.begin_epoch()
        precopy = Precopy(self._pools, self._up, leave_tokens(self._kv_copy))
        exports: list[Export] = []
        try:
            if switch.strategy in (Strategy.AUTO, Strategy.MIGRATE) and not self._ablation.stop_copy:
                with switch.phase("precopy"):
                    await self._copy_ahead(switch, precopy)
            with switch.phase("export"):
                await self._leaving.export_all(switch, exports, precopy)
            if self._ablation.reload_weights:
                with switch.phase("reload"):
                    await self._entering.read_weights_again(switch)
            if switch.strategy is Strategy.KEEP:
                arrivals: dict[EngineSpec, list[Arrival]] = {}
            else:
                with switch.phase("plan"):
                    arrivals = self._placing.arrivals(switch, exports, precopy)
        except (SwitchRefusedError, NoRoomError) as error:
            precopy.drop()
            await self._roll_back(switch, exports)
            raise SwitchRefusedError(f"layout {switch.before} stays: {error}") from error
        with switch.phase("adopt"):
            await self._leaving.wait_for_the_dead(switch)
            served = await self._entering.take_up(switch, arrivals, precopy)
        precopy.drop()
        if not served:
            await self._roll_back(switch, exports)
            raise SwitchRefusedError(f"layout {switch.before} stays: {'; '.join(switch.failures)}")
        if switch.strategy is Strategy.KEEP:
            for export in exports:
                if not self._leaving.holds(export):
                    router.strand(router.moving, export.rids, f"{export.spec} died, which was to keep them")
                elif export.requests:
                    switch.requests["kept"] += len(export.requests)
                    self.kept.exports[export.spec] = export
                    router.keep(self._engine(export.spec), export.rids)
        else:
            self._strand_the_rest(switch, arrivals, served)
        self._pools.activate(switch.after.engines)
        router.activate(switch.after)
        with switch.phase("release"):
            gone = [export for export in exports if export.spec not in self.kept.exports]
            # What the engines that enter did not get with their requests comes first.
            rest = fill(self._pools, self._up, switch.entering)
            await asyncio.gather(rest, *(self._leaving.release(switch, export) for export in gone))
            await fill(self._pools, self._up, switch.after.engines)

    async def _copy_ahead(self, switch: Switch, precopy: Precopy) -> None:
        """Raises SwitchRefusedError if an engine that enters has died meanwhile."""
        leaving = {spec: self._engine(spec) for spec in switch.leaving}
        sources = {
            spec: len(engine.in_flight)
            for spec, engine in leaving.items()
            if engine.state is EngineState.READY and engine.in_flight
        }
        if sources:
            role_of = switch.after.role_of
            await precopy.run(
                switch, sources, lambda spec: self._placing.room(spec, role_of[spec]), self._placing.ahead
            )
        for spec in switch.entering:
            if not self._up.is_up(spec):
                raise SwitchRefusedError(f"engine {spec} has died since the switch began")

    def _strand_the_rest(
        self, switch: Switch, arrivals: Mapping[EngineSpec, Sequence[Arrival]], served: Sequence[EngineSpec]
    ) -> None:
        """Requests of engines that could not take them up go on at the others, from their tokens."""
        left = [arrival.request.rid for spec, group in arrivals.items() if spec not in served for arrival in group]
        if left:
            switch.requests["stranded"] += len(left)
            self._router.strand(self._router.moving, left, "; ".join(switch.failures))

    # Ways back.

    def _break_off(self, switch: Switch) -> None:
        """Nobody knows what engines and ledgers hold: the engines are started again, the requests go on from their
        tokens."""
        why = f"the switch from {switch.before} to {switch.after} broke off"
        logger.exception("%s", why)
        if switch.epoch:
            for spec in (*switch.leaving, *switch.entering):
                if self._up.is_up(spec):
                    self._pools.kill(spec, why)
        self._router.strand(self._router.moving, list(self._router.moving.in_flight), why)
        self._pools.activate(self._router.layout.engines)
        self._router.activate(self._router.layout)

    async def _roll_back(self, switch: Switch, exports: Sequence[Export]) -> None:
        """All requests go on where they were; those of engines that died meanwhile, on the others."""
        for export in exports:
            try:
                await self._leaving.restore(export)
            except EngineCallError as error:
                switch.failures.append(f"{export.spec} did not take its requests back: {error}")
                self._router.strand(self._router.moving, export.rids, str(error))
        self._pools.activate(switch.before.engines)
        self._router.activate(switch.before)
        self._tasks.start(fill(self._pools, self._up, switch.before.engines))

    def _engine(self, spec: EngineSpec) -> Engine:
        return self._router.engines[spec.name]
