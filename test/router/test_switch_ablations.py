"""A switch with a mechanism switched off for a measurement: what it does then, and that it can still be undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from switch_fakes import ONES, TWO, Node

from sglang_adapt.core.ablation import Ablation
from sglang_adapt.router.switch import SwitchRefusedError

RIDS = ("a", "b", "c", "d")


def run(ablation: Ablation, story: Callable[[Node], Awaitable[None]]) -> None:
    async def tell() -> None:
        node = Node(ablation=ablation)
        node.request(*RIDS)
        await story(node)
        await node.settle()
        node.check()
        node.finish()
        await node.settle()
        assert set(node.ended()) == node.sent

    asyncio.run(tell())


@pytest.mark.parametrize("strategy", ["auto", "migrate"])
def test_nothing_is_copied_before_the_pause(strategy: str) -> None:
    async def story(node: Node) -> None:
        switch = await node.switch(TWO, strategy)
        assert switch.requests == {"migrated": 4}
        assert (switch.kv_tokens, switch.ahead_tokens) == (4 * 41, 0)
        assert "precopy" not in switch.phases_ms
        assert not [kind for _, kind in node.calls if kind in ("SnapshotCall", "PrecopyCall")]

    run(Ablation(stop_copy=True), story)


def test_engines_that_enter_read_their_weights_again_while_requests_are_paused() -> None:
    async def story(node: Node) -> None:
        switch = await node.switch(TWO)
        kinds = [kind for engine, kind in node.calls]
        assert kinds.count("reload_weights") == 1
        assert kinds.index("ExportCall") < kinds.index("reload_weights") < kinds.index("AdoptCall")
        assert switch.steps_ms["reload"] == {"reload": 2.0}
        assert switch.pause_ms >= switch.phases_ms["reload"] > 0
        await node.switch(ONES)
        asked = [engine for engine, kind in node.calls if kind == "reload_weights"]
        assert asked == ["tp2@0-1", "tp1@0", "tp1@1"]

    run(Ablation(reload_weights=True), story)


@pytest.mark.parametrize("fault", ["refuse", "die", "break"])
def test_an_engine_that_cannot_read_again_leaves_all_as_it_was(fault: str) -> None:
    async def story(node: Node) -> None:
        node.faults["tp2@0-1", "reload_weights"] = fault
        with pytest.raises(SwitchRefusedError, match="has not read its weights again"):
            await node.switch(TWO)
        assert {name: len(rids) for name, rids in node.where().items()} == {"tp1@0": 2, "tp1@1": 2}

    run(Ablation(reload_weights=True), story)


def test_weights_are_not_read_again_otherwise() -> None:
    async def story(node: Node) -> None:
        switch = await node.switch(TWO)
        assert "reload" not in switch.phases_ms and switch.ahead_tokens
        assert "reload_weights" not in [kind for _, kind in node.calls]

    run(Ablation(), story)
