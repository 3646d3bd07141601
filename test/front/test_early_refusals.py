"""Refusals before stock's layers: only for who has come through them, only what the gate remembers, counted as ever."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter
from test_gate import Router, tier_settings

from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest
from sglang_adapt.core.slo import SloConfig, Terms, Tier
from sglang_adapt.front.early import EarlyRefusals
from sglang_adapt.front.gate import ASK_AFTER_MS, CLOSED_MS, Admitted, Gate
from sglang_adapt.upstream import http_counts
from sglang_adapt.upstream.known_heads import head_of

STRICT = ((b"x-adapt-tier", b"strict"), (b"authorization", b"Bearer a"))
BODY = b" " * 400


class World:
    """A gate whose router refuses as it is told, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, router: Router, counts: bool = False) -> None:
        self.now_ms = 100_000.0
        self.refused: list[Terms] = []
        self.admits = True
        monkeypatch.setattr("sglang_adapt.front.gate.time.monotonic", lambda: self.now_ms / 1000)
        self.router = router
        self.gate = Gate(tier_settings(), router, self.refused.append)
        self.early = EarlyRefusals(self.gate, counts)
        self.early.begin(lambda: self.admits)

    async def enter(self, body: bytes = BODY, headers: Any = STRICT, path: str = "/generate") -> Any:
        """By the long way."""
        self.early.came_in(path, headers)
        return await self.gate.enter(headers, body)

    def answer(self, body: bytes = BODY, headers: Any = STRICT, path: str = "/generate") -> Any:
        return self.early.answer(head_of(path, headers), body)


def test_a_remembered_refusal_is_told_again_in_the_shape_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Router((7, "full")))

    async def run() -> None:
        assert not world.early.active and world.answer() is None
        refusal = await world.enter()
        world.early.came_in("/v1/completions", STRICT)
        assert world.early.active
        flat, nested = world.answer(), world.answer(path="/v1/completions")
        assert (flat.status, dict(flat.headers)[b"retry-after"]) == (429, b"7")
        assert json.loads(flat.body) == json.loads(nested.body)["error"]
        assert json.loads(flat.body)["message"] == refusal.message == "tier strict: full; try again in 7 s"
        assert flat is refusal.flat and nested is refusal.nested

    asyncio.run(run())
    assert world.refused == [Terms("strict", 300.0, 10.0)] * 3
    assert len(world.router.asked) == 1


def test_who_has_not_come_through_the_layers_before_goes_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Router((7, "full")))

    async def run() -> None:
        await world.enter()
        for headers, path in (
            (STRICT[:1], "/generate"),
            ((STRICT[0], (b"authorization", b"Bearer b")), "/generate"),
            (STRICT, "/v1/completions"),
            # The first counts, as in stock.
            (((b"authorization", b"Bearer b"), *STRICT), "/generate"),
        ):
            assert world.answer(headers=headers, path=path) is None
        assert world.answer(headers=(*STRICT, (b"authorization", b"Bearer b"))) is not None

    asyncio.run(run())


def test_nothing_is_told_early_of_other_terms_shorter_prompts_or_while_the_server_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, Router((7, "full")))

    async def run() -> None:
        await world.enter()
        assert world.answer(body=b" " * 200) is None
        assert world.answer(headers=((b"x-adapt-tier", b"loose"), STRICT[1])) is None
        assert world.answer(headers=((b"x-adapt-tier", b"gold"), STRICT[1])) is None
        assert world.answer(body=b'{"x":' + b"[" * 200_000) is None
        world.admits = False
        assert world.answer() is None
        world.admits = True
        assert world.answer() is not None
        world.gate.reload(SloConfig((Tier("strict", 400.0, 10.0),), "strict"))
        assert world.answer() is None

    asyncio.run(run())
    assert len(world.refused) == 2


def test_a_refusal_that_holds_for_any_length_is_told_to_shorter_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Any1(Router):
        async def admit(self, request: AdmitRequest) -> AdmitAnswer:
            self.asked.append(request)
            return AdmitAnswer(request.id, False, 1, "full", holds_from=1)

    world = World(monkeypatch, Any1())

    async def run() -> None:
        await world.enter()
        assert world.answer(body=b"{}") is not None

    asyncio.run(run())


class Slow(Router):
    """Answers when it is let to."""

    def __init__(self, *refusals: tuple[int, str]) -> None:
        super().__init__(*refusals)
        self.let = asyncio.Event()

    async def admit(self, request: AdmitRequest) -> AdmitAnswer:
        if self.asked:
            await self.let.wait()
        return await super().admit(request)


async def _asked(router: Router, count: int) -> None:
    while len(router.asked) < count:
        await asyncio.sleep(0)


def test_an_old_refusal_is_asked_for_again_once_while_it_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        router = Slow((1, "first"), (2, "second"))
        world = World(monkeypatch, router)
        first = await world.enter()
        world.now_ms += ASK_AFTER_MS - 1
        assert world.answer() is first.flat
        world.now_ms += 1
        for _ in range(50):
            assert world.answer() is first.flat
        # The router is slow: what it has said holds on, for all.
        world.now_ms += CLOSED_MS
        assert world.answer() is first.flat and await world.enter() is first
        router.let.set()
        await _asked(router, 2)
        while world.answer() is first.flat:
            await asyncio.sleep(0)
        assert dict(world.answer().headers)[b"retry-after"] == b"2"
        assert len(router.asked) == 2

    asyncio.run(run())


def test_it_does_not_hold_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        router = Slow((1, "first"), (2, "second"))
        world = World(monkeypatch, router)
        await world.enter()
        world.now_ms += ASK_AFTER_MS
        assert world.answer() is not None
        world.now_ms += 100.0
        assert world.answer() is None
        waiting = asyncio.create_task(world.enter())
        await asyncio.sleep(0)
        assert not waiting.done()
        router.let.set()
        assert (await waiting).retry_after_s == 2

    asyncio.run(run())


def test_room_that_was_found_so_is_given_back_and_the_next_request_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        router = Router((1, "full"))
        world = World(monkeypatch, router)
        await world.enter()
        world.now_ms += ASK_AFTER_MS
        assert world.answer() is not None
        while not router.returned:
            await asyncio.sleep(0)
        assert router.returned == [router.asked[1].id]
        assert world.answer() is None and isinstance(await world.enter(), Admitted)
        assert len(world.refused) == 2

    asyncio.run(run())


def test_stocks_metrics_count_what_was_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    http_counts.early_counter.cache_clear()
    world = World(monkeypatch, Router((7, "full")), counts=True)
    made = [
        Counter("sglang:http_requests_total", "r", ["endpoint", "method"]),
        Counter("sglang:http_responses_total", "r", ["endpoint", "status_code", "method"]),
    ]
    try:

        async def run() -> None:
            await world.enter()
            for _ in range(3):
                world.answer()

        asyncio.run(run())
        labels = {"endpoint": "/generate", "method": "POST"}
        assert REGISTRY.get_sample_value("sglang:http_requests_total", labels) == 3
        assert REGISTRY.get_sample_value("sglang:http_responses_total", {**labels, "status_code": "429"}) == 3
    finally:
        for collector in made:
            REGISTRY.unregister(collector)
        http_counts.early_counter.cache_clear()


def test_metrics_that_are_not_there_are_told() -> None:
    with pytest.raises(RuntimeError, match="stock has no metric sglang:http_requests_total"):
        http_counts.early_counter("/nowhere", 429)
