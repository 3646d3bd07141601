"""A keeper as seen by the process that started it."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess

from sglang_adapt.core.process import exit_text
from sglang_adapt.keeper.config import KeeperConfig
from sglang_adapt.keeper.messages import Failed, Progress, Ready, decode
from sglang_adapt.keeper.process import keeper_main
from sglang_adapt.kv.staged_handle import StagedHandle
from sglang_adapt.memory import RegionHandle
from sglang_adapt.weights import WeightsHandle


class KeeperError(RuntimeError):
    """A keeper could not load or allocate, or has ended; the text says which and why."""


class KeeperHandle:
    """One keeper.

    Attributes:
        config: what it was started with.
        process: its process; `process.sentinel` is readable when it has ended.
        connection: readable when there is something to `receive`.
    """

    def __init__(self, config: KeeperConfig, process: ForkServerProcess | SpawnProcess, connection: Connection) -> None:
        self.config = config
        self.process = process
        self.connection = connection
        self._ready: Ready | None = None

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    @property
    def weights(self) -> WeightsHandle:
        """The filled store. Raises KeeperError if the keeper is not ready, or has no weights."""
        weights = self._require_ready().weights
        if weights is None:
            raise KeeperError(f"{self.config.name} was started without weights")
        return weights

    def region(self, name: str, gpu_id: int) -> RegionHandle:
        """A region of one of its GPUs. Raises KeeperError if it is not ready or has no such region."""
        regions = self._require_ready().regions
        if name not in regions or gpu_id not in regions[name]:
            raise KeeperError(
                f"{self.config.name} has no region {name!r} on GPU {gpu_id}; it has "
                f"{', '.join(regions) or 'none'} on GPUs {', '.join(map(str, self.config.gpu_ids))}"
            )
        return regions[name][gpu_id]

    def staged(self, gpu_id: int) -> StagedHandle:
        """Where the KV of one of its GPUs is asked for. Raises KeeperError if it is not ready, or sends none."""
        staged = self._require_ready().staged
        if gpu_id not in staged:
            raise KeeperError(f"{self.config.name} does not send KV of GPU {gpu_id}")
        return staged[gpu_id]

    def receive(self) -> Progress | Ready:
        """Take one message from the keeper, waiting for it if there is none yet.

        Raises:
            KeeperError: it failed, or ended without a word.
        """
        try:
            message = decode(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_REAP_WAIT_S)
            raise KeeperError(f"{self.config.name} ended before it was ready, with {self.exit}") from None
        if isinstance(message, Failed):
            raise KeeperError(f"{self.config.name} could not start: {message.error}")
        if isinstance(message, Ready):
            self._ready = message
        return message

    def wait_ready(
        self, on_progress: Callable[[Progress], None] | None = None, timeout_s: float | None = None
    ) -> Ready:
        """Wait until everything is loaded and allocated.

        Args:
            on_progress: called with each progress message.
            timeout_s: for the whole; None to wait as long as it takes.

        Raises:
            KeeperError: it failed, ended, or took longer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._ready is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not wait([self.connection, self.process.sentinel], left):
                raise KeeperError(f"{self.config.name} was not ready within {timeout_s:g} s")
            message = self.receive()
            if isinstance(message, Progress) and on_progress is not None:
                on_progress(message)
        return self._ready

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the keeper; kill it if it does not end within `timeout_s`. Stop its engines first."""
        self.connection.close()
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _require_ready(self) -> Ready:
        if self._ready is None:
            raise KeeperError(f"{self.config.name} is not ready yet; wait for it")
        if not self.process.is_alive():
            raise KeeperError(f"{self.config.name} has ended with {self.exit}, and its memory is gone; start it anew")
        return self._ready

    @property
    def exit(self) -> str:
        """How its process has ended, in words."""
        return exit_text(self.process.exitcode)


_REAP_WAIT_S = 5.0


def start_keeper(context: ForkServerContext | SpawnContext, config: KeeperConfig) -> KeeperHandle:
    """Start a keeper's process; returns at once.

    Args:
        context: a forkserver context whose server has loaded sglang (`upstream.preload`), or a spawn context.
        config: what it is to own.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=keeper_main, args=(config, theirs), name=config.name, daemon=True)
    process.start()
    theirs.close()
    return KeeperHandle(config, process, ours)
