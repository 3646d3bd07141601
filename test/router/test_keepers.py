"""Keepers that die: started anew, until they have died too often."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

from sglang_adapt.keeper import KeeperConfig, KeeperError, RegionSpec
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.router.restarts import RestartLimit, Restarts


def test_restarts_within_the_window_are_counted() -> None:
    restarts = Restarts(RestartLimit(2, 10.0))
    assert [restarts.again(now) for now in (0.0, 1.0, 2.0, 9.9)] == [True, True, False, False]
    assert restarts.again(10.5), "the first one is out of the window"
    assert not restarts.again(10.9)


def test_a_keeper_that_dies_again_and_again_is_given_up() -> None:
    told: list[str] = []
    failed: list[str] = []

    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (told, failed)
            await asyncio.sleep(0.01)

    async def main() -> None:
        config = KeeperConfig(SimpleNamespace(device="cpu"), None, (0, 1), (RegionSpec("ledger", 64, on_host=True),))
        keepers = Keepers(
            asyncio.get_running_loop(),
            multiprocessing.get_context("forkserver"),
            [config],
            RestartLimit(1, 60.0),
            on_ready=lambda: told.append("ready"),
            on_lost=lambda gpus, why: told.append(f"lost {gpus}"),
            on_failed=failed.append,
        )
        keepers.start()
        assert not keepers.ready
        await until(lambda: told == ["ready"])
        assert keepers.ready
        first = keepers.region("ledger", 1)
        [pid] = keepers.pids.values()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: told == ["ready", "lost (0, 1)", "ready"])
        assert keepers.region("ledger", 1) != first
        [again] = keepers.pids.values()
        os.kill(again, signal.SIGKILL)
        await until(lambda: bool(failed))
        assert failed == [
            f"keeper_gpu0-1 (pid {again}) has ended with signal 9, more often than 1 times within 60 s "
            "(--adapt-restart-limit, --adapt-restart-window)"
        ]
        assert not keepers.ready
        assert told == ["ready", "lost (0, 1)", "ready"]
        try:
            keepers.region("ledger", 5)
        except KeeperError as error:
            assert "GPU 5 has no keeper" in str(error)
        else:
            raise AssertionError("GPU 5 has a region")
        keepers.stop()

    asyncio.run(main())
