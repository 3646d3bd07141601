"""The front's end of the control socket, with a router that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from sglang_adapt.core import messages
from sglang_adapt.core.messages import AdmitRequest, RouterStatus
from sglang_adapt.core.slo import BUILT_IN, Terms
from sglang_adapt.front.link import LinkClosedError, RouterLink

STATUS = RouterStatus("tp1@0", [])
REQUEST = AdmitRequest(1, Terms("standard", 1.0, 1.0), 5, None, 0.0)


def linked(folder: Path) -> tuple[RouterLink, zmq.asyncio.Socket]:
    """An open link, and a router's end of it."""
    endpoint = f"ipc://{folder}/control"
    link = RouterLink(endpoint)
    link.open()
    router = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    router.connect(endpoint)
    return link, router


async def refused(asked: Awaitable[Any]) -> bool:
    with pytest.raises(LinkClosedError, match="shutting down"):
        await asyncio.wait_for(asked, 5)
    return True


def test_who_waits_when_the_router_ends_is_told_so(tmp_path: Path) -> None:
    async def run() -> None:
        link, router = linked(tmp_path)
        waiting = [
            asyncio.create_task(refused(asked))
            for asked in (link.switch("tp2@0-1", "auto", "test"), link.layout(), link.admit(REQUEST))
        ]
        # They have been sent, so each waits for its answer.
        heard = {type(messages.decode_front_to_router(await router.recv())) for _ in waiting}
        assert len(heard) == 3
        link.close()
        assert all(await asyncio.gather(*waiting))
        router.close(linger=0)

    asyncio.run(run())


def test_nothing_is_asked_once_the_router_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        link = RouterLink(f"ipc://{tmp_path}/control")
        link.open()
        # Nobody has connected, so this one has not been sent yet.
        early = asyncio.create_task(refused(link.layout()))
        await asyncio.sleep(0)
        link.close()
        link.close()
        assert await early
        for asked in (link.layout(), link.view(), link.plan({}), link.admit(REQUEST), link.set_tiers(BUILT_IN)):
            assert await refused(asked)
        assert await link.ask() is None
        await link.give_back(1)

    asyncio.run(run())


def test_a_router_that_says_nothing_is_silent_but_time_in_which_nobody_ran_does_not_count(tmp_path: Path) -> None:
    """As on a machine that was suspended: the router's next status is a second away."""

    async def run() -> None:
        link, router = linked(tmp_path)

        async def heard() -> None:
            await router.send(messages.encode(STATUS))
            async with asyncio.timeout(5):
                while link.status is None:
                    await asyncio.sleep(0.001)

        await heard()
        link._not_heard(60.0)
        assert link.status == STATUS
        for _ in range(9):
            link._not_heard(0.5)
        assert link.status is None
        await heard()
        link.close()
        router.close(linger=0)

    asyncio.run(run())


def test_silence_is_counted_while_the_link_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_adapt.front.link._TICK_S", 0.001)

    async def run() -> None:
        link = RouterLink(f"ipc://{tmp_path}/control")
        link.open()
        async with asyncio.timeout(5):
            while link._silent_s < 0.003:
                await asyncio.sleep(0.001)
        link.close()

    asyncio.run(run())
