"""KV of prompts that are still being read, copied ahead of their hand-over."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers import io_struct
from switch_fakes import FAULTS, ONES, OTHER_SPLIT, SPECS, SPLIT, TWO, Node
from test_handovers import SplitStory, all_end, run, split

SOURCE, TAKER = "tp1@0", "tp1@1"
AHEAD = ("AheadCall", "ForgetCall", "TakeOverCall", "LetGoCall", "KeepCall", "LeaveCall", "ExportCall", "recover")


def calls_to(node: Node, *kinds: str) -> list[str]:
    return [kind for name, kind in node.calls if name == TAKER and kind in kinds]


async def half_read(node: Node, rid: str = "a", tokens: int = 320) -> None:
    """A prompt of which parts have gone ahead."""
    node.request(rid, tokens=tokens)
    node.part(SOURCE, rid, 0)
    node.part(SOURCE, rid, tokens // 4)
    node.part(SOURCE, rid, tokens // 2)
    await node.settle()
    node.check()
    (early,) = node.fakes[TAKER].early.values()
    assert (early.rid, early.tokens) == (rid, tokens // 2)
    assert node.where() == {SOURCE: [rid]}


def test_parts_go_ahead_and_only_the_rest_follows() -> None:
    async def story() -> None:
        node = await split()
        await half_read(node)
        node.prefill()
        await node.settle()
        node.check()
        assert node.where() == {TAKER: ["a"]}
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 1, "ahead_tokens": 160}
        assert calls_to(node, *AHEAD) == ["AheadCall"] * 3 + ["TakeOverCall"]
        assert not node.fakes[TAKER].early

    run(story())


def test_there_is_room_before_anything_is_read() -> None:
    async def story() -> None:
        node = await split()
        node.request("a", tokens=320)
        node.part(SOURCE, "a", 0)
        await node.settle()
        (early,) = node.fakes[TAKER].early.values()
        assert (early.tokens, len(early.blocks[0])) == (0, 20)
        (going,) = node.modes.handovers._ahead
        assert not going.tickets
        node.check()
        node.prefill()
        await node.settle()
        node.check()
        assert node.fakes[TAKER].running["a"][1] == early.blocks
        assert calls_to(node, *AHEAD) == ["AheadCall", "TakeOverCall"]

    run(story())


def test_parts_wait_for_an_engine_with_room_for_all_of_the_request() -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._takers.full.add(SPECS[TAKER])
        node.request("a", tokens=320)
        node.part(SOURCE, "a", 96)
        await node.settle()
        assert not calls_to(node, "AheadCall")
        node.modes.handovers._takers.full.clear()
        node.part(SOURCE, "a", 192)
        await node.settle()
        # All that has been read goes then.
        assert calls_to(node, "AheadCall") == ["AheadCall"]
        assert [early.tokens for early in node.fakes[TAKER].early.values()] == [192]
        node.check()

    run(story())


@pytest.mark.parametrize("how", ["its client goes", "it stays", "its engine dies", "roles change", "layout changes"])
def test_what_is_not_handed_over_is_forgotten(how: str) -> None:
    async def story() -> None:
        node = await split()
        await half_read(node)
        match how:
            case "its client goes":
                node.world.send(io_struct.AbortReq(rid="a"))
                node.read()
            case "it stays":
                node.stay(SOURCE, "a")
            case "its engine dies":
                node.die(SOURCE)
            case "roles change":
                await node.switch(OTHER_SPLIT)
            case "layout changes":
                await node.switch(TWO)
        await node.settle()
        assert calls_to(node, "ForgetCall") == ["ForgetCall"]
        assert not node.fakes[TAKER].early
        assert not list(node.modes.handovers._ahead)
        node.check()
        node.finish()
        node.check()
        assert set(node.ended()) == {"a"}

    run(story())


def test_blocks_of_a_source_that_died_are_free_when_nothing_reads_them() -> None:
    async def story() -> None:
        node = await split()
        await half_read(node)
        node.turns[TAKER, "ForgetCall"] = 20_000
        free = node.pools.states()[0]
        node.die(SOURCE)
        await node.until(lambda: node.pools.deaths(SPECS[SOURCE]) == 1)
        assert node.pools.states()[0].get("quarantined", 0) == 160 // 16, free
        await node.settle()
        assert node.pools.states()[0].get("quarantined", 0) == 0
        node.check()

    run(story())


def test_the_taker_dies_and_the_prompt_goes_on() -> None:
    async def story() -> None:
        node = await split()
        await half_read(node)
        node.die(TAKER)
        node.part(SOURCE, "a", 200)
        await node.settle()
        # When there is somebody to take it again, it begins anew.
        assert not node.fakes[TAKER].early
        node.part(SOURCE, "a", 300)
        node.prefill()
        await node.settle()
        assert node.where() == {TAKER: ["a"]}
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 1, "ahead_tokens": 288}
        node.check()

    run(story())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", ["AheadCall", "ForgetCall", "TakeOverCall"])
def test_a_call_fails(call: str, fault: str) -> None:
    async def story() -> None:
        node = await split()
        node.modes.handovers._most_wait_s = 0.02
        node.faults[TAKER, call] = fault
        node.request("a", "b", tokens=320)
        for end in (64, 128, 192):
            node.part(SOURCE, "a", end)
            node.part(SOURCE, "b", end)
            await node.settle()
        if call == "ForgetCall":
            node.world.send(io_struct.AbortReq(rid="b"))
            node.read()
        await node.settle()
        node.prefill()
        await node.until(lambda: (TAKER, call) in node.calls and not node.modes.handovers.waiting)
        await node.settle()
        node.prefill()
        await all_end(node, "a", "b")

    run(story())


def test_what_the_taker_gave_up_is_copied_whole() -> None:
    async def story() -> None:
        node = await split()
        await half_read(node)
        node.fakes[TAKER].early.clear()
        # Its next part is refused, and nothing of it goes ahead any more.
        node.part(SOURCE, "a", 256)
        node.part(SOURCE, "a", 300)
        await node.settle()
        assert calls_to(node, "AheadCall", "ForgetCall") == ["AheadCall"] * 5 + ["ForgetCall"]
        node.prefill()
        await node.settle()
        assert node.where() == {TAKER: ["a"]}
        assert node.said() == {"waiting": 0, "under_way": 0, "handed_over": 1}
        node.check()

    run(story())


def test_a_prompt_that_has_been_read_comes_before_those_that_are_being_read() -> None:
    async def story() -> None:
        node = await split()
        # Room for two of them.
        node.request("reading", "other", "read", tokens=600)
        node.part(SOURCE, "reading", 64)
        node.part(SOURCE, "other", 64)
        await node.settle()
        assert len(node.fakes[TAKER].early) == 2
        rooms = node.modes.handovers._takers.rooms()
        takers = rooms.beside[TAKER], rooms.pressed[TAKER]
        assert takers[1].free - takers[0].free == 2 * 600 // 16 + 4
        node.check()

    run(story())


steps = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 400)),
    st.tuples(st.just("part"), st.tuples(st.integers(0, 6), st.integers(0, 400))),
    st.tuples(st.just("part"), st.tuples(st.integers(0, 6), st.integers(0, 400))),
    st.tuples(st.just("stay"), st.integers(0, 6)),
    st.tuples(st.just("give up"), st.sampled_from((SOURCE, TAKER))),
    st.tuples(st.just("prefill"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 6)),
    st.tuples(st.just("abort"), st.integers(0, 6)),
    st.tuples(st.just("die"), st.sampled_from((SOURCE, TAKER))),
    st.tuples(
        st.just("fault"),
        st.tuples(st.tuples(st.sampled_from((SOURCE, TAKER)), st.sampled_from(AHEAD)), st.sampled_from(FAULTS)),
    ),
    st.tuples(st.just("fault"), st.just(((TAKER, "land"), "lost"))),
    st.tuples(
        st.just("turns"), st.tuples(st.tuples(st.just(TAKER), st.sampled_from((*AHEAD, "land"))), st.integers(0, 12))
    ),
    st.tuples(
        st.just("switch"),
        st.tuples(st.sampled_from((ONES, SPLIT, OTHER_SPLIT, TWO)), st.sampled_from(("auto", "recompute"))),
    ),
)


class AheadStory(SplitStory):
    """A story with prompts that are read in parts."""

    async def step(self, kind: str, value: object) -> None:
        node = self.node
        match kind, value:
            case "part", (number, tokens):
                for name in (SOURCE, TAKER):
                    node.part(name, self.rid(number), tokens)
            case "stay", int(number):
                for name in (SOURCE, TAKER):
                    if self.rid(number) in node.fakes[name].parts:
                        node.stay(name, self.rid(number))
            case "give up", str(name):
                node.fakes[name].early.clear()
            case _:
                await super().step(kind, value)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=4, max_size=25))
@example(
    [("request", 300), ("part", (0, 100)), ("wait", 9), ("die", SOURCE), ("wait", 3), ("switch", (SPLIT, "auto"))],
)
def test_anything_in_any_order(story: list[tuple[str, object]]) -> None:
    asyncio.run(AheadStory().tell(story))
