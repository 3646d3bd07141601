"""Before a switch of layout: all that can be done, and refused, while every engine serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from sglang_adapt.core.handoff import UnexportableAnswer, UnexportableCall
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.keeper import KeeperError
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.router.asking import ask_handoff
from sglang_adapt.router.calls import EngineCallError, EngineGoneError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.mappings import Mappings
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Switch, SwitchRefusedError

logger = logging.getLogger(__name__)


class Preparing:
    """See the module.

    Args:
        router: where requests are.
        pools: the way to the engines' ranks.
        mappings: which engines can read the KV of all GPUs.
        drain_timeout_s: how long requests that cannot be moved may take to end.
    """

    def __init__(self, router: Router, pools: Pools, mappings: Mappings, drain_timeout_s: float) -> None:
        self._router = router
        self._pools = pools
        self._mappings = mappings
        self._drain_timeout_s = drain_timeout_s

    async def run(self, switch: Switch) -> None:
        """Afterwards no engine of either layout that the switch changes gets requests.

        Raises:
            SwitchRefusedError: they all do as before.
        """
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

    async def _map(self, spec: EngineSpec) -> None:
        try:
            await self._mappings.map(spec)
        except EngineCallError as error:
            raise SwitchRefusedError(str(error)) from error
        except KeeperError as error:
            raise SwitchRefusedError(f"engine {spec} cannot read the KV of all GPUs: {error}") from error

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
                    answers = await ask_handoff(self._pools, spec, UnexportableCall(), UnexportableAnswer)
                except EngineGoneError:
                    break
                if not answers[0].reasons:
                    break
                switch.requests["drained"] += len(answers[0].reasons)
                logger.info("%s: %d requests cannot be moved and end first: %s", spec, *_reasons(answers[0].reasons))
                await self._router.ended(answers[0].reasons)

    def _engine(self, spec: EngineSpec) -> Engine:
        return self._router.engines[spec.name]


def _reasons(reasons: Mapping[str, str]) -> tuple[int, str]:
    return len(reasons), "; ".join(sorted(set(reasons.values())))
