"""The engines that read prompts for others: they are told so, and what becomes of the requests that they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from sglang_adapt.core.handover import HandoverAnswer, HandoverCall, KeepCall, LeaveCall, LetGoCall
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.asking import ask_handover
from sglang_adapt.router.calls import CallRefusedError, EngineCallError
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.tasks import Tasks
from sglang_adapt.router.told import Told

logger = logging.getLogger(__name__)


class Readers:
    """See the module.

    Args:
        pools: the way to the engines' ranks.
        up: which engines are.
        tasks: where calls are under way.
        told: what has become of requests.
    """

    def __init__(self, pools: Pools, up: Lives, tasks: Tasks, told: Told) -> None:
        self._pools = pools
        self._up = up
        self._tasks = tasks
        self._told = told
        self._leaving: dict[EngineSpec, int] = {}

    def hand_over(self, spec: EngineSpec) -> None:
        """Tell an engine that it hands requests over from now on, if it does not know."""
        deaths = self._pools.deaths(spec)
        if self._leaving.get(spec) != deaths:
            self._leaving[spec] = deaths
            self._tasks.start(self._tell(spec, LeaveCall(True, self._pools.unit_tokens)))

    def stop(self, still: Callable[[EngineSpec], bool] = lambda spec: False) -> None:
        """Tell those that know that they hand nothing over any more, but for those that `still` do."""
        for spec in [spec for spec in self._leaving if not still(spec)]:
            if self._up.is_same(spec, self._leaving.pop(spec)):
                self._tasks.start(self._tell(spec, LeaveCall(False, 0)))

    def keep(self, spec: EngineSpec, holds: Sequence[int]) -> None:
        """Let an engine go on with requests; those given up meanwhile it forgets."""
        self._tasks.start(self._keep(spec, holds))

    def forget(self, spec: EngineSpec, holds: Collection[int]) -> None:
        """An engine need not hold requests any more."""
        self._tasks.start(self.let_go(spec, holds))

    async def let_go(self, spec: EngineSpec, holds: Collection[int], deaths: int | None = None) -> None:
        """The same; nothing is to be done if it has died since, more than `deaths` times."""
        if deaths is None or self._pools.deaths(spec) == deaths:
            await self._ask(spec, LetGoCall(list(holds)))

    async def _keep(self, spec: EngineSpec, holds: Sequence[int]) -> None:
        answers = await self._ask(spec, KeepCall(list(holds)))
        if answers is None:
            return
        kept = answers[0].kept
        self._told.add("kept", len(kept))
        gone = [hold for hold in holds if hold not in kept]
        if gone:
            self._told.add("given_up", len(gone))
            await self.let_go(spec, gone)

    async def _tell(self, spec: EngineSpec, call: LeaveCall) -> None:
        if await self._ask(spec, call) is not None:
            logger.info(
                "%s %s", spec, "hands requests over when it has prefilled them" if call.on else "is mixed again"
            )

    async def _ask(self, spec: EngineSpec, call: HandoverCall) -> list[HandoverAnswer] | None:
        """Ask an engine that holds requests; None if it has died."""
        try:
            return await ask_handover(self._pools, spec, call)
        except CallRefusedError as error:
            # It holds requests that nobody can account for.
            self._pools.kill(spec, str(error))
        except EngineCallError as error:
            logger.info("%s: %s", spec, error)
        return None
