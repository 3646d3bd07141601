"""Requests of engines that died: who goes on with them, from which tokens, and what becomes of failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_fakes import World
from sglang.srt.managers import io_struct

from sglang_adapt.policy.suspects import PAST_TOKENS
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError, NotSentError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.repair import Repair


class Scene:
    """A router whose repair asks engines that answer as they are told to."""

    def __init__(self) -> None:
        self.world = World().warm()
        self.calls: list[tuple[str, list[tuple[str, list[int]]]]] = []
        self.failures: dict[str, Exception] = {}
        self.killed: list[str] = []
        self.repair = Repair(self.world.router, self.call, self.kill, lambda: 0)
        self.world.wake = self.repair.wake

    async def call(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> list[dict[str, Any]]:
        assert (name, epoch) == ("recover", 0)
        requests = []
        for request in payload["requests"]:
            message = io_struct.msgpack_decode(request["message"])
            requests.append((message.rid, request["output_ids"]))
        self.calls.append((engine, requests))
        if (error := self.failures.pop(engine, None)) is not None:
            if isinstance(error, EngineGoneError) and not isinstance(error, NotSentError):
                self.die(engine)
            raise error
        return [{"taken": len(requests)}]

    def kill(self, engine: Engine, why: str) -> None:
        self.killed.append(engine.name)
        self.die(engine.name)

    def die(self, name: str) -> None:
        self.world.router.engine_lost(self.world.engine(name), EngineState.DEAD, f"engine {name} is down: killed")

    async def settle(self) -> None:
        while self.repair._task is not None and not self.repair._task.done():
            await self.repair._task
        self.world.check()


def run(work: Any) -> None:
    asyncio.run(work)


def test_another_engine_goes_on_behind_the_tokens_that_the_client_has() -> None:
    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        # The first output begins with the end of the prompt; of it only the last token is output.
        scene.world.tokens("tp1@0", "a", [3, 4, 5, 6, 7, 100], 1)
        scene.world.tokens("tp1@0", "a", [101, 102], 3)
        scene.die("tp1@0")
        await scene.settle()
        assert scene.calls == [("tp1@1", [("a", [100, 101, 102])])]
        assert list(scene.world.engine("tp1@1").in_flight) == ["a"]
        scene.world.tokens("tp1@1", "a", [103], 4)
        assert scene.world.router.journal["a"].ids.tolist() == [100, 101, 102, 103]
        scene.world.finish("tp1@1", "a")
        scene.world.check()

    run(work())


def test_a_request_without_tokens_is_sent_again_as_it_was() -> None:
    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        scene.die("tp1@0")
        await scene.settle()
        assert scene.calls == []
        assert scene.world.received["tp1@1"] == scene.world.received["tp1@0"]

    run(work())


def test_while_no_engine_is_up_requests_wait() -> None:
    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        scene.world.tokens("tp1@0", "a", [100], 1)
        scene.die("tp1@1")
        scene.die("tp1@0")
        await scene.settle()
        assert scene.calls == []
        assert list(scene.world.router.stranded.in_flight) == ["a"]
        scene.world.warm("tp1@1")
        await scene.settle()
        assert scene.calls == [("tp1@1", [("a", [100])])]

    run(work())


@pytest.mark.parametrize("error", [CallRefusedError("no"), CallBrokenError("ranks differ"), EngineGoneError("gone")])
def test_an_engine_that_does_not_take_them_is_not_the_last_word(error: Exception) -> None:
    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        scene.world.tokens("tp1@0", "a", [100], 1)
        scene.failures["tp1@1"] = error
        scene.die("tp1@0")
        await scene.settle()
        scene.world.warm(*(name for name in ("tp1@0", "tp1@1") if scene.world.engine(name).state is EngineState.DEAD))
        await scene.settle()
        assert scene.killed == (["tp1@1"] if isinstance(error, CallBrokenError) else [])
        assert len(scene.calls) == 2
        assert scene.world.tokenizer == []
        assert not scene.world.router.stranded.in_flight

    run(work())


def test_an_engine_that_takes_no_messages_is_asked_again_and_is_no_death() -> None:
    """As one that has died in the same moment, of which that is not known yet: it would use up the request's engines
    within a millisecond."""

    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        scene.world.tokens("tp1@0", "a", [100], 1)
        scene.failures["tp1@1"] = NotSentError("does not take messages")
        scene.die("tp1@0")
        await scene.settle()
        for asked in range(2, 6):
            assert scene.world.router.journal["a"].deaths == 1
            assert list(scene.world.router.stranded.in_flight) == ["a"] and scene.world.tokenizer == []
            if asked < 5:
                scene.failures["tp1@1"] = NotSentError("does not take messages")
            async with asyncio.timeout(5):
                while len(scene.calls) < asked:
                    await asyncio.sleep(0.001)
            await scene.settle()
        assert list(scene.world.engine("tp1@1").in_flight) == ["a"]

    run(work())


class Poison(Scene):
    """A world in which one request ends every engine that goes on with it."""

    async def call(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> list[dict[str, Any]]:
        taken = await super().call(engine, name, payload, epoch)
        if "poison" in self.world.engine(engine).in_flight:
            self.die(engine)
            raise EngineGoneError("gone")
        return taken

    async def settle(self) -> None:
        await super().settle()
        while dead := [name for name in ("tp1@0", "tp1@1") if self.world.engine(name).state is EngineState.DEAD]:
            self.world.warm(*dead)
            await super().settle()


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_request_that_ends_its_engines_takes_no_other_with_it(place: int) -> None:
    async def work() -> None:
        scene = Poison()
        world = scene.world
        rids = ["a", "b", "c", "d"]
        rids.insert(place, "poison")
        for rid in rids:
            world.request(rid)
            world.tokens(world.router.places.where[rid].name, rid, [100], 1)
        scene.die(world.router.places.where["poison"].name)
        await scene.settle()
        # The innocent are tried one by one until each has passed the point of the death, or ended.
        for _ in range(10):
            for rid in list(world.router.journal):
                if (engine := world.router.places.where[rid]) is not world.router.stranded:
                    total = len(world.router.journal[rid].ids) + PAST_TOKENS
                    world.tokens(engine.name, rid, list(range(PAST_TOKENS)), total)
            await scene.settle()
        [error] = world.tokenizer
        assert (error.rid, error.finished_reason["status_code"]) == ("poison", 503)
        assert {*world.router.journal} == {"a", "b", "c", "d"}
        assert not world.router.stranded.in_flight

    run(work())


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_the_next_suspect_is_tried_when_one_has_ended(end: str) -> None:
    async def work() -> None:
        scene = Scene()
        for rid in ("a", "b", "c"):
            scene.world.request(rid)
            scene.world.tokens(scene.world.router.places.where[rid].name, rid, [100], 1)
            scene.world.router.journal[rid].deaths = 1
        scene.die("tp1@1")
        scene.die("tp1@0")
        await scene.settle()
        scene.world.warm("tp1@0")
        await scene.settle()
        assert len(scene.world.engine("tp1@0").in_flight) == 1
        for left in (2, 1, 0):
            [rid] = scene.world.engine("tp1@0").in_flight
            assert len(scene.world.router.stranded.in_flight) == left
            if end == "finished":
                scene.world.finish("tp1@0", rid)
            else:
                scene.world.reply("tp1@0", io_struct.AbortReq(rid=rid))
            await scene.settle()
        assert not scene.world.router.journal

    run(work())


def test_a_request_that_no_engine_survives_ends_with_503() -> None:
    async def work() -> None:
        scene = Scene()
        scene.world.request("a")
        scene.world.tokens("tp1@0", "a", [100], 1)
        for name in ("tp1@0", "tp1@1", "tp1@0"):
            scene.die(name)
            await scene.settle()
            scene.world.warm(name)
            await scene.settle()
        [error] = scene.world.tokenizer
        assert error.finished_reason["status_code"] == 503

    run(work())
