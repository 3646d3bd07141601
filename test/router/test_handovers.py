"""Requests that go from an engine that prefills to one that decodes, while both serve."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers import io_struct
from switch_fakes import FAULTS, ONES, OTHER_SPLIT, SETTINGS, SPECS, SPLIT, TWO, Node
from test_modes_random import Story

from sglang_adapt.core.layout import Role
from sglang_adapt.router.handover_steps import MOST, HandoverSteps
from sglang_adapt.router.switch import SwitchRefusedError


async def split() -> Node:
    node = Node()
    await node.switch(SPLIT)
    await node.settle()
    assert node.router.roles == {"tp1@0": Role.PREFILL, "tp1@1": Role.DECODE}
    return node


async def all_end(node: Node, *rids: str) -> None:
    """What runs ends, each of these requests once, and nothing else has."""
    await node.settle()
    node.check()
    node.finish()
    await node.settle()
    node.check()
    assert set(node.ended()) == set(rids)


def run(story: object) -> None:
    asyncio.run(story)  # type: ignore[arg-type]


def test_roles_change_without_a_call_that_moves_anything() -> None:
    async def story() -> None:
        node = Node()
        node.request("a", "b")
        before, epoch = node.where(), node.pools.epoch
        switch = await node.switch(SPLIT)
        await node.settle()
        assert (switch.epoch, switch.phases_ms) == (epoch + 1, {})
        assert {kind for _, kind in node.calls} == {"kv_map", "LeaveCall"}
        assert node.where() == before
        assert node.fakes["tp1@0"].hands_over
        assert not node.fakes["tp1@1"].hands_over
        assert (await node.switch(OTHER_SPLIT)).epoch == node.pools.epoch == epoch + 2
        await node.settle()
        assert (node.fakes["tp1@0"].hands_over, node.fakes["tp1@1"].hands_over) == (False, True)
        assert node.outcomes == [f"{SPLIT}: switched", f"{OTHER_SPLIT}: switched"]
        node.check()

    run(story())


def test_prompts_go_to_the_one_and_are_decoded_by_the_other() -> None:
    async def story() -> None:
        node = await split()
        node.request("a", "b", "c")
        assert node.where() == {"tp1@0": ["a", "b", "c"]}
        node.prefill()
        await node.settle()
        node.check()
        assert node.where() == {"tp1@1": ["a", "b", "c"]}
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 3}
        assert [kind for _, kind in node.calls if kind.endswith("Call")][-2:] == ["TakeOverCall", "LetGoCall"]
        node.finish()
        node.check()
        assert set(node.ended()) == {"a", "b", "c"}

    run(story())


def test_it_is_told_what_took_how_long() -> None:
    async def story() -> None:
        node = await split()
        assert "steps_ms" not in node.modes.handovers.said()
        node.request("a", "b")
        node.prefill()
        await node.settle()
        steps = node.modes.handovers.said()["steps_ms"]
        assert list(steps) == ["tell", "place", "make", "let in", "in all", "arrive"]
        assert steps["make"] == steps["let in"] == {"p50": 1.0, "p90": 1.0}
        assert steps["in all"]["p50"] >= steps["tell"]["p50"] + steps["place"]["p50"]

    run(story())


def test_steps_are_those_of_the_last_ones_and_of_the_slowest_rank() -> None:
    steps = HandoverSteps()
    for _ in range(MOST):
        steps.add("tell", 1000.0)
    for ms in range(MOST):
        steps.add("tell", float(ms))
    steps.add_ranks([{"make": 1.0, "wait": 3.0}, {"make": 2.0}])
    assert steps.said() == {
        "tell": {"p50": MOST / 2, "p90": float(MOST * 9 // 10)},
        "wait": {"p50": 3.0, "p90": 3.0},
        "make": {"p50": 2.0, "p90": 2.0},
    }


def test_what_finds_no_room_waits_and_then_goes() -> None:
    async def story() -> None:
        node = await split()
        node.faults["tp1@1", "TakeOverCall"] = "refuse"
        node.request("a")
        node.prefill()
        await node.until(lambda: ("tp1@1", "TakeOverCall") in node.calls)
        await node.settle()
        assert node.said() == {"waiting": 1, "under_way": 0}
        # It is load of the engine that holds it.
        assert list(node.router.engines["tp1@0"].in_flight) == ["a"]
        node.check()
        # Another request ends there: there may be room now.
        node.modes.handovers.ended(node.router.engines["tp1@1"])
        await node.settle()
        assert node.where() == {"tp1@1": ["a"]}
        node.check()

    run(story())


def test_what_waits_too_long_is_decoded_where_it_is() -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._most_wait_s = 0.02
        # More than the other engine can hold, so some wait.
        node.request(*(f"r{number}" for number in range(4)), tokens=400)
        node.prefill()
        await node.settle()
        await node.until(lambda: not node.modes.handovers.waiting)
        await node.settle()
        said = node.modes.handovers.said()
        assert said["handed_over"] >= 1
        assert said["kept"] >= 1
        assert said["handed_over"] + said["kept"] == 4 - len(node.fakes["tp1@0"].unread)
        node.check()
        node.finish()
        await node.settle()
        node.check()

    run(story())


def test_what_no_engine_that_decodes_holds_is_decoded_where_it_is_at_once() -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._most_wait_s = 3600.0
        node.request("too long", "short")
        node.fakes["tp1@0"].most["too long"] = SETTINGS.request_tokens[1] + 1
        node.prefill()
        await node.settle()
        assert node.where() == {"tp1@0": ["too long"], "tp1@1": ["short"]}
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 1, "kept": 1}
        node.check()

    run(story())


def test_a_client_that_goes_while_its_request_waits() -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._takers.full.add(SPECS["tp1@1"])
        node.request("a")
        node.prefill()
        assert node.modes.handovers.waiting == 1
        node.world.send(io_struct.AbortReq(rid="a"))
        node.read()
        await node.settle()
        node.check()
        assert node.ended() == {"a": 1}
        assert node.said() == {"waiting": 0, "under_way": 0, "given_up": 1}

    run(story())


def test_a_client_that_goes_while_its_request_moves() -> None:
    async def story() -> None:
        node = await split()
        node.request("a")
        node.during["tp1@1", "TakeOverCall"] = lambda: node.world.send(io_struct.AbortReq(rid="a"))
        node.prefill()
        await node.settle()
        await node.settle()
        node.check()
        assert node.ended() == {"a": 1}
        assert node.where() == {}

    run(story())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_taker_fails(fault: str) -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._most_wait_s = 0.02
        node.faults["tp1@1", "TakeOverCall"] = fault
        node.request("a", "b")
        node.prefill()
        await node.until(lambda: ("tp1@1", "TakeOverCall") in node.calls)
        await node.settle()
        node.prefill()
        await node.until(lambda: not node.modes.handovers.waiting)
        await all_end(node, "a", "b")

    run(story())


def test_the_source_dies_while_its_kv_is_read() -> None:
    async def story() -> None:
        node = await split()
        node.turns["tp1@1", "land"] = 200
        node.request("a")
        node.prefill()
        await node.until(lambda: "a" in node.router.engines["tp1@1"].in_flight)
        node.die("tp1@0")
        await asyncio.sleep(0.01)
        # Its blocks are not given to anyone before the copy has ended.
        ledger = node.pools._ledgers[0]
        assert node.pools.counts(SPECS["tp1@0"])[0] == 0
        assert ledger.check()
        await node.until(lambda: not node.modes.handovers.said()["under_way"])
        await node.settle()
        assert node.where() == {"tp1@1": ["a"]}
        node.check()

    run(story())


def test_kv_that_does_not_come_is_read_again() -> None:
    async def story() -> None:
        node = await split()
        node.faults["tp1@1", "land"] = "lost"
        node.request("a", "b")
        node.prefill()
        await node.until(lambda: not node.faults and not node.modes.handovers.said()["under_way"])
        await node.settle()
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 2, "recomputed": 2}
        # The source has let go; both go on from their tokens.
        assert ("tp1@0", "LetGoCall") in node.calls and "recover" in {call for _, call in node.calls}
        assert not node.fakes["tp1@0"].leaving
        node.check()
        node.prefill()
        await all_end(node, "a", "b")

    run(story())


def test_who_has_left_when_kv_does_not_come_is_not_served() -> None:
    async def story() -> None:
        node = await split()
        node.faults["tp1@1", "land"] = "lost"
        node.turns["tp1@1", "land"] = 50
        node.request("a", "b")
        node.prefill()
        await node.until(lambda: "a" in node.router.engines["tp1@1"].in_flight)
        node.world.send(io_struct.AbortReq(rid="a"))
        node.read()
        await node.until(lambda: not node.faults and not node.modes.handovers.said()["under_way"])
        await node.settle()
        assert node.ended() == {"a": 1}
        node.prefill()
        await all_end(node, "a", "b")

    run(story())


def test_one_role_is_gone_and_comes_back() -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._takers.full.add(SPECS["tp1@1"])
        node.request("waits")
        node.prefill()
        node.die("tp1@1")
        assert set(node.router.roles.values()) == {Role.MIXED}
        await node.until(lambda: not node.fakes["tp1@0"].hands_over and not node.modes.handovers.waiting)
        node.request("new")
        node.prefill()
        assert node.where() == {"tp1@0": ["new", "waits"]}
        await node.settle()
        assert node.router.roles == {"tp1@0": Role.PREFILL, "tp1@1": Role.DECODE}
        node.request("later")
        node.prefill()
        await node.settle()
        assert node.where() == {"tp1@0": ["new", "waits"], "tp1@1": ["later"]}
        node.check()
        # The other way about, those that decode read prompts.
        node.die("tp1@0")
        node.request("last")
        everything = {"last", "later", "new", "waits"}
        await node.until(lambda: set(node.router.engines["tp1@1"].in_flight) == everything)
        await node.settle()
        node.check()

    run(story())


def test_a_switch_waits_for_what_is_under_way() -> None:
    async def story() -> None:
        node = await split()
        node.turns["tp1@1", "land"] = 50
        node.request("moves", "waits")
        node.prefill()
        await node.until(lambda: node.modes.handovers.said()["under_way"])
        node.request("unread")
        await node.switch(TWO)
        await node.settle()
        assert node.where() == {"tp2@0-1": ["moves", "unread", "waits"]}
        node.check()
        await node.switch(SPLIT)
        await node.settle()
        node.check()

    run(story())


CALLS = ("TakeOverCall", "LetGoCall", "KeepCall", "LeaveCall", "ExportCall", "AdoptCall", "kv_map", "recover")
places = st.tuples(st.sampled_from(("tp1@0", "tp1@1")), st.sampled_from(CALLS))
steps = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 400)),
    st.tuples(st.just("prefill"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("die"), st.sampled_from(("tp1@0", "tp1@1"))),
    st.tuples(st.just("fault"), st.tuples(places, st.sampled_from(FAULTS))),
    st.tuples(st.just("turns"), st.tuples(places, st.integers(0, 12))),
    st.tuples(st.just("land"), st.tuples(st.sampled_from(("tp1@0", "tp1@1")), st.integers(0, 30))),
    st.tuples(st.just("fault"), st.sampled_from((("tp1@0", "land"), ("tp1@1", "land"))).map(lambda at: (at, "lost"))),
    st.tuples(st.just("meanwhile"), st.tuples(places, st.sampled_from(("request", "abort", "finish", "die")))),
    st.tuples(
        st.just("switch"),
        st.tuples(st.sampled_from((ONES, SPLIT, OTHER_SPLIT, TWO)), st.sampled_from(("auto", "recompute"))),
    ),
)


class SplitStory(Story):
    """A story with roles."""

    async def begin(self) -> None:
        self.node.modes.handovers._most_wait_s = 0.01
        await self.node.switch(SPLIT)

    async def step(self, kind: str, value: object) -> None:
        match kind, value:
            case "prefill", _:
                self.node.prefill()
            case "wait", int(turns):
                for _ in range(turns):
                    await asyncio.sleep(0)
                    self.node.read()
            case "land", (name, turns):
                self.node.turns[name, "land"] = turns
            case _:
                await super().step(kind, value)

    async def tell(self, story: list[tuple[str, object]]) -> None:
        """The whole story, and then all goes on without faults, to its end."""
        await self.begin()
        for kind, value in story:
            await self.step(kind, value)
        self.node.faults, self.node.during, self.node.turns = {}, {}, {}
        await self.node.settle()
        self.node.prefill()
        await self.node.settle()
        with contextlib.suppress(SwitchRefusedError):
            await self.node.switch(SPLIT)
        await self.end()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=3, max_size=25))
@example([("request", 30), ("land", ("tp1@1", 30)), ("prefill", 0), ("wait", 4), ("die", "tp1@1"), ("wait", 9)])
def test_anything_in_any_order(story: list[tuple[str, object]]) -> None:
    asyncio.run(SplitStory().tell(story))
