"""Requests whose engine has died, or has let them go, go on at another one, computed again from their tokens.

They are handed over with the stock message by which they came and the tokens that their clients have: the engine reads
prompt and tokens again and goes on behind them. While no engine of the layout is up they wait. A request whose engines
die again and again may be the reason, and ends with a 503; before that it is tried alone, so that it does not take
those with it that had the same engines (`policy/suspects.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sglang_adapt.router.calls import CallBrokenError, EngineCallError, NotSentError
from sglang_adapt.router.engine import Engine
from sglang_adapt.router.journal import Entry
from sglang_adapt.router.pools import Call
from sglang_adapt.router.router import Router

logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Requests in one call."""
_AGAIN_S = 0.05
"""An engine that takes no messages is asked again after so long: it is seen to be dead by then, or takes them."""


class Repair:
    """Places the requests that the router has as `stranded`.

    Args:
        router: where they are.
        call: asks an engine's ranks.
        kill: kills an engine of which nobody knows what its ranks did; it is started again.
        epoch: of the layout now.
    """

    def __init__(
        self, router: Router, call: Call, kill: Callable[[Engine, str], None], epoch: Callable[[], int]
    ) -> None:
        self._router = router
        self._call = call
        self._kill = kill
        self._epoch = epoch
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Something has changed: place what can be placed."""
        if self._router.stranded.in_flight and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        router = self._router
        while True:
            placed = router.to_go_on()
            if not placed:
                return
            rids = [rid for rid, engine in placed if engine is placed[0][1]][:_AT_ONCE]
            for rid in rids:
                if rid in router.stranded.in_flight and not router.journal[rid].ids:
                    router.send_again(rid)
            rids = [rid for rid in rids if rid in router.stranded.in_flight and router.journal[rid].ids]
            if rids and not await self._recover(rids, placed[0][1]):
                asyncio.get_running_loop().call_later(_AGAIN_S, self.wake)
                return

    async def _recover(self, rids: list[str], engine: Engine) -> bool:
        """Hand requests that have tokens to an engine. Returns whether it was asked at all."""
        entries = {rid: self._router.journal[rid] for rid in rids}
        # They are the engine's from here on: if it dies, or ends one of them, that is seen as for any other.
        self._router.take_up(engine, rids)
        payload = {"requests": [_request(entry) for entry in entries.values()]}
        try:
            await self._call(engine.name, "recover", payload, self._epoch())
        except NotSentError as error:
            # None of them has lost an engine by this.
            logger.warning("%s was not told to go on with %d requests, which wait: %s", engine.name, len(rids), error)
            self._router.take_back(engine, rids)
            return False
        except EngineCallError as error:
            logger.error("%s did not go on with %d requests: %s", engine.name, len(rids), error)
            if isinstance(error, CallBrokenError):
                self._kill(engine, str(error))
            else:
                self._router.strand(engine, rids, str(error))
            return True
        logger.info("%s goes on with %d requests from their tokens", engine.name, len(rids))
        return True


def _request(entry: Entry) -> dict[str, Any]:
    return {"message": entry.data, "output_ids": entry.ids.tolist()}
