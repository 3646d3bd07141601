"""Shutting down: let what has been accepted finish, stop the engines. The front refuses what is new.

What the front has accepted may not have come yet: it is being tokenized, or a prompt of several samples waits for its
prefix. So the router takes requests until the front says that it has none any more.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.router import Router
from sglang_adapt.router.starts import EngineStarts
from sglang_adapt.router.supervisor import Supervisor
from sglang_adapt.upstream import wire

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0


async def drain(
    timeout_s: float,
    router: Router,
    modes: Modes | None,
    starts: EngineStarts,
    supervisor: Supervisor,
    keepers: Keepers,
) -> None:
    """Returns when all engines and keepers have ended.

    Args:
        timeout_s: how long requests may take to end; after that they get a 503.
    """
    router.accepting = False
    logger.info("draining: %d unfinished requests, at most %.0f s", router.in_flight, timeout_s)
    deadline = time.monotonic() + timeout_s
    while (router.in_flight or not router.closed) and time.monotonic() < deadline:
        router.fail_too_long("the server is shutting down")
        if modes is not None:
            modes.let_go("the server is shutting down, and its engine is not in the layout")
        await asyncio.sleep(0.02)
    router.closed = True
    if router.in_flight:
        router.fail_all(f"the server shut down before this request was done ({timeout_s:.0f} s)")
    stopping = asyncio.get_running_loop().create_task(supervisor.stop(_STOP_TIMEOUT_S))
    await asyncio.sleep(0)
    for spec in starts.started():
        engine = router.engines[spec.name]
        if engine.state is EngineState.READY:
            engine.state = EngineState.STOPPED
            engine.send(wire.encode_shutdown())
        else:
            for process in supervisor.run_of(spec).processes:
                process.kill()
    await stopping
    keepers.stop()
    logger.info("all engines have stopped")
