"""Starts the router in its own process, and waits for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.kv.sizing import PoolSettings
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.process import router_main


class EngineStartError(RuntimeError):
    """The router or an engine could not be started; the text says which and why."""


@dataclass
class RouterLauncher:
    """The `Launcher` that stock's launch code calls.

    Attributes:
        context: in which the router's process is started.
        config: the deployment.
        server_args: stock ServerArgs by TP size.
        control_endpoint: where the front listens for the router.
        pool: the KV pool of every GPU, or None.
        tiers: tiers, if there are any, and how fast the engines are.
    """

    context: BaseContext
    config: AdaptConfig
    server_args: dict[int, Any]
    control_endpoint: str
    pool: PoolSettings | None = None
    tiers: TierSettings | None = None
    _process: BaseProcess | None = field(default=None, init=False)
    _report: Connection | None = field(default=None, init=False)

    @property
    def process(self) -> BaseProcess:
        if self._process is None:
            raise EngineStartError("the router has not been started")
        return self._process

    def start(self, server_args: Any, port_args: Any) -> BaseProcess:
        self._report, writer = self.context.Pipe(duplex=False)
        args = RouterArgs(
            self.config, self.server_args, port_args, self.control_endpoint, dict(os.environ), self.pool, self.tiers
        )
        self._process = self.context.Process(  # type: ignore[attr-defined]
            target=router_main, args=(args, writer), name="router"
        )
        self._process.start()
        writer.close()
        return self._process

    def wait_ready(self) -> dict[str, Any]:
        """Block until every engine is warm; returns what `/server_info` is to say, with several TP sizes also the way
        of copies between GPUs.

        Raises:
            EngineStartError: an engine failed, or the router ended.
        """
        assert self._report is not None
        try:
            report: dict[str, Any] = self._report.recv()
        except EOFError:
            self.process.join(5)
            code = self.process.exitcode
            raise EngineStartError(f"the router ended while it started (exit code {code}); see its log") from None
        finally:
            self._report.close()
        if report["status"] != "ready":
            raise EngineStartError(report["error"])
        if self.pool is None:
            return report
        return report | {"adapt_kv_copy": self.config.kv_copy.value}
