"""Tells engines the limits of their iterations (`policy.limits`) when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from sglang_adapt.policy.limits import OPEN, Limits
from sglang_adapt.router.calls import CallBrokenError, EngineCallError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.pools import Call

logger = logging.getLogger(__name__)


class LimitKeeper:
    """The limits that engines have.

    Args:
        wanted: what the limits of an engine should be now.
        call: asks an engine's ranks.
        kill: kills an engine of which nobody knows what its ranks did; it is started again.
        epoch: of the layout now.
    """

    def __init__(
        self,
        wanted: Callable[[Engine], Limits],
        call: Call,
        kill: Callable[[Engine, str], None],
        epoch: Callable[[], int],
    ) -> None:
        self._wanted = wanted
        self._call = call
        self._kill = kill
        self._epoch = epoch
        self._known: dict[str, tuple[int, Limits]] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    def refresh(self, engines: Iterable[Engine]) -> None:
        """Tell each engine its limits if they have changed; one call at a time to an engine."""
        for engine in engines:
            if engine.state is not EngineState.READY or engine.name in self._telling:
                continue
            start, known = self._known.get(engine.name, (engine.restarts, OPEN))
            if start != engine.restarts:
                # An engine that was started anew has none.
                known = OPEN
            wanted = self._wanted(engine)
            if wanted != known:
                self._telling[engine.name] = asyncio.get_running_loop().create_task(self._tell(engine, wanted))

    async def _tell(self, engine: Engine, limits: Limits) -> None:
        start = engine.restarts
        payload = {"prefill_tokens": limits.prefill_tokens, "requests": limits.requests}
        try:
            await self._call(engine.name, "limits", payload, self._epoch())
            self._known[engine.name] = (start, limits)
        except CallBrokenError as error:
            self._kill(engine, str(error))
        except EngineCallError as error:
            # It has gone, or a switch has begun meanwhile: the next refresh tells it what holds then.
            logger.warning("limits of %s are as they were: %s", engine.name, error)
        finally:
            del self._telling[engine.name]
