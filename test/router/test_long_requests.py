"""Requests that not every engine holds: which are accepted, where they go, what is bound for them; none is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from manager_story import Line, Story, run
from router_fakes import World
from sglang.srt.managers import io_struct
from switch_fakes import ONES, SPECS, TWO, Node

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.planner import LINGER
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.status import status_of
from sglang_adapt.router.switch import SwitchRefusedError

LIMITS = {"tp1@0": 100, "tp1@1": 100, "tp2@0-1": 200}
LONG = 150
BUSY = 250
"""Requests in a window for which two narrow engines are better than a wide one that is slow with many."""


def lengths(policy: AdaptPolicy = AdaptPolicy.AUTO, *, truncates: bool = False) -> Lengths:
    return Lengths(LIMITS, policy, truncates)


def world(policy: AdaptPolicy, layout: str = ONES, *, truncates: bool = False) -> World:
    return World(layout, lengths=lengths(policy, truncates=truncates)).warm()


def refusal(made: World) -> str:
    error = made.tokenizer[-1]
    assert isinstance(error, io_struct.AbortReq)
    assert error.finished_reason is not None
    assert error.finished_reason["status_code"] == 400
    text: str = error.finished_reason["message"]
    return text


def go_over(made: World, layout: str) -> None:
    made.router.activate(parse_layout(layout, (1, 2), 2))


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        (AdaptPolicy.MANUAL, "switch to a layout with it (POST /adapt/layout), or start the server with"),
        (AdaptPolicy.STATIC, "start the server with a layout with it (--adapt-layout), or with --adapt-policy auto"),
    ],
)
def test_where_nobody_binds_the_limit_is_what_the_layout_holds(policy: AdaptPolicy, way: str) -> None:
    made = world(policy)
    made.request("fits", 94)
    made.request("not", 95)
    text = refusal(made)
    assert "Input length (95 tokens) exceeds the maximum allowed length (95 tokens)" in text
    assert "layout tp1@0,tp1@1 holds requests of 100 tokens, prompt and output; tp2@0-1 would hold 200" in text
    assert way in text
    made.request("never", 300)
    assert "no engine of this server holds this one" in refusal(made)
    assert [rid for name in LIMITS for rid in made.seen(name)] == ["fits"]
    go_over(made, TWO)
    assert status_of(made.router).request_tokens == 200
    made.request("not", 95)
    assert made.seen("tp2@0-1")[-1] == "not"
    made.check()


def test_what_asks_for_much_is_cut_where_nobody_binds_and_needs_a_wide_engine_else() -> None:
    made = world(AdaptPolicy.MANUAL)
    made.request("cut", 10, new=150)
    assert made.router.long.needs == {}
    made = world(AdaptPolicy.AUTO)
    made.request("whole", 10, new=150)
    made.request("all there is", 10, new=None)
    assert made.router.long.needs == {"whole": 161}
    assert (list(made.router.long.waiting), made.router.in_flight) == (["whole"], 2)
    made.check()


def test_the_planner_may_bind_so_the_limit_is_the_widest_engines() -> None:
    made = world(AdaptPolicy.AUTO)
    hurried: list[bool] = []
    made.on_long = lambda: hurried.append(True)
    made.request("long", LONG)
    made.request("short", 20)
    assert (list(made.router.long.waiting), hurried, made.tokenizer) == (["long"], [True], [])
    assert dict(made.router.unfinished()) == {"long": True, "short": True}
    made.request("never", 195)
    assert "(195 tokens) exceeds the maximum allowed length (195 tokens): tp2@0-1, the widest" in refusal(made)
    assert status_of(made.router).request_tokens == 200
    made.check()
    made.finish("tp1@0", "short")
    go_over(made, TWO)
    assert made.seen("tp2@0-1")[-1] == "long"
    made.check()
    made.finish("tp2@0-1", "long")
    assert made.router.long.needs == {}
    made.check()


def test_engines_that_cut_prompts_get_those_that_are_too_long() -> None:
    made = world(AdaptPolicy.MANUAL, truncates=True)
    made.request("much too long", 300)
    assert "much too long" in made.seen("tp1@0") + made.seen("tp1@1")
    made = world(AdaptPolicy.AUTO, truncates=True)
    made.request("much too long", 300)
    go_over(made, TWO)
    assert made.seen("tp2@0-1")[-1] == "much too long"


def test_a_request_that_waits_is_aborted_by_its_id_or_with_all() -> None:
    made = world(AdaptPolicy.AUTO)
    for rid in ("a", "b1", "b2"):
        made.request(rid, LONG)
    made.send(io_struct.AbortReq(rid="b"))
    assert list(made.router.long.waiting) == ["a"]
    made.send(io_struct.AbortReq(rid="", abort_all=True))
    assert [message.rid for message in made.tokenizer] == ["b1", "b2", "a"]  # type: ignore[attr-defined]
    assert made.router.in_flight == 0
    made.check()


def test_what_waits_ends_with_a_503_when_no_engine_that_holds_it_can_come_back() -> None:
    made = world(AdaptPolicy.AUTO)
    made.request("long", LONG)
    made.router.engine_lost(made.engine("tp2@0-1"), EngineState.DEAD, "killed")
    assert made.tokenizer == []
    made.router.engine_lost(made.engine("tp2@0-1"), EngineState.FAILED, "killed too often")
    [error] = made.tokenizer
    assert error.finished_reason["status_code"] == 503  # type: ignore[attr-defined]
    assert "no engine is left that holds a request of this length" in error.finished_reason["message"]  # type: ignore[attr-defined]
    made.request("next", LONG)
    assert "exceeds the maximum allowed length (95 tokens)" in refusal(made)
    made.check()


def test_shutting_down_ends_what_waits() -> None:
    made = world(AdaptPolicy.AUTO)
    made.request("long", LONG)
    made.router.fail_all("the end")
    assert made.tokenizer[0].finished_reason["status_code"] == 503  # type: ignore[attr-defined]
    assert made.router.in_flight == 0


# Roles.

SPLIT = "tp1@0:prefill,tp1@1:prefill,tp2@2-3:decode"
WIDE_READS = "tp1@0:decode,tp1@1:decode,tp2@2-3:prefill"
FOUR_LIMITS = {**dict.fromkeys(("tp1@0", "tp1@1", "tp1@2", "tp1@3"), 100), "tp2@0-1": 200, "tp2@2-3": 200}


def split(policy: AdaptPolicy, layout: str = SPLIT) -> World:
    return World(layout, lengths=Lengths(FOUR_LIMITS, policy), gpus=4).warm()


def test_the_limit_is_that_of_engines_that_read_prompts() -> None:
    made = split(AdaptPolicy.MANUAL)
    assert status_of(made.router).request_tokens == 100
    made.request("not", LONG)
    text = refusal(made)
    assert f"layout {SPLIT}, whose engines that decode get no prompts, holds requests of 100 tokens" in text
    assert "tp2@0-1 would hold 200: switch to a layout with it" in text
    # What asks for much is cut, as in any layout of engines that read.
    made.request("cut", 10, new=150)
    assert "cut" in made.seen("tp1@0")
    made.router.activate(parse_layout(WIDE_READS, (1, 2), 4))
    assert status_of(made.router).request_tokens == 200
    made.request("long", LONG)
    assert made.seen("tp2@2-3")[-1] == "long"
    made.check()


def test_a_prompt_that_only_an_engine_that_decodes_holds_waits_for_a_layout() -> None:
    made = split(AdaptPolicy.AUTO)
    hurried: list[bool] = []
    made.on_long = lambda: hurried.append(True)
    made.request("long", LONG)
    assert (made.tokenizer, list(made.router.long.waiting), hurried) == ([], ["long"], [True])
    made.router.activate(parse_layout("tp2@0-1,tp2@2-3", (1, 2), 4))
    assert "long" in made.seen("tp2@0-1") + made.seen("tp2@2-3")
    made.check()


def test_an_engine_that_reads_and_is_down_is_still_the_reason() -> None:
    made = split(AdaptPolicy.MANUAL, WIDE_READS)
    made.router.engine_lost(made.engine("tp2@2-3"), EngineState.DEAD, "killed")
    made.request("long", LONG)
    assert "is up; try again shortly" in str(made.tokenizer)


def test_what_was_accepted_before_goes_on_at_an_engine_that_decodes() -> None:
    made = split(AdaptPolicy.MANUAL, "tp2@0-1,tp2@2-3")
    for rid in ("running", "waiting"):
        made.request(rid, LONG)
    [mine] = [name for name in ("tp2@0-1", "tp2@2-3") if "running" in made.seen(name)]
    made.tokens(mine, "running", [1], 1)
    made.router.activate(parse_layout(SPLIT, (1, 2), 4))
    for name in ("tp2@0-1", "tp2@2-3"):
        made.router.engine_lost(made.engine(name), EngineState.DEAD, "killed")
    assert set(made.router.stranded.in_flight) == {"running", "waiting"}
    assert made.router.engine_for("running") is None
    made.warm("tp2@2-3")
    decodes = made.engine("tp2@2-3")
    assert made.router.engine_for("running") is decodes
    made.received["tp2@2-3"].clear()
    assert made.router.send_again("waiting")
    assert made.seen("tp2@2-3") == ["waiting"]
    made.check()
    assert made.tokenizer == []


# The manager.


def test_a_wide_engine_is_bound_at_once_and_let_go_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    async def tell(story: Story) -> None:
        node = story.node
        story.speeds = (story.speeds[0], replace(story.speeds[1], times=Line(5.0, 3.0)))
        await story.window(BUSY)
        assert story.layout == ONES
        story.arrive(4, end=False)
        node.request("all-long", tokens=LONG)
        assert list(node.router.long.waiting) == ["all-long"]
        # Between two windows: nothing is closed.
        decided = await story.manager.step(in_turn=False)
        assert decided is not None
        await node.settle()
        node.check()
        said = story.manager.said()
        assert (story.layout, said["trigger"]) == (TWO, "long_context")
        assert said["longest_request"] == {"tokens": 200, "waiting": 0}
        assert said["switches"][-1]["reason"].startswith("long_context: a request of 156 tokens")
        # It was sent there, and the others were carried over.
        assert {name: len(rids) for name, rids in node.where().items()} == {TWO: 5}
        assert [text for text in caplog.messages if "request all-long of 156 tokens: at tp2@0-1" in text]
        # It stays while the request does, whatever the load.
        for _ in range(3):
            await story.window(BUSY)
            assert story.layout == TWO
        node.finish("all-long")
        layouts = []
        for _ in range(LINGER + 2):
            await story.window(BUSY)
            layouts.append(story.layout)
        assert layouts[LINGER - 1 :] == [TWO, ONES, ONES]
        assert story.manager.said()["trigger"] == "load"

    with caplog.at_level(logging.INFO):
        run(tell, limits=(100, 200))


def test_the_loop_does_not_wait_for_the_end_of_the_window() -> None:
    async def tell(story: Story) -> None:
        story.manager._interval_s = 3600.0
        loop = asyncio.ensure_future(story.manager.run())
        await asyncio.sleep(0)
        story.node.request("all-long", tokens=LONG)
        await story.node.until(lambda: story.layout == TWO and not story.node.modes.switching)
        loop.cancel()
        assert story.node.where() == {TWO: ["all-long"]}
        await story.node.settle()

    run(tell, limits=(100, 200))


def test_a_long_request_that_comes_in_a_switch_is_bound_for_after_it() -> None:
    async def tell(story: Story) -> None:
        node = story.node
        story.manager._interval_s = 3600.0
        loop = asyncio.ensure_future(story.manager.run())
        node.request("all-first", tokens=LONG)
        await node.until(lambda: story.layout == TWO and not node.modes.switching)
        node.finish("all-first")
        story.arrive(1, end=False)
        node.during[(TWO, "ExportCall")] = lambda: node.world.request("all-second", LONG)
        node.sent.add("all-second")
        await node.modes.switch(parse_layout(ONES, (1, 2), 2), Strategy.AUTO, "by the test")
        await node.until(lambda: story.layout == TWO and not node.modes.switching)
        loop.cancel()
        await node.settle()
        assert "all-second" in node.where()[TWO]

    run(tell, limits=(100, 200))


def test_an_operator_cannot_leave_a_waiting_request_without_an_engine() -> None:
    async def tell(story: Story) -> None:
        story.node.router.engines[TWO].state = EngineState.STARTING
        story.node.request("all-long", tokens=LONG)
        await story.window(0)
        assert story.layout == ONES
        with pytest.raises(SwitchRefusedError, match="request all-long waits for an engine that holds 156 tokens"):
            await story.manager.order(parse_layout(ONES, (1, 2), 2), Strategy.AUTO, "mine")
        assert story.manager.said()["control"] == "planner"
        story.node.router.engines[TWO].state = EngineState.READY
        await story.manager.order(parse_layout(TWO, (1, 2), 2), Strategy.AUTO, "mine")
        await story.node.settle()
        assert story.node.where() == {TWO: ["all-long"]}
        # In the operator's hands the limit is what the layout holds.
        story.node.finish()
        await story.manager.order(parse_layout(ONES, (1, 2), 2), Strategy.AUTO, "mine")
        story.node.world.request("all-next", LONG)
        assert "let the planner decide again (POST /adapt/layout with auto)" in refusal(story.node.world)
        story.node.world.tokenizer.pop()
        story.manager.release("test")
        assert story.node.router.request_tokens == 200

    run(tell, limits=(100, 200))


# The switch.


def over(tell: Any) -> None:
    async def all_of_it() -> None:
        node = Node(lengths=lengths(AdaptPolicy.MANUAL))
        await node.switch(TWO)
        node.request("long", tokens=LONG)
        node.request("short", tokens=20)
        await tell(node)
        node.finish()
        await node.settle()
        assert node.ended() == {"long": 1, "short": 1}

    asyncio.run(all_of_it())


@pytest.mark.parametrize("strategy", ["auto", "migrate", "recompute"])
def test_a_layout_that_does_not_hold_what_runs_is_refused(strategy: str) -> None:
    async def tell(node: Node) -> None:
        calls = len(node.calls)
        with pytest.raises(SwitchRefusedError) as refused:
            await node.switch(ONES, strategy)
        text = str(refused.value)
        assert "request long on tp2@0-1 may come to have 156 tokens" in text
        assert "hold requests of 100; let it end first (strategy drain), keep it paused (strategy keep)" in text
        assert len(node.calls) == calls, "an engine was asked for something"
        assert node.where() == {TWO: ["long", "short"]}
        node.finish("long")
        await node.switch(ONES, strategy)

    over(tell)


def test_it_ends_first_or_stays_paused_as_the_strategy_says() -> None:
    async def kept(node: Node) -> None:
        assert (await node.switch(ONES, "keep")).requests["kept"] == 2
        assert (await node.switch(TWO)).requests["resumed"] == 2
        assert node.where() == {TWO: ["long", "short"]}

    async def drained(node: Node) -> None:
        switch = asyncio.ensure_future(node.switch(ONES, "drain"))
        await node.until(lambda: node.router.places._waiters)
        node.finish()
        assert (await switch).requests["drained"] == 2

    over(kept)
    over(drained)


# The death of engines.


@pytest.mark.parametrize("first", [False, True])
def test_a_long_request_goes_on_at_an_engine_that_holds_it(first: bool) -> None:
    async def tell(story: Story) -> None:
        node = story.node
        story.arrive(2, end=False)
        node.request("all-long", tokens=LONG)
        await story.window(0)
        node.world.tokens(TWO, "all-long", [1, 2, 3], 3)
        node.die(TWO)
        await node.settle()
        node.check()
        assert "all-long" in node.where()[TWO]
        # Kept paused in a layout that does not hold it, it waits for one that does.
        await node.modes.switch(parse_layout(ONES, (1, 2), 2), Strategy.KEEP, "by the test")
        node.request("all-short")
        node.die(TWO)
        waiting = node.router.stranded.in_flight
        for rid in [rid for rid in waiting if first and rid != "all-long"]:
            waiting[rid] = waiting.pop(rid)

        def it_alone_waits() -> bool:
            node.suspects_go_on()
            return list(node.router.stranded.in_flight) == ["all-long"]

        await node.until(it_alone_waits)
        for _ in range(20):
            await asyncio.sleep(0)
        assert list(node.router.stranded.in_flight) == ["all-long"]
        assert not any("all-long" in rids for rids in node.where().values())
        await node.until(lambda: node.pools.deaths(SPECS[TWO]) == 2)
        node.restart(TWO)
        await story.manager.step()
        await node.settle()
        node.check()
        assert (story.layout, "all-long" in node.where()[TWO]) == (TWO, True)

    run(tell, limits=(100, 200))


def test_where_nobody_binds_it_ends_with_a_503() -> None:
    async def tell(node: Node) -> None:
        await node.switch(ONES, "keep")
        node.die(TWO)
        await node.settle()
        assert "no engine that holds it is left" in str(node.world.tokenizer)

    over(tell)
