"""Processes: reports, deaths, restarts, the limit of restarts, and the end of all."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.supervisor import RankStart, RestartLimit, Supervisor

SPEC = EngineSpec(0, 2)


def rank(behaviour: str, report: Connection) -> None:
    """A rank that does as told."""
    if behaviour == "fails":
        report.send({"status": "failed", "error": "ValueError: no such model"})
        raise SystemExit(1)
    if behaviour == "dies":
        os._exit(7)
    report.send({"status": "ready", "pid": os.getpid()})
    if behaviour == "lets go":
        report.close()
    signal.pause()


class Run:
    """A supervisor on its loop, and what it told."""

    def __init__(self, behaviours: list[str], restarts: int = 2) -> None:
        self.behaviours = behaviours
        self.loaded: list[dict[int, dict[str, Any]]] = []
        self.lost: list[tuple[str, bool]] = []
        self.started: list[list[int]] = []
        self.limit = RestartLimit(restarts, 60.0)
        self.may_start = True

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, (self.loaded, self.lost)
            await asyncio.sleep(0.01)

    def run(self, scenario: Callable[[Run], Any]) -> None:
        async def main() -> None:
            self.supervisor = Supervisor(
                asyncio.get_running_loop(),
                multiprocessing.get_context("forkserver"),
                lambda spec: [RankStart(rank, (behaviour,)) for behaviour in self.behaviours],
                self.limit,
                on_loaded=lambda spec, reports: self.loaded.append(reports),
                on_lost=lambda spec, why, again: self.lost.append((why, again)),
                may_start=lambda spec: self.may_start,
                on_started=lambda spec, pids: self.started.append(pids),
            )
            self.supervisor.start(SPEC)
            try:
                await scenario(self)
            finally:
                await self.supervisor.stop(0.0)
            assert all(not process.is_alive() for process in self.supervisor.run_of(SPEC).processes)

        asyncio.run(main())


def test_all_ranks_report_then_one_is_killed_and_all_come_back() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.loaded) == 1)
        first = run.supervisor.run_of(SPEC)
        assert set(run.loaded[0]) == {0, 1}
        os.kill(first.pids[1], signal.SIGKILL)
        started = time.monotonic()
        await run.until(lambda: bool(run.lost))
        assert time.monotonic() - started < 2
        await run.until(lambda: len(run.loaded) == 2)
        # Whichever of the two is seen first: the end of its pipe or its exit code.
        told = f"rank 1 (pid {first.pids[1]}) ended while serving"
        assert run.lost in ([(told, True)], [(f"{told} with signal 9", True)])
        assert not set(first.pids) & set(run.supervisor.run_of(SPEC).pids)
        assert run.started == [first.pids, run.supervisor.run_of(SPEC).pids]
        assert all(not process.is_alive() for process in first.processes)

    Run(["ok", "ok"]).run(scenario)


def test_a_failing_start_says_why_and_is_given_up_in_the_end() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.lost) == 3)
        assert [again for _, again in run.lost] == [True, True, False]
        assert run.lost[0][0] == "rank 1 failed to start: ValueError: no such model"

    Run(["ok", "fails"]).run(scenario)


def test_a_rank_that_dies_without_a_word() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: bool(run.lost))
        assert "ended while starting with exit code 7" in run.lost[0][0]
        assert run.lost[0][1] is False

    Run(["dies", "ok"], restarts=0).run(scenario)


def test_an_engine_is_lost_when_a_rank_lets_go_of_its_pipe_and_gone_when_all_have_ended() -> None:
    """As a process does that is ending, some time before it has ended."""

    async def scenario(run: Run) -> None:
        first = run.supervisor.run_of(SPEC)
        run.behaviours = ["lives", "lives"]  # From the next start on.
        await run.until(lambda: bool(run.lost))
        assert run.lost[0][0].startswith(f"rank 1 (pid {first.pids[1]}) ended while ")
        await run.until(lambda: run.supervisor.run_of(SPEC) is not first)
        assert all(not process.is_alive() for process in first.processes)
        await run.until(lambda: len(run.supervisor.run_of(SPEC).reports) == 2)
        assert len(run.lost) == 1

    Run(["lives", "lets go"]).run(scenario)


def test_kill_restarts() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.loaded) == 1)
        run.supervisor.kill(SPEC, "it hangs")
        await run.until(lambda: len(run.loaded) == 2)
        assert run.lost == [("it hangs", True)]

    Run(["ok", "ok"]).run(scenario)


def test_after_abandon_nothing_is_started_again() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.loaded) == 1)
        first = run.supervisor.run_of(SPEC)
        run.supervisor.kill(SPEC, "the server cannot start")
        run.supervisor.abandon()
        await run.until(lambda: len(first.exited) == 2)
        assert run.supervisor.run_of(SPEC) is first

    Run(["ok", "ok"]).run(scenario)


def test_an_engine_that_may_not_be_started_yet_waits_for_a_retry() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.loaded) == 1)
        first = run.supervisor.run_of(SPEC)
        run.may_start = False
        run.supervisor.kill(SPEC, "it is in the way")
        await run.until(lambda: len(first.exited) == 2)
        run.supervisor.retry()
        assert run.supervisor.run_of(SPEC) is first
        run.may_start = True
        run.supervisor.hold()
        run.supervisor.retry()
        assert run.supervisor.run_of(SPEC) is first
        run.supervisor.resume()
        await run.until(lambda: len(run.loaded) == 2)
        run.supervisor.retry()
        assert len(run.lost) == 1

    Run(["ok", "ok"]).run(scenario)


def test_a_held_engine_starts_at_resume() -> None:
    async def scenario(run: Run) -> None:
        await run.until(lambda: len(run.loaded) == 1)
        first = run.supervisor.run_of(SPEC)
        run.supervisor.hold()
        run.supervisor.kill(SPEC, "the keeper is gone")
        await run.until(lambda: len(first.exited) == 2)
        assert run.supervisor.run_of(SPEC) is first
        run.supervisor.resume()
        await run.until(lambda: len(run.loaded) == 2)
        assert run.supervisor.run_of(SPEC) is not first

    Run(["ok", "ok"]).run(scenario)
