"""The live page's data: one snapshot for all, bounded viewers, and its end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_adapt.core.messages import LayoutAnswer, RequestReport
from sglang_adapt.core.slo import Terms, Tier
from sglang_adapt.front.live import Live, TooManyViewersError, watching
from sglang_adapt.front.recent import BIN_S, BINS, Recent

LIMIT_S = 20.0


class Router:
    """Answers at once, counts how often, and may be silent or faulty."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def view(self) -> LayoutAnswer:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return LayoutAnswer(1, 200, {"asked": self.asked})


def data(event: bytes) -> Any:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return json.loads(event[6:])


def live(router: Router, interval_s: float = 0.005, most: int = 3) -> Live:
    return Live(router.view, lambda: {"model": "m"}, interval_s, most)


async def take(events: Any, count: int) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return [data(await anext(events)) for _ in range(count)]


def test_all_viewers_share_a_snapshot_and_nobody_is_asked_when_none_looks() -> None:
    async def story() -> None:
        router = Router()
        page = live(router)
        viewers = [page.look() for _ in range(3)]
        first = await asyncio.gather(*(take(viewer, 5) for viewer in viewers))
        assert router.asked <= 8, "asked once for all"
        for seen in first:
            asked = [event["router"]["asked"] for event in seen]
            assert asked == sorted(set(asked)) and seen[0]["model"] == "m"
        for viewer in viewers:
            await viewer.aclose()  # type: ignore[attr-defined]
        assert page.viewers == 0
        async with asyncio.timeout(LIMIT_S):
            while not page._task.done():  # type: ignore[union-attr]
                await asyncio.sleep(0)
        asked_before = router.asked
        (event,) = await take(page.look(), 1)
        assert event["router"]["asked"] == asked_before + 1

    asyncio.run(story())


def test_viewers_who_come_in_the_same_moment_are_bounded() -> None:
    async def story() -> None:
        page = live(Router(), most=2)
        viewers = [page.look() for _ in range(5)]
        for viewer in viewers[:2]:
            await take(viewer, 1)
        for viewer in viewers[2:]:
            assert [event async for event in viewer] == []
        assert page.viewers == 2

    asyncio.run(story())


def test_viewers_are_bounded() -> None:
    async def story() -> None:
        page = live(Router(), most=2)
        viewers = [page.look() for _ in range(2)]
        for viewer in viewers:
            await take(viewer, 1)
        with pytest.raises(TooManyViewersError, match="2 look at the page already"):
            page.look()
        answer = watching(page)()
        assert isinstance(answer, tuple)
        status, body = answer
        assert (status, json.loads(body)["code"]) == (503, "too_many_viewers")
        await viewers[0].aclose()  # type: ignore[attr-defined]
        await take(page.look(), 1)

    asyncio.run(story())


def test_events_end_when_the_server_stops() -> None:
    async def story() -> None:
        page = live(Router(), interval_s=3600)
        viewer = page.look()
        await take(viewer, 1)
        waiting = asyncio.ensure_future(anext(viewer))
        await asyncio.sleep(0)
        page.close()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(StopAsyncIteration):
                await waiting
        assert page.viewers == 0
        with pytest.raises(StopAsyncIteration):
            await anext(page.look())

    asyncio.run(story())


def test_a_silent_router_is_said_and_a_fault_ends_the_events() -> None:
    async def story() -> None:
        router = Router()
        router.error = TimeoutError()
        page = live(router)
        viewer = page.look()
        assert (await take(viewer, 1))[0]["router"] is None
        router.error = ValueError("a fault in this program")
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(StopAsyncIteration):
                while True:
                    await anext(viewer)
        router.error = None
        assert (await take(page.look(), 1))[0]["router"]["asked"] > 1

    asyncio.run(story())


TERMS = Terms("chat", 100.0, 10.0)


def report(ttft_ms: float, ended: str = "finished") -> RequestReport:
    return RequestReport("r", TERMS, "feasible", ended, "tp1@0", 0.0, 0.0, ttft_ms, 5.0, None, None, 10, 10)


def test_what_counts_as_attained() -> None:
    now = [1000.0]
    recent = Recent(lambda: now[0])
    for ttft_ms in (50.0, 99.0, 101.0):
        recent.ended(report(ttft_ms))
    recent.ended(report(50.0, ended="stopped"))
    recent.refused(TERMS)
    now[0] += BIN_S
    row, other = recent.told([Tier("chat", 100.0, 10.0), Tier("night", background=True)])
    assert (row["sent"], row["met"], row["refused"], row["attainment"]) == (5, 2, 1, 0.4)
    assert row["goodput_rps"] == round(2 / 60, 2)
    assert (row["sent_rps"][-1], row["met_rps"][-1], len(row["met_rps"])) == (1.0, 0.4, BINS - 1)
    assert (other["sent"], other["attainment"], set(other["sent_rps"])) == (0, None, {0})
    # After five minutes it is forgotten, also if nothing came since.
    now[0] += BIN_S * BINS
    assert recent.told([Tier("chat", 100.0, 10.0)])[0]["sent"] == 0
