"""Engines are told limits when they change, once, before what needs them, and again after a start or a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from sglang_adapt.policy.limits import OPEN, Limits
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.limits import LimitKeeper


class Told:
    """A keeper of one engine's limits; the test says which are wanted, and how calls end."""

    def __init__(self) -> None:
        self.engine = Engine("tp1@0", send=lambda data: None, state=EngineState.READY)
        self.wanted = OPEN
        self.calls: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.keeper = LimitKeeper(
            lambda engine: self.wanted, self._begin, lambda engine, why: self.killed.append(why), int
        )

    def _begin(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> Awaitable[list[dict[str, Any]]]:
        assert (engine, name, epoch) == ("tp1@0", "limits", 0)
        self.calls.append(payload)
        return self._answer()

    async def _answer(self) -> list[dict[str, Any]]:
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return [{}]

    async def refresh(self, wanted: Limits) -> int:
        """How many calls there were when all that follows has been done."""
        self.wanted = wanted
        self.keeper.refresh([self.engine])
        self.keeper.refresh([self.engine])
        await asyncio.gather(*self.keeper._tasks)
        return len(self.calls)


def test_an_engine_is_told_what_changes() -> None:
    async def run() -> None:
        told = Told()
        assert await told.refresh(OPEN) == 0
        assert await told.refresh(Limits(64, 3)) == 1
        assert told.calls == [{"prefill_tokens": 64, "requests": 3}]
        assert await told.refresh(Limits(64, 3)) == 1
        assert await told.refresh(OPEN) == 2
        await told.refresh(Limits(64, 3))
        told.engine.restarts += 1
        assert await told.refresh(Limits(64, 3)) == 4
        told.engine.state = EngineState.DEAD
        assert await told.refresh(OPEN) == 4

    asyncio.run(run())


@pytest.mark.parametrize(("error", "killed"), [(CallRefusedError("no"), []), (CallBrokenError("differ"), ["differ"])])
def test_what_was_not_done_is_told_again(error: Exception, killed: list[str]) -> None:
    async def run() -> None:
        told = Told()
        told.error = error
        await told.refresh(Limits(64, 3))
        assert told.killed == killed
        told.error = None
        assert await told.refresh(Limits(64, 3)) == 2
        assert await told.refresh(Limits(64, 3)) == 2

    asyncio.run(run())


def test_what_is_sent_next_finds_its_limits_there_while_others_are_not_answered() -> None:
    async def run() -> None:
        told = Told()
        told.answers.clear()
        told.keeper.tell(told.engine, Limits(64, 3))
        # It has been sent before `tell` returns; what is only due waits for the answer.
        assert len(told.calls) == 1
        told.wanted = Limits(128, 3)
        told.keeper.refresh([told.engine])
        assert len(told.calls) == 1
        told.keeper.tell(told.engine, Limits(32, 3))
        told.keeper.tell(told.engine, Limits(32, 3))
        assert [call["prefill_tokens"] for call in told.calls] == [64, 32]
        told.answers.set()
        assert await told.refresh(Limits(32, 3)) == 2

    asyncio.run(run())
