"""Engines are told their limits when these change, once, and again after a start or a failure."""

from __future__ import annotations

import asyncio
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
        self.keeper = LimitKeeper(
            lambda engine: self.wanted, self._call, lambda engine, why: self.killed.append(why), int
        )

    async def _call(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> list[dict[str, Any]]:
        assert (engine, name, epoch) == ("tp1@0", "limits", 0)
        self.calls.append(payload)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [{}]

    async def refresh(self, wanted: Limits) -> int:
        """How many calls there were when all that follows has been done."""
        self.wanted = wanted
        self.keeper.refresh([self.engine])
        self.keeper.refresh([self.engine])
        await asyncio.gather(*self.keeper._telling.values())
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
