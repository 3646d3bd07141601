"""Tells engines the limits of their iterations (`policy.limits`): when they change, and before what needs them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sglang_adapt.policy.limits import OPEN, Limits
from sglang_adapt.router.calls import CallBrokenError, EngineCallError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.pools import Call

logger = logging.getLogger(__name__)


class LimitKeeper:
    """The limits that engines have.

    Args:
        wanted: what the limits of an engine should be now.
        begin: sends an engine's ranks a call before it returns (`EngineCalls.begin`).
        kill: kills an engine of which nobody knows what its ranks did; it is started again.
        epoch: of the layout now.
    """

    def __init__(
        self,
        wanted: Callable[[Engine], Limits],
        begin: Call,
        kill: Callable[[Engine, str], None],
        epoch: Callable[[], int],
    ) -> None:
        self._wanted = wanted
        self._begin = begin
        self._kill = kill
        self._epoch = epoch
        self._told: dict[str, tuple[int, Limits | None]] = {}
        """By engine: its start, and what it was told last; None if that failed."""
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def refresh(self, engines: Iterable[Engine]) -> None:
        """Tell each engine its limits if they have changed; not while it has not answered the last time."""
        for engine in engines:
            if engine.state is EngineState.READY and not self._open[engine.name]:
                self.tell(engine, self._wanted(engine))

    def tell(self, engine: Engine, limits: Limits) -> None:
        """Tell a ready engine these limits, if it has others: it has them before whatever is sent to it next."""
        if engine.state is not EngineState.READY:
            return
        start, told = self._told.get(engine.name, (engine.restarts, OPEN))
        if start != engine.restarts:
            # An engine that was started anew has none.
            told = OPEN
        if limits == told:
            return
        self._told[engine.name] = (engine.restarts, limits)
        self._open[engine.name] += 1
        payload = {"prefill_tokens": limits.prefill_tokens, "requests": limits.requests}
        answer = self._begin(engine.name, "limits", payload, self._epoch())
        task = asyncio.get_running_loop().create_task(self._read(engine, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, engine: Engine, answer: Awaitable[list[dict[str, Any]]]) -> None:
        start = engine.restarts
        try:
            await answer
        except EngineCallError as error:
            # Which ones it has is known again when it has answered to others.
            self._told[engine.name] = (start, None)
            if isinstance(error, CallBrokenError):
                self._kill(engine, str(error))
            else:
                # It has gone, or a switch has begun meanwhile: the next refresh tells it what holds then.
                logger.warning("limits of %s are as they were: %s", engine.name, error)
        finally:
            self._open[engine.name] -= 1
