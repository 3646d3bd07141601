"""What follows when an engine or a keeper comes up or goes: who is told, and what is started or ended for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.keeper import KeeperError
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.memory import SharedMemoryError
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.calls import EngineCalls
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.router.memory import KeptMemory
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.start_report import StartReport
from sglang_adapt.router.starts import EngineStarts
from sglang_adapt.router.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Lifecycle:
    """See the module.

    Args:
        args: of the router.
        router: where requests are.
        calls: to engines.
        keepers, memory: the keepers and what they own.
        supervisor, starts: the engines' processes.
        pools, modes: KV pools and layouts; None with a single TP size.
        report: to the front, once.
        end: called when the process is to end, with whether it has failed. More than once is as once.
    """

    def __init__(
        self,
        args: RouterArgs,
        router: Router,
        calls: EngineCalls,
        keepers: Keepers,
        memory: KeptMemory,
        supervisor: Supervisor,
        starts: EngineStarts,
        pools: Pools | None,
        modes: Modes | None,
        report: StartReport,
        end: Callable[[bool], None],
    ) -> None:
        self._args = args
        self._router = router
        self._calls = calls
        self._keepers = keepers
        self._memory = memory
        self._supervisor = supervisor
        self._starts = starts
        self._pools = pools
        self._modes = modes
        self._report = report
        self._end = end
        self._ended = False

    # Keepers.

    def keepers_ready(self) -> None:
        """Every keeper has loaded: engines can be started, or started again."""
        if self._pools is not None:
            try:
                self._pools.open(self._memory.ledger_regions())
            except (KeeperError, SharedMemoryError, LedgerError) as error:
                self.keeper_failed(f"the ledgers of the KV pools cannot be used: {error}")
                return
        if self._starts.begun:
            self._supervisor.resume()
        else:
            self._starts.next_wave()

    def keeper_lost(self, devices: tuple[int, ...], why: str) -> None:
        """Its memory is gone, so its GPUs' engines go too, and come back when it has loaded anew."""
        logger.error("%s; its engines are started anew when it has loaded", why)
        self._supervisor.hold()
        for spec in self._starts.started():
            if any(self._args.device(gpu) in devices for gpu in spec.gpus):
                self._supervisor.kill(spec, why)

    def keeper_failed(self, why: str) -> None:
        """A keeper cannot start, or has died too often: the process ends."""
        if self._report.due:
            self._report.failed(why)
        logger.critical("%s; without its memory nothing can be served", why)
        self._supervisor.abandon()
        self._finish(failed=True)

    # Engines.

    def engine_warm(self, spec: EngineSpec) -> None:
        """It has answered its warm-up request, and may get requests."""
        self._starts.warm(spec)
        if self._modes is not None:
            self._modes.engine_ready(spec)

    def engine_lost(self, spec: EngineSpec, why: str, again: bool) -> None:
        """A rank has ended, and the others are being killed."""
        engine = self._router.engines[spec.name]
        self._starts.lost(spec)
        text = f"engine {spec.name} is down: {why}"
        self._calls.engine_lost(spec.name, why)
        if not self._keepers.ready:
            # A keeper that has just ended takes its engines with it, and may be noticed after them.
            self._supervisor.hold()
        if self._report.due:
            self._supervisor.abandon()
            self._report.failed(text)
            self._finish(failed=False)
            return
        if self._ended:
            return
        if again:
            logger.error("%s; starting it again", text)
        else:
            logger.critical("%s; it died too often, so it is given up", text)
        engine.pids, engine.last_death = [], why
        self._router.engine_lost(engine, EngineState.DEAD if again else EngineState.FAILED, text)
        if self._modes is not None:
            self._modes.engine_lost(spec, text)

    def engine_gone(self, spec: EngineSpec) -> None:
        """All processes of a lost engine have ended."""
        if self._pools is not None:
            self._pools.engine_gone(spec)
        if self._modes is not None:
            self._modes.engine_gone()

    def report_if_ready(self) -> None:
        """Tell the front, once, when every engine is warm."""
        engines = self._router.engines.values()
        if self._report.due and all(engine.state is EngineState.READY for engine in engines):
            infos = self._starts.infos
            self._report.ready(
                infos[self._args.config.layout.engines[0]],
                infos.values(),
                [pid for engine in engines for pid in engine.pids],
            )

    def drained(self) -> None:
        """All work and all engines have ended."""
        self._finish(failed=False)

    def _finish(self, *, failed: bool) -> None:
        self._ended = True
        self._end(failed)
