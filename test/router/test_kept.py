"""What is kept paused gives its blocks to requests that run and need them; none is lost, none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from switch_fakes import ONES, SETTINGS, SPECS, TWO, Node

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.switch import SwitchRefusedError

KEPT = ("a", "b")
"""One on each TP 1 engine, of 40 tokens: three blocks of each GPU."""
LIMIT = SETTINGS.request_tokens[2]
BESIDE = LIMIT - 3 * SETTINGS.geometry.tokens_per_block(2)
"""Tokens of the longest request of TP 2 beside what is kept."""


def run(story: Callable[[Node], Awaitable[None]], lengths: Lengths | None = None) -> None:
    """Tell a story on a new node; in the end all requests have ended with an answer."""

    async def tell() -> None:
        node = Node(lengths=lengths)
        node.modes.kept._ahead = 4 * LIMIT
        await story(node)
        await node.settle()
        node.check()
        node.finish()
        await node.settle()
        assert node.router.in_flight == 0
        assert node.ended() == dict.fromkeys(node.sent, 1)
        assert not node.world.tokenizer, "a request has ended with an error"

    asyncio.run(tell())


async def nothing_kept(node: Node) -> None:
    await node.until(lambda: not node.modes.kept.exports and not node.modes.kept._tasks)
    await node.settle()


@pytest.mark.parametrize(("tokens", "new"), [(BESIDE - 3, 4), (100, BESIDE - 100), (100, LIMIT), (1600, None)])
def test_a_request_that_would_not_fit_beside_what_is_kept_gets_its_blocks(tokens: int, new: int | None) -> None:
    async def story(node: Node) -> None:
        node.request(*KEPT)
        await node.switch(TWO, "keep")
        node.request("fits", tokens=100, new=BESIDE - 101)
        for _ in range(20):
            await asyncio.sleep(0)
        assert set(map(str, node.modes.kept.exports)) == {"tp1@0", "tp1@1"}
        node.request("needs more", tokens=tokens, new=new)
        await nothing_kept(node)
        assert set(KEPT) < set(node.where()[TWO])
        assert node.pools.counts(SPECS[TWO]) == (SETTINGS.request_tokens[1] // 16 + 2, 0)

    run(story)


def test_one_that_grows_is_seen_in_time() -> None:
    async def story(node: Node) -> None:
        node.modes.kept._ahead = 64
        node.request(*KEPT)
        await node.switch(TWO, "keep")
        node.request("grows", tokens=BESIDE - 200, new=150 + SETTINGS.geometry.tokens_per_block(2) * 3)
        for given in (20, 130, 137):
            node.world.tokens(TWO, "grows", [7] * given, given)
            node.modes.kept.make_room()
            assert bool(node.modes.kept.exports) == (given <= 136)
        await nothing_kept(node)

    run(story)


def test_what_came_in_the_switch_itself_is_looked_at_after_it() -> None:
    async def story(node: Node) -> None:
        node.request("a")
        node.during[("tp1@0", "ExportCall")] = lambda: node.request("needs more", tokens=3000, new=LIMIT)
        # The new layout serves already.
        node.turns[("tp1@1", "ReleaseCall")] = 20
        assert (await node.switch(TWO, "keep")).requests["kept"] == 1
        await nothing_kept(node)
        assert node.where() == {TWO: ["a", "needs more"]}

    run(story)


def test_a_switch_that_waits_does_not_make_others_wait_for_what_is_kept() -> None:
    async def story(node: Node) -> None:
        node.request(*KEPT)
        await node.switch(TWO, "keep")
        node.request("needs more", tokens=100, new=BESIDE)
        switch = asyncio.ensure_future(node.switch(ONES, "drain"))
        await node.until(lambda: node.router.places._waiters)
        await node.until(lambda: not node.modes.kept.exports)
        node.finish()
        assert (await switch).requests["resumed"] == 0

    run(story)


def test_a_switch_that_moves_blocks_waits_until_what_is_kept_has_let_go() -> None:
    async def story(node: Node) -> None:
        node.request(*KEPT)
        await node.switch(TWO, "keep")
        node.turns[("tp1@0", "ReleaseCall")] = 20
        node.request("needs more", tokens=100, new=BESIDE)
        await node.until(lambda: ("tp1@0", "ReleaseCall") in node.calls)
        node.calls.clear()
        await node.switch(ONES)
        assert node.calls.index(("tp2@0-1", "kv_grow")) < node.calls.index(("tp2@0-1", "SnapshotCall"))
        assert sum(len(rids) for rids in node.where().values()) == 3

    run(story)


def test_an_engine_that_dies_while_it_lets_go() -> None:
    async def story(node: Node) -> None:
        node.request(*KEPT)
        await node.switch(TWO, "keep")
        node.faults[("tp1@0", "ReleaseCall")] = "die"
        node.request("needs more", tokens=100, new=BESIDE)
        await nothing_kept(node)

    run(story)


def test_letting_go_again_and_again_is_no_reason_to_end_a_request() -> None:
    async def story(node: Node) -> None:
        node.request(*KEPT)
        for turn in range(4):
            await node.switch(TWO if turn % 2 == 0 else ONES, "keep")
            node.modes.kept.let_go(list(node.modes.kept.exports), "test")
            await nothing_kept(node)
        assert all(node.router.journal[rid].deaths == 0 for rid in KEPT)

    run(story)


LIMITS = Lengths({"tp1@0": 1000, "tp1@1": 1000, TWO: 2000}, AdaptPolicy.MANUAL)


def test_one_that_no_engine_of_the_layout_holds_waits_for_its_layout_without_its_kv() -> None:
    async def story(node: Node) -> None:
        await node.switch(TWO)
        node.request("long", tokens=1400)
        node.world.tokens(TWO, "long", [1, 2, 3], 3)
        await node.switch(ONES, "keep")
        node.request("needs more", tokens=900, new=80)
        await nothing_kept_but(node, "long")
        # Nor does it end because another engine dies.
        node.die("tp1@1")
        await node.until(lambda: node.pools.deaths(SPECS["tp1@1"]) == 1)
        node.restart("tp1@1")
        node.finish("needs more")
        assert list(node.router.stranded.in_flight) == ["long"]
        await node.switch(TWO)
        await node.settle()
        assert node.where() == {TWO: ["long"]}

    run(story, LIMITS)


def test_it_ends_with_an_error_when_the_server_shuts_down() -> None:
    async def tell() -> None:
        node = Node(lengths=LIMITS)
        await node.switch(TWO)
        node.request("long", tokens=1400)
        await node.switch(ONES, "keep")
        node.request("needs more", tokens=900, new=80)
        await nothing_kept_but(node, "long")
        node.router.accepting = False
        node.router.fail_too_long("the server is shutting down")
        [error] = node.world.tokenizer
        assert error.finished_reason["status_code"] == 503  # type: ignore[attr-defined]

    asyncio.run(tell())


async def nothing_kept_but(node: Node, rid: str) -> None:
    await node.until(lambda: not node.modes.kept.exports and not node.modes.kept._tasks)
    assert list(node.router.stranded.in_flight) == [rid]
    assert node.pools.available(SPECS["tp1@0"]) == 0


def test_a_layout_that_holds_it_no_more_is_refused_as_before() -> None:
    async def story(node: Node) -> None:
        await node.switch(TWO)
        node.request("long", tokens=1400)
        with pytest.raises(SwitchRefusedError, match="request long on tp2@0-1 may come to have"):
            await node.switch(ONES)

    run(story, LIMITS)
