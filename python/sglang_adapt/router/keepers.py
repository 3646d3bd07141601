"""The keepers of the deployment: started before the engines, watched, and started anew when one ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, SpawnContext

from sglang_adapt.keeper import KeeperConfig, KeeperError, KeeperHandle, Progress, start_keeper
from sglang_adapt.kv.staged_handle import StagedHandle
from sglang_adapt.memory import RegionHandle
from sglang_adapt.router.restarts import RestartLimit, Restarts
from sglang_adapt.weights import WeightsHandle

logger = logging.getLogger(__name__)

_LOG_STEP = 0.25


class Keepers:
    """One keeper a GPU, or one for all virtual GPUs.

    Args:
        loop: the router's event loop; all callbacks run on it.
        context: in which the keepers' processes are started.
        configs: what each keeper is to own.
        limit: of restarts of one keeper.
        on_ready: called each time when all keepers are ready.
        on_lost: called with the GPUs whose keeper has ended and why; it is being started anew.
        on_failed: called with the reason when a keeper cannot start, or has died too often.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ForkServerContext | SpawnContext,
        configs: Sequence[KeeperConfig],
        limit: RestartLimit,
        on_ready: Callable[[], None],
        on_lost: Callable[[tuple[int, ...], str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._configs = tuple(configs)
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._keepers: dict[str, KeeperHandle] = {}
        self._restarts = {config.name: Restarts(limit) for config in self._configs}
        self._started_at: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self._stopping = False

    def start(self) -> None:
        """Start all keepers; returns at once."""
        for config in self._configs:
            self._start(config)

    @property
    def ready(self) -> bool:
        """Every keeper has loaded and lives (true for a deployment without keepers)."""
        return all(
            keeper is not None and keeper.is_ready and keeper.process.is_alive()
            for keeper in (self._keepers.get(config.name) for config in self._configs)
        )

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by keeper's name."""
        return {keeper.config.name: keeper.process.pid or 0 for keeper in self._keepers.values()}

    def weights(self, gpu: int) -> WeightsHandle | None:
        """The handle of the copy of the weights that a GPU's engines use; None without keepers.

        Raises:
            KeeperError: the GPU's keeper is not ready.
        """
        for keeper in self._keepers.values():
            if gpu in keeper.config.gpu_ids:
                return keeper.weights
        return None

    def region(self, name: str, gpu: int) -> RegionHandle:
        """The handle of a region on a GPU.

        Raises:
            KeeperError: the GPU's keeper is not ready, or there is none, or it has no such region.
        """
        for keeper in self._keepers.values():
            if gpu in keeper.config.gpu_ids:
                return keeper.region(name, gpu)
        raise KeeperError(f"GPU {gpu} has no keeper, so it has no region {name!r}")

    def staged(self, gpu: int) -> StagedHandle:
        """Where the KV of a GPU is asked for.

        Raises:
            KeeperError: the GPU's keeper is not ready, or there is none, or it sends nothing.
        """
        for keeper in self._keepers.values():
            if gpu in keeper.config.gpu_ids:
                return keeper.staged(gpu)
        raise KeeperError(f"GPU {gpu} has no keeper, so nobody sends its KV")

    def stop(self) -> None:
        """End all keepers; the engines must have ended."""
        self._stopping = True
        for keeper in self._keepers.values():
            self._loop.remove_reader(keeper.process.sentinel)
            if not keeper.connection.closed:
                self._loop.remove_reader(keeper.connection.fileno())
            keeper.stop()

    def _start(self, config: KeeperConfig) -> None:
        logger.info("%s: loading the weights", config.name)
        keeper = start_keeper(self._context, config)
        self._keepers[config.name] = keeper
        self._started_at[config.name] = time.monotonic()
        self._logged[config.name] = 0.0
        self._loop.add_reader(keeper.connection.fileno(), self._on_message, keeper)
        self._loop.add_reader(keeper.process.sentinel, self._on_exit, keeper)

    def _on_message(self, keeper: KeeperHandle) -> None:
        config = keeper.config
        try:
            message = keeper.receive()
        except KeeperError as error:
            self._loop.remove_reader(keeper.connection.fileno())
            self._loop.remove_reader(keeper.process.sentinel)
            self._on_failed(str(error))
            return
        if isinstance(message, Progress):
            if message.fraction >= self._logged[config.name] + _LOG_STEP and message.fraction < 1:
                self._logged[config.name] = message.fraction
                logger.info("%s: %.0f %% of %.2f GB loaded", config.name, *_progress(message))
            return
        self._loop.remove_reader(keeper.connection.fileno())
        seconds = time.monotonic() - self._started_at[config.name]
        logger.info(
            "%s: ready after %.1f s, %s for TP sizes up to %s", config.name, seconds, config.part, config.finest_tp
        )
        if self.ready:
            self._on_ready()

    def _on_exit(self, keeper: KeeperHandle) -> None:
        self._loop.remove_reader(keeper.process.sentinel)
        if self._stopping or not keeper.is_ready:
            # A keeper that ends while it loads is told of by its connection.
            return
        keeper.process.join(0)
        why = f"{keeper.config.name} (pid {keeper.process.pid}) has ended with {keeper.exit}"
        keeper.connection.close()
        restarts = self._restarts[keeper.config.name]
        if not restarts.again(time.monotonic()):
            limit = restarts.limit
            self._on_failed(
                f"{why}, more often than {limit.restarts} times within {limit.window_s:g} s (--adapt-restart-limit, "
                "--adapt-restart-window)"
            )
            return
        self._start(keeper.config)
        self._on_lost(keeper.config.gpu_ids, why)


def _progress(message: Progress) -> tuple[float, float]:
    return 100 * message.fraction, message.total_bytes / 1e9
