"""Starts the engines' processes, notices when one ends, and starts its engine again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.core.process import exit_text
from sglang_adapt.router.restarts import RestartLimit, Restarts

logger = logging.getLogger(__name__)

RankMain = Callable[..., None]


@dataclass(frozen=True)
class RankStart:
    """One process to start: `target(*args, connection)`; the connection carries its start-up report, and has to stay
    open for as long as the process lives: its end is the first sign of a death."""

    target: RankMain
    args: tuple[Any, ...]


@dataclass(eq=False)
class EngineRun:
    """One start of one engine: its rank processes and their start-up reports."""

    spec: EngineSpec
    started_at: float
    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    ended: bool = False
    again: bool = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]


class Supervisor:
    """The engines' processes.

    Args:
        loop: the router's event loop; all callbacks run on it.
        context: in which the processes are started; best a forkserver's that has loaded sglang.
        make_ranks: the processes of a new start of an engine (fresh sockets and ports each time).
        on_loaded: all ranks of a start have reported; gets their reports by rank.
        on_lost: a rank ended without being told to; the others of its engine are being killed. Gets the
            reason and whether the engine will be started again.
        on_gone: all ranks of a lost engine have ended, so nothing of it touches memory any more; called before it
            is started again.
        on_started: the ranks of a start have been started, the first or a later one; gets their process ids.
        may_start: asked before a lost engine is started again; if not, it waits for `retry`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ForkServerContext | SpawnContext,
        make_ranks: Callable[[EngineSpec], Sequence[RankStart]],
        limit: RestartLimit,
        on_loaded: Callable[[EngineSpec, dict[int, dict[str, Any]]], None],
        on_lost: Callable[[EngineSpec, str, bool], None],
        on_gone: Callable[[EngineSpec], None] = lambda spec: None,
        may_start: Callable[[EngineSpec], bool] = lambda spec: True,
        on_started: Callable[[EngineSpec, list[int]], None] = lambda spec, pids: None,
    ) -> None:
        self._loop = loop
        self._context = context
        self._make_ranks = make_ranks
        self._limit = limit
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._may_start = may_start
        self._on_started = on_started
        self._runs: dict[EngineSpec, EngineRun] = {}
        self._restarts: dict[EngineSpec, Restarts] = {}
        self._stopping = False
        self._held = False
        self._waiting: list[EngineSpec] = []

    def abandon(self) -> None:
        """Start nothing again: the server could not start and is about to end."""
        self._stopping = True

    def hold(self) -> None:
        """Start no lost engine again before `resume`: what engines need is not there."""
        self._held = True

    def resume(self) -> None:
        """Start the lost engines that were held back."""
        self._held = False
        self.retry()

    def retry(self) -> None:
        """What lost engines wait for may be there: start those that may be started now."""
        if self._held or self._stopping:
            return
        waiting, self._waiting = self._waiting, []
        for spec in waiting:
            self._start_again(spec)

    def start(self, spec: EngineSpec) -> EngineRun:
        """Start an engine's ranks; returns at once."""
        run = EngineRun(spec, time.monotonic())
        self._runs[spec] = run
        for rank, start in enumerate(self._make_ranks(spec)):
            reader, writer = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=start.target, args=(*start.args, writer), name=f"{spec.name}:{rank}", daemon=False
            )
            process.start()
            writer.close()
            run.processes.append(process)
            run.connections.append(reader)
            self._loop.add_reader(reader.fileno(), self._on_report, run, rank)
            self._loop.add_reader(process.sentinel, self._on_exit, run, rank)
        self._on_started(spec, run.pids)
        return run

    def run_of(self, spec: EngineSpec) -> EngineRun:
        return self._runs[spec]

    def kill(self, spec: EngineSpec, why: str) -> None:
        """Kill an engine's ranks and start it again: it does not do what it should."""
        self._lose(self._runs[spec], why)

    async def stop(self, timeout_s: float) -> None:
        """Wait for all ranks to end, which they were told to; kill those that have not after `timeout_s`."""
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for process in alive:
            logger.warning("%s did not shut down within %.0f s; killed", process.name, timeout_s)
            process.kill()
        for process in alive:
            await self._loop.run_in_executor(None, process.join, 5.0)

    def _alive(self) -> list[BaseProcess]:
        return [process for run in self._runs.values() for process in run.processes if process.is_alive()]

    def _on_report(self, run: EngineRun, rank: int) -> None:
        connection = run.connections[rank]
        self._loop.remove_reader(connection.fileno())
        try:
            report = connection.recv()
        except EOFError:
            # The process ended before it reported; its sentinel tells the rest.
            connection.close()
            return
        if run.ended:
            connection.close()
            return
        if report.get("status") != "ready":
            connection.close()
            self._lose(run, f"rank {rank} failed to start: {report.get('error', 'no reason given')}", rank)
            return
        run.reports[rank] = report
        self._loop.add_reader(connection.fileno(), self._on_silence, run, rank)
        if len(run.reports) == len(run.processes):
            self._on_loaded(run.spec, run.reports)

    def _on_silence(self, run: EngineRun, rank: int) -> None:
        """A rank that had reported has let go of its pipe: it is ending. That is known 0.2 s before its exit code,
        for which the kernel first takes down what it had on the GPU."""
        connection, process = run.connections[rank], run.processes[rank]
        self._loop.remove_reader(connection.fileno())
        connection.close()
        if not self._stopping:
            self._lose(run, f"rank {rank} (pid {process.pid}) ended{_while(run)}", rank)

    def _on_exit(self, run: EngineRun, rank: int) -> None:
        process = run.processes[rank]
        self._loop.remove_reader(process.sentinel)
        process.join(0)
        run.exited.add(rank)
        if not run.ended and not self._stopping:
            # A report that is already in the pipe says more than the exit code.
            if rank not in run.reports and not run.connections[rank].closed and run.connections[rank].poll():
                self._on_report(run, rank)
            if not run.ended:
                why = f"rank {rank} (pid {process.pid}) ended{_while(run)} with {exit_text(process.exitcode)}"
                self._lose(run, why, rank)
        elif not self._stopping:
            how = "was killed with the others" if rank in run.killed else f"ended with {exit_text(process.exitcode)}"
            logger.info("engine %s: rank %d (pid %s) %s", run.spec, rank, process.pid, how)
        if run.ended and len(run.exited) == len(run.processes):
            self._after_end(run)

    def _lose(self, run: EngineRun, why: str, by: int | None = None) -> None:
        """Kill what is left of an engine; `by` is the rank that has ended by itself."""
        if run.ended:
            return
        run.ended = True
        run.again = self._restarts.setdefault(run.spec, Restarts(self._limit)).again(time.monotonic())
        for rank, process in enumerate(run.processes):
            if process.is_alive():
                process.kill()
                if rank != by:
                    run.killed.add(rank)
        self._on_lost(run.spec, why, run.again)

    def _after_end(self, run: EngineRun) -> None:
        """All ranks of a lost engine are gone, so its GPUs are free: start it again if it was not given up."""
        for connection in run.connections:
            if not connection.closed:
                self._loop.remove_reader(connection.fileno())
                connection.close()
        if self._stopping or self._runs[run.spec] is not run:
            return
        self._on_gone(run.spec)
        if run.again:
            self._start_again(run.spec)

    def _start_again(self, spec: EngineSpec) -> None:
        if self._held or not self._may_start(spec):
            self._waiting.append(spec)
        else:
            self.start(spec)


def _while(run: EngineRun) -> str:
    return " while serving" if len(run.reports) == len(run.processes) else " while starting"
