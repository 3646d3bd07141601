"""The engines that leave the layout: they hand out what they have, and forget it, or go on with it after all."""

from __future__ import annotations

import asyncio

import numpy as np

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.handoff import (
    ExportAnswer,
    ExportCall,
    ReleaseAnswer,
    ReleaseCall,
    RestoreAnswer,
    RestoreCall,
)
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.asking import ask_handoff
from sglang_adapt.router.calls import CallRefusedError, EngineCallError, EngineGoneError
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.precopy import Precopy
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Export, Switch, SwitchRefusedError
from sglang_adapt.upstream import wire


class Leaving:
    """See the module. Exports and their ways back; nothing of one is kept here.

    Args:
        router: where requests are.
        pools: whose blocks are whose, and the way to the engines' ranks.
        up: which engines are.
    """

    def __init__(self, router: Router, pools: Pools, up: Lives) -> None:
        self._router = router
        self._pools = pools
        self._up = up

    def holds(self, export: Export) -> bool:
        """Does the engine still hold what it handed out?"""
        return self._up.is_same(export.spec, export.deaths)

    async def export_all(self, switch: Switch, exports: list[Export], precopy: Precopy) -> None:
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
        answers = await ask_handoff(self._pools, spec, ExportCall(switch.epoch, keep), ExportAnswer)
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
        self._router.detach(self._router.engines[spec.name], export.rids)
        if answers[0].staying:
            await self.restore(export)
            rid, reason = next(iter(answers[0].staying.items()))
            raise SwitchRefusedError(f"{spec}: request {rid} cannot be moved: {reason}")
        return export

    async def wait_for_the_dead(self, switch: Switch) -> None:
        """Wait until engines that leave and have died are gone: what enters needs their blocks to go on."""
        for spec in switch.leaving:
            if self._router.engines[spec.name].state is EngineState.DEAD and self._pools.counts(spec)[0]:
                await self._pools.gone(spec, self._pools.deaths(spec))

    async def release(self, switch: Switch, export: Export) -> None:
        """Let an engine forget what lives elsewhere now."""
        if not self.holds(export):
            return
        call = ReleaseCall(export.epoch, export.rids, self._pools.settings.standby_blocks)
        try:
            answers = await ask_handoff(self._pools, export.spec, call, ReleaseAnswer)
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

    async def restore(self, export: Export, leave: int = 0) -> list[str]:
        """Let an engine go on with what it holds; returns the ids.

        It gets all free blocks with it, but for `leave` on each rank. Raises EngineCallError.
        """
        if not self.holds(export):
            raise EngineGoneError(f"{export.spec} has died since it handed its requests out")
        lent = self._pools.lend(export.spec, max(0, self._pools.available(export.spec) - leave))
        call = RestoreCall(export.epoch, [pack_ids(rank) for rank in lent])
        try:
            answers = await ask_handoff(self._pools, export.spec, call, RestoreAnswer)
        except CallRefusedError as error:
            # It holds requests that it cannot go on with, and blocks that nobody can account for.
            self._pools.kill(export.spec, str(error))
            raise
        self._pools.restored(export.spec, export.pages)
        engine = self._router.engines[export.spec.name]
        there = [rid for rid in answers[0].restored if rid in self._router.moving.in_flight]
        self._router.attach(engine, there)
        for rid in set(answers[0].restored) - set(there):
            # Given up while it was kept: its client has been answered, the engine does not know yet.
            engine.send(wire.encode_abort(rid))
        return there
