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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.handoff import (
    AdoptAnswer,
    ExportAnswer,
    ExportCall,
    HandoffAnswer,
    HandoffCall,
    ReleaseAnswer,
    ReleaseCall,
    RestoreAnswer,
    RestoreCall,
    UnexportableAnswer,
    UnexportableCall,
    answer_of,
    call_payload,
)
from sglang_adapt.core.layout import EngineSpec, Layout
from sglang_adapt.keeper import KeeperError
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.memory import RegionHandle
from sglang_adapt.policy.carry import Costs, NoRoomError, Strategy
from sglang_adapt.policy.planner import Trigger
from sglang_adapt.router.calls import CallRefusedError, EngineCallError, EngineGoneError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.handovers import Handovers
from sglang_adapt.router.kept import Kept
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.placing import Placing
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.precopy import Precopy
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import (
    Arrival,
    Export,
    Outcome,
    Switch,
    SwitchRefusedError,
    adopt_call,
    copies_of,
    deal,
)
from sglang_adapt.router.tasks import Tasks
from sglang_adapt.upstream import wire

logger = logging.getLogger(__name__)

MEASURED_COSTS = Costs()

Answer = TypeVar("Answer", bound=HandoffAnswer)


class Modes:
    """The layout that serves, and its changes, one at a time.

    Args:
        router: where requests are.
        pools: whose blocks are whose, and the way to the engines' ranks.
        specs: all candidates by name.
        regions: the KV regions of all GPUs now.
        drain_timeout_s: how long requests that cannot be moved may take to end.
        costs: by which strategies are compared.
        ended: called with each switch that was asked for, and what came of it.

    Attributes:
        kept: requests that stay paused at engines outside the layout.
        handovers: single requests on their way from engine to engine.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        regions: Callable[[], dict[int, RegionHandle]],
        drain_timeout_s: float,
        costs: Costs = MEASURED_COSTS,
        ended: Callable[[Switch, Outcome], None] = lambda switch, outcome: None,
    ) -> None:
        self._router = router
        self._pools = pools
        self._specs = specs
        self._regions = regions
        self._drain_timeout_s = drain_timeout_s
        self._ended = ended
        self._up = Lives(router, pools)
        self._placing = Placing(router, pools, specs, self._lives, costs)
        self._current: Switch | None = None
        self._mapped: dict[EngineSpec, tuple[int, dict[int, RegionHandle]]] = {}
        self.kept = Kept(router, pools, specs, lambda: self._current is None or not self._current.epoch, self._forget)
        self._tasks = Tasks()
        self.handovers = Handovers(router, pools, specs, self._is_mapped, self._map, self.engine_gone)

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
            self._tasks.start(self._fill(self._router.layout.engines))
            self.kept.make_room()
            self.handovers.resume()
        self._ended(switch, Outcome.IMPAIRED if switch.failures else Outcome.SWITCHED)
        return switch

    def engine_ready(self, spec: EngineSpec) -> None:
        """An engine has been started again: give it its share of the blocks, if it is in the layout."""
        self._tasks.start(self._fill([spec]))
        self.handovers.wake()

    def engine_gone(self) -> None:
        """All processes of an engine have ended and its blocks are free: the layout's engines get them."""
        if self._current is None:
            self._tasks.start(self._fill(self._router.layout.engines))

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
        await self._release(Switch(layout, layout, Strategy.RECOMPUTE, why), export)
        await self._fill(layout.engines)

    @property
    def switching_to(self) -> Layout | None:
        """The layout of the switch that is under way."""
        return None if self._current is None else self._current.after

    # The phases.

    async def _run(self, switch: Switch) -> None:
        router = self._router
        with switch.phase("prepare"):
            await self._prepare(switch)
            await self.kept.settled()
        switch.epoch = self._pools.begin_epoch()
        precopy = Precopy(self._pools, self._handoff, self._up.is_up)
        exports: list[Export] = []
        try:
            if switch.strategy in (Strategy.AUTO, Strategy.MIGRATE):
                with switch.phase("precopy"):
                    await self._copy_ahead(switch, precopy)
            with switch.phase("export"):
                await self._export_all(switch, exports, precopy)
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
            await self._blocks_of_the_dead(switch)
            served = await self._adopt_all(switch, arrivals, precopy)
        precopy.drop()
        if not served:
            await self._roll_back(switch, exports)
            raise SwitchRefusedError(f"layout {switch.before} stays: {'; '.join(switch.failures)}")
        if switch.strategy is Strategy.KEEP:
            for export in exports:
                if not self._lives(export):
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
            await asyncio.gather(*(self._release(switch, export) for export in gone))
            await self._fill(switch.after.engines)

    async def _prepare(self, switch: Switch) -> None:
        """All that can be done, and refused, while everything serves."""
        for spec in switch.entering:
            state = self._engine(spec).state
            if state is not EngineState.READY:
                raise SwitchRefusedError(
                    f"engine {spec} of layout {switch.after} is {state.value}; ask again when it is ready"
                )
        self._refuse_too_long(switch)
        await asyncio.gather(*(self._map(spec) for spec in switch.entering))
        names = [spec.name for spec in (*switch.leaving, *switch.entering)]
        self._router.pause(names)
        try:
            await asyncio.wait_for(self._wait_for_what_stays(switch), self._drain_timeout_s)
        except (TimeoutError, EngineCallError) as error:
            self._router.activate(switch.before)
            text = f"after {self._drain_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise SwitchRefusedError(
                f"layout {switch.before} stays: requests that cannot be moved have not ended: {text}"
            ) from error

    def _refuse_too_long(self, switch: Switch) -> None:
        """Raises SwitchRefusedError if a request would have to move that no engine holds which enters."""
        if switch.strategy in (Strategy.KEEP, Strategy.DRAIN):
            return
        long = self._router.long
        most = long.limit(spec.name for spec in switch.entering)
        for rid, need in long.needs.items():
            at = next((spec for spec in switch.leaving if rid in self._engine(spec).in_flight), None)
            if at is not None and need > most:
                raise SwitchRefusedError(
                    f"layout {switch.before} stays: request {rid} on {at} may come to have {need} tokens, and the "
                    f"engines that enter layout {switch.after} hold requests of {most}; let it end first (strategy "
                    f"drain), keep it paused (strategy keep), or name a layout in which {at} stays"
                )

    def _is_mapped(self, spec: EngineSpec) -> bool:
        try:
            return self._mapped.get(spec) == (self._pools.deaths(spec), self._regions())
        except KeeperError:
            # One is being started again.
            return False

    async def _map(self, spec: EngineSpec) -> None:
        """Let an engine map the KV regions of all GPUs, which it does once."""
        wanted = (self._pools.deaths(spec), self._regions())
        if self._mapped.get(spec) == wanted:
            return
        regions = {str(gpu): msgspec.to_builtins(handle) for gpu, handle in wanted[1].items()}
        try:
            await self._pools.ask(spec, "kv_map", {"regions": regions})
        except EngineCallError as error:
            raise SwitchRefusedError(str(error)) from error
        self._mapped[spec] = wanted

    async def _wait_for_what_stays(self, switch: Switch) -> None:
        """Requests that cannot be moved, or by DRAIN all of them, end first, while they get no new neighbours."""
        if switch.strategy is Strategy.DRAIN:
            rids = [rid for spec in switch.leaving for rid in self._engine(spec).in_flight]
            if rids:
                switch.requests["drained"] += len(rids)
            await self._router.ended(rids)
            return
        for spec in switch.leaving:
            engine = self._engine(spec)
            while engine.state is EngineState.READY and engine.in_flight:
                try:
                    answers = await self._handoff(spec, UnexportableCall(), UnexportableAnswer)
                except EngineGoneError:
                    break
                if not answers[0].reasons:
                    break
                switch.requests["drained"] += len(answers[0].reasons)
                logger.info("%s: %d requests cannot be moved and end first: %s", spec, *_reasons(answers[0].reasons))
                await self._router.ended(answers[0].reasons)

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

    async def _export_all(self, switch: Switch, exports: list[Export], precopy: Precopy) -> None:
        """Add what all engines that leave hand out; an engine that is dead has nothing. Raises SwitchRefusedError."""
        alive = [spec for spec in switch.leaving if self._up.is_up(spec)]
        results = await asyncio.gather(*(self._export(switch, spec, precopy) for spec in alive), return_exceptions=True)
        exports += [result for result in results if isinstance(result, Export)]
        for spec, result in zip(alive, results, strict=True):
            if isinstance(result, (CallRefusedError, SwitchRefusedError)):
                raise SwitchRefusedError(str(result)) from result
            if isinstance(result, EngineCallError):
                switch.failures.append(f"{spec} died: {result}")
            elif isinstance(result, BaseException):
                raise result

    async def _export(self, switch: Switch, spec: EngineSpec, precopy: Precopy) -> Export:
        deaths = self._pools.deaths(spec)
        keep = self._pools.settings.standby_blocks
        answers = await self._handoff(spec, ExportCall(switch.epoch, keep), ExportAnswer)
        switch.note_steps("export", (answer.steps_ms for answer in answers))
        pages = np.stack([unpack_ids(answer.exported) for answer in answers])
        self._pools.exported(spec, pages, np.stack([unpack_ids(answer.given) for answer in answers]))
        requests = tuple(answers[0].requests)
        blocks = {
            request.rid: [
                [*precopy.blocks(spec, request, rank), *answer.blocks[at]] for rank, answer in enumerate(answers)
            ]
            for at, request in enumerate(requests)
        }
        export = Export(spec, deaths, switch.epoch, requests, blocks, pages)
        self._router.detach(self._engine(spec), export.rids)
        if answers[0].staying:
            await self._restore(export)
            rid, reason = next(iter(answers[0].staying.items()))
            raise SwitchRefusedError(f"{spec}: request {rid} cannot be moved: {reason}")
        return export

    async def _blocks_of_the_dead(self, switch: Switch) -> None:
        """Wait until engines that leave and have died are gone: what enters needs their blocks to go on."""
        for spec in switch.leaving:
            if self._engine(spec).state is EngineState.DEAD and self._pools.counts(spec)[0]:
                await self._pools.gone(spec, self._pools.deaths(spec))

    async def _adopt_all(
        self, switch: Switch, arrivals: Mapping[EngineSpec, Sequence[Arrival]], precopy: Precopy
    ) -> list[EngineSpec]:
        """Let every engine that enters take its requests up, those first that it had kept; returns those that did."""
        results = await asyncio.gather(
            *(self._enter(switch, spec, arrivals.get(spec, ()), precopy) for spec in switch.entering),
            return_exceptions=True,
        )
        served = []
        for spec, result in zip(switch.entering, results, strict=True):
            if result is None:
                served.append(spec)
            elif isinstance(result, EngineCallError):
                switch.failures.append(f"{spec} could not take its requests up: {result}")
            elif isinstance(result, BaseException):
                raise result
        return served

    async def _enter(self, switch: Switch, spec: EngineSpec, arrivals: Sequence[Arrival], precopy: Precopy) -> None:
        """Let an engine go on with what it had kept, then take up what arrives.

        In this order, because a prompt that is read in chunks can go on only where no other one is. Raises as `_adopt`.
        """
        kept = self.kept.exports.pop(spec, None)
        if kept is None:
            await self._adopt(switch, spec, arrivals, precopy)
            return
        self._router.unkeep(self._engine(spec))
        try:
            resumed = await self._restore(kept, self._blocks(spec, arrivals))
        except EngineCallError as error:
            switch.failures.append(f"{spec} did not go on with what it had kept: {error}")
            self._router.strand(self._router.moving, kept.rids, str(error))
            resumed = []
        switch.requests["resumed"] += len(resumed)
        try:
            await self._adopt(switch, spec, arrivals, precopy)
        except CallRefusedError as error:
            # It runs requests again, but may stay outside the layout, where it has no blocks for them.
            self._pools.kill(spec, str(error))
            raise

    def _blocks(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> int:
        """Blocks on each rank that the arrivals need, beside those that hold what was copied ahead."""
        page = self._pools.settings.geometry.tokens_per_block(spec.tp)
        return sum(arrival.blocks(page) for arrival in arrivals)

    async def _adopt(self, switch: Switch, spec: EngineSpec, arrivals: Sequence[Arrival], precopy: Precopy) -> None:
        """Reserve blocks, let the engine copy and take up, and note it in the ledgers.

        Raises:
            CallRefusedError: nothing has changed.
            EngineCallError: the engine is gone, and what it had with it.
        """
        pools = self._pools
        if not self._up.is_up(spec):
            raise EngineGoneError(f"{spec} has died since the switch began")
        page = pools.settings.geometry.tokens_per_block(spec.tp)
        try:
            reserved = pools.reserve(spec, self._blocks(spec, arrivals))
        except LedgerError as error:
            raise CallRefusedError(f"{spec}: {error}") from error
        lent = pools.lend(spec, pools.available(spec))
        blocks = deal(arrivals, page, reserved)
        try:
            ticket = pools.begin_copy(copies_of(spec, arrivals, blocks))
        except LedgerError as error:
            # A source has died since this was planned.
            pools.refused(spec, reserved, lent)
            raise CallRefusedError(f"{spec}: {error}") from error
        deaths = pools.deaths(spec)
        try:
            answers = await self._handoff(spec, adopt_call(switch.epoch, arrivals, blocks, lent), AdoptAnswer)
            switch.note_steps("adopt", (answer.steps_ms for answer in answers))
        except EngineCallError as error:
            if not isinstance(error, CallRefusedError):
                await pools.gone(spec, deaths)
            pools.end_copy(ticket)
            if pools.deaths(spec) == deaths:
                pools.refused(spec, reserved, lent)
            raise
        except Exception:
            # A fault in this program, for which the engine is killed.
            pools.end_copy_when_gone(spec, deaths, ticket)
            raise
        pools.end_copy(ticket)
        ahead = [arrival.sent.pages for arrival in arrivals if arrival.sent is not None]
        pools.adopted(spec, np.concatenate([reserved, *ahead], axis=1))
        precopy.taken(arrival.request.rid for arrival in arrivals)
        self._router.attach(self._engine(spec), answers[0].adopted)

    def _strand_the_rest(
        self, switch: Switch, arrivals: Mapping[EngineSpec, Sequence[Arrival]], served: Sequence[EngineSpec]
    ) -> None:
        """Requests of engines that could not take them up go on at the others, from their tokens."""
        left = [arrival.request.rid for spec, group in arrivals.items() if spec not in served for arrival in group]
        if left:
            switch.requests["stranded"] += len(left)
            self._router.strand(self._router.moving, left, "; ".join(switch.failures))

    async def _release(self, switch: Switch, export: Export) -> None:
        """Let an engine forget what lives elsewhere now."""
        if not self._lives(export):
            return
        call = ReleaseCall(export.epoch, export.rids, self._pools.settings.standby_blocks)
        try:
            answers = await self._handoff(export.spec, call, ReleaseAnswer)
            switch.note_steps("release", (answer.steps_ms for answer in answers))
        except EngineCallError as error:
            switch.failures.append(f"{export.spec} did not forget what it had: {error}")
            if isinstance(error, CallRefusedError):
                # It holds requests that live elsewhere, and blocks that nobody can account for.
                self._pools.kill(export.spec, str(error))
            return
        given = np.stack([unpack_ids(answer.given) for answer in answers])
        self._pools.released(export.spec, export.pages, given)
        for rid in answers[0].aborted:
            # Its abort reached this engine after its export had.
            self._router.on_front_message(wire.encode_abort(rid))

    async def _fill(self, specs: Iterable[EngineSpec]) -> None:
        for spec in specs:
            if self._up.is_up(spec):
                try:
                    await self._pools.fill(spec)
                except CallRefusedError as error:
                    # Without its blocks it can hold no request for long.
                    self._pools.kill(spec, str(error))
                except EngineCallError as error:
                    logger.error("%s did not get its blocks: %s", spec, error)
                except Exception:
                    # A fault in this program: nobody knows what the engine has got.
                    logger.exception("%s: giving it its blocks broke off", spec)
                    self._pools.kill(spec, "giving it its blocks broke off")

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
                await self._restore(export)
            except EngineCallError as error:
                switch.failures.append(f"{export.spec} did not take its requests back: {error}")
                self._router.strand(self._router.moving, export.rids, str(error))
        self._pools.activate(switch.before.engines)
        self._router.activate(switch.before)
        self._tasks.start(self._fill(switch.before.engines))

    async def _restore(self, export: Export, leave: int = 0) -> list[str]:
        """Let an engine go on with what it holds; returns the ids.

        It gets all free blocks with it, but for `leave` on each rank. Raises EngineCallError.
        """
        if not self._lives(export):
            raise EngineGoneError(f"{export.spec} has died since it handed its requests out")
        lent = self._pools.lend(export.spec, max(0, self._pools.available(export.spec) - leave))
        try:
            answers = await self._handoff(
                export.spec, RestoreCall(export.epoch, [pack_ids(rank) for rank in lent]), RestoreAnswer
            )
        except CallRefusedError as error:
            # It holds requests that it cannot go on with, and blocks that nobody can account for.
            self._pools.kill(export.spec, str(error))
            raise
        self._pools.restored(export.spec, export.pages)
        engine = self._engine(export.spec)
        there = [rid for rid in answers[0].restored if rid in self._router.moving.in_flight]
        self._router.attach(engine, there)
        for rid in set(answers[0].restored) - set(there):
            # Given up while it was kept: its client has been answered, the engine does not know yet.
            engine.send(wire.encode_abort(rid))
        return there

    # The rest.

    async def _handoff(self, spec: EngineSpec, call: HandoffCall, kind: type[Answer]) -> list[Answer]:
        """Ask an engine; raises EngineCallError."""
        answers = await self._pools.ask(spec, "handoff", call_payload(call))
        return [answer_of(answer, kind) for answer in answers]

    def _lives(self, export: Export) -> bool:
        """Does the engine still hold what it handed out?"""
        return self._up.is_same(export.spec, export.deaths)

    def _engine(self, spec: EngineSpec) -> Engine:
        return self._router.engines[spec.name]


def _reasons(reasons: dict[str, str]) -> tuple[int, str]:
    return len(reasons), "; ".join(sorted(set(reasons.values())))
