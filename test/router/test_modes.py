"""The switch of layout against engines that refuse, die and break in each of its phases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from switch_fakes import FAULTS, ONES, SETTINGS, SPECS, TWO, Node

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.handoff import HandoffCall, SnapshotCall
from sglang_adapt.router import entering
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.switch import SwitchRefusedError

RIDS = ("a", "b", "c", "d")


def run(story: Callable[[Node], Awaitable[None]], checked: bool = True) -> None:
    """Tell a story on a new node; in the end every request has ended once and all blocks are accounted for."""

    async def tell() -> None:
        node = Node()
        await story(node)
        await node.settle()
        if checked:
            node.check()
        for layout in (TWO, ONES):
            if node.modes.kept.exports:
                await node.switch(layout)
        await node.settle()
        node.finish()
        await node.settle()
        node.check()
        assert node.router.in_flight == 0
        assert set(node.ended()) == node.sent

    asyncio.run(tell())


def test_requests_and_blocks_go_over_and_back() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        switch = await node.switch(TWO)
        assert node.where() == {"tp2@0-1": [*RIDS]}
        assert (switch.requests, switch.failures) == ({"migrated": 4}, [])
        assert (switch.kv_tokens, switch.ahead_tokens) == (4 * 41, 4 * 32)
        node.check()
        await node.switch(ONES)
        assert {name: len(rids) for name, rids in node.where().items()} == {"tp1@0": 2, "tp1@1": 2}
        assert [kind for _, kind in node.calls[:8]].count("kv_map") == 1

    run(story)


def test_recompute_leaves_the_kv_behind() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        switch = await node.switch(TWO, "recompute")
        assert switch.requests == {"recomputed": 4}
        assert all(tokens == 0 for tokens, _ in node.fakes["tp2@0-1"].running.values())

    run(story)


def test_keep_holds_requests_until_their_layout_is_back() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        assert (await node.switch(TWO, "keep")).requests == {"kept": 4}
        assert node.where() == {}
        node.check()
        node.request("e")
        assert node.where() == {"tp2@0-1": ["e"]}
        switch = await node.switch(ONES, "keep")
        assert switch.requests == {"resumed": 4, "kept": 1}
        assert {name: len(rids) for name, rids in node.where().items()} == {"tp1@0": 2, "tp1@1": 2}

    run(story)


def test_an_engine_goes_on_with_what_it_kept_before_it_takes_up_what_arrives() -> None:
    async def story(node: Node) -> None:
        node.request("a", "b")
        await node.switch(TWO, "keep")
        node.request("c", "d")
        node.calls.clear()
        assert (await node.switch(ONES)).requests == {"resumed": 2, "migrated": 2}
        for engine in ("tp1@0", "tp1@1"):
            kinds = [kind for name, kind in node.calls if name == engine and kind != "kv_map"]
            assert kinds[:3] == ["PrecopyCall", "RestoreCall", "AdoptCall"]

    run(story)


def test_a_kept_request_that_is_aborted_ends_at_once_and_once() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO, "keep")
        node.world.send(io_struct.AbortReq(rid="b"))
        assert node.ended() == {"b": 1}
        assert (await node.switch(ONES)).requests == {"resumed": 3}
        node.read()
        assert "b" not in {rid for rids in node.where().values() for rid in rids}

    run(story)


def test_what_is_kept_goes_on_elsewhere_when_its_engine_will_not_serve_again() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO, "keep")
        node.world.send(io_struct.AbortReq(rid="b"))
        node.modes.let_go("the end is near")
        await node.settle()
        assert node.where() == {"tp2@0-1": ["a", "c", "d"]}
        assert node.modes.kept.exports == {}
        node.check()

    run(story)


def test_a_switch_under_way_is_not_disturbed_by_letting_go() -> None:
    async def story(node: Node) -> None:
        node.request("a", "b")
        await node.switch(TWO, "keep")
        node.during[("tp2@0-1", "ExportCall")] = lambda: node.modes.let_go("the end is near")
        assert (await node.switch(ONES)).requests == {"resumed": 2}

    run(story)


def test_kept_requests_of_an_engine_that_dies_go_on_elsewhere() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO, "keep")
        node.die("tp1@0")
        await node.settle()
        assert len(node.where()["tp2@0-1"]) == 2

    run(story)


def test_an_engine_that_dies_while_it_hands_over_what_it_is_to_keep() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        # It has handed out; the switch is at the engine that enters.
        node.during[("tp2@0-1", "AdoptCall")] = lambda: node.die("tp1@0")
        switch = await node.switch(TWO, "keep")
        assert switch.requests == {"kept": 2}
        await node.settle()
        assert len(node.where()["tp2@0-1"]) == 2

    run(story)


@pytest.mark.parametrize("engine", ["tp1@0", "tp1@1"])
def test_a_refused_export_changes_nothing(engine: str) -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        before = node.where()
        node.faults[(engine, "ExportCall")] = "refuse"
        with pytest.raises(SwitchRefusedError, match=f"layout {ONES} stays: {engine}: ExportCall was refused"):
            await node.switch(TWO)
        assert node.where() == before
        node.request("e")
        assert str(node.router.layout) == ONES

    run(story)


def test_a_refused_adopt_is_rolled_back() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        before = node.where()
        node.faults[("tp2@0-1", "AdoptCall")] = "refuse"
        with pytest.raises(SwitchRefusedError, match="could not take its requests up"):
            await node.switch(TWO)
        assert node.where() == before

    run(story)


def test_when_one_of_two_refuses_the_other_gets_all() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO)
        node.faults[("tp1@0", "AdoptCall")] = "refuse"
        switch = await node.switch(ONES)
        assert switch.requests["stranded"] == 2
        assert "tp1@0 could not take its requests up" in switch.failures[0]
        await node.settle()
        assert sum(map(len, node.where().values())) == 4

    run(story)


def test_requests_that_do_not_fit_are_a_reason_to_refuse() -> None:
    async def story(node: Node) -> None:
        node.request("a", "b", tokens=900)
        before = node.where()
        with pytest.raises(SwitchRefusedError, match="no engine has the blocks"):
            await node.switch(TWO)
        assert node.where() == before
        assert (await node.switch(TWO, "auto")).requests["recomputed"] >= 1

    run(story)


def test_the_engines_that_serve_are_those_that_get_requests_and_say_so() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        assert (await node.readback.read())["serving"] == ["tp1@0", "tp1@1"]
        await node.switch(TWO, "keep")
        # Prefixes of what it keeps stay in its lease, which is then as large as one that serves.
        node.fakes["tp1@0"].lease[0] |= {900, 901, 902}
        said = await node.readback.read()
        assert said["engines"]["tp1@0"]["leased_blocks"] > SETTINGS.standby_blocks
        assert said["kept"] == {"tp1@0": 2, "tp1@1": 2}
        assert said["serving"] == ["tp2@0-1"]
        node.faults[("tp2@0-1", "kv_state")] = "refuse"
        said = await node.readback.read()
        assert (said["serving"], said["engines"]["tp2@0-1"]["error"]) == ([], "tp2@0-1: kv_state was refused")
        node.fakes["tp2@0-1"].lease[1].pop()
        said = await node.readback.read()
        assert said["serving"] == []
        assert "which should be one number" in said["engines"]["tp2@0-1"]["error"]

    asyncio.run(story(Node()))


def test_the_answer_is_of_one_moment_around_a_switch() -> None:
    """In each state of a switch what is told fits together, however the question meets it."""

    async def story(node: Node) -> None:
        node.request(*RIDS)
        answers: list[dict[str, Any]] = []

        async def look() -> None:
            answers.append(await node.readback.read())

        going = asyncio.ensure_future(node.switch(TWO, "auto"))
        looks = []
        while not going.done():
            looks.append(asyncio.ensure_future(look()))
            await asyncio.sleep(0)
        await asyncio.gather(going, *looks)
        await look()
        for said in answers:
            between = (said["switching_from"], said["switching_to"])
            assert between == (None, None) or said["active"] in between == (ONES, TWO)
            serving = {ONES: {"tp1@0", "tp1@1"}, TWO: {"tp2@0-1"}}
            assert set(said["serving"]) <= serving[said["active"]]
            if between == (None, None):
                assert set(said["serving"]) == serving[said["active"]]
                assert set(said["roles"]) == serving[said["active"]]
        assert {said["switching_to"] for said in answers} == {None, TWO}
        assert {said["active"] for said in answers if said["switching_to"]} == {ONES, TWO}

    asyncio.run(story(Node()))


def test_engines_are_asked_all_at_once() -> None:
    async def story(node: Node) -> None:
        asked: list[int] = []
        for name in SPECS:
            node.turns[(name, "kv_state")] = 50
            node.during[(name, "kv_state")] = lambda: asked.append(sum(map(len, node._pending.values())))
        await node.readback.read()
        assert asked == [3, 3, 3]

    asyncio.run(story(Node()))


def test_a_layout_is_refused_while_a_keeper_is_started_again() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.keeper_fault = "keeper of GPU 1 is not ready yet; wait for it"
        with pytest.raises(SwitchRefusedError, match=r"engine tp2@0-1 cannot read the KV of all GPUs: keeper of GPU 1"):
            await node.switch(TWO)
        assert {name: len(rids) for name, rids in node.where().items()} == {"tp1@0": 2, "tp1@1": 2}
        node.keeper_fault = ""
        await node.switch(TWO)

    run(story)


def test_a_layout_with_a_dead_engine_is_refused() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.die("tp2@0-1")
        with pytest.raises(SwitchRefusedError, match=r"engine tp2@0-1 of layout tp2@0-1 is dead; ask again"):
            await node.switch(TWO)

    run(story)


def test_an_engine_that_dies_and_is_gone_before_it_adopts_is_not_waited_for() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.during[("tp1@1", "ExportCall")] = lambda: node.die("tp2@0-1")
        node.turns[("tp1@1", "ExportCall")] = 20_000
        with pytest.raises(SwitchRefusedError, match="tp2@0-1 has died since the switch began"):
            await node.switch(TWO)

    run(story)


def test_every_switch_that_is_asked_for_is_counted_once_with_what_came_of_it() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        first = asyncio.create_task(node.switch(TWO))
        await asyncio.sleep(0)
        with pytest.raises(SwitchRefusedError):
            await node.switch(TWO)
        await first
        node.faults[("tp2@0-1", "ExportCall")] = "refuse"
        with pytest.raises(SwitchRefusedError):
            await node.switch(ONES)
        node.faults[("tp1@0", "AdoptCall")] = "refuse"
        await node.switch(ONES)
        node.faults[("tp1@0", "ExportCall")] = "raise"
        with pytest.raises(ZeroDivisionError):
            await node.switch(TWO)
        assert node.outcomes == [
            f"{TWO}: refused",
            f"{TWO}: switched",
            f"{ONES}: refused",
            f"{ONES}: impaired",
            f"{TWO}: broken_off",
        ]

    run(story)


def test_a_request_that_waited_for_a_switch_waits_on_when_its_layout_has_died_meanwhile() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO)

        def the_only_engine_dies() -> None:
            node.request("e")
            assert list(node.router.waiting.paused) == ["e"]
            node.die("tp2@0-1")

        node.during[("tp1@0", "AdoptCall")] = the_only_engine_dies
        node.faults = {("tp1@0", "AdoptCall"): "refuse", ("tp1@1", "AdoptCall"): "refuse"}
        with pytest.raises(SwitchRefusedError, match="could not take its requests up"):
            await node.switch(ONES)
        assert not node.ended()
        assert sorted(node.router.stranded.in_flight) == [*RIDS, "e"]
        await node.settle()
        assert node.where() == {"tp2@0-1": [*RIDS, "e"]}

    run(story)


def test_what_was_kept_goes_on_only_when_the_blocks_of_an_engine_that_died_are_there() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        await node.switch(TWO, "keep")
        node.faults[("tp2@0-1", "ExportCall")] = "die"
        held: list[int] = []
        node.during[("tp1@0", "RestoreCall")] = lambda: held.append(node.pools.counts(SPECS["tp2@0-1"])[0])
        await node.switch(ONES)
        assert held == [0]

    run(story)


def test_one_switch_at_a_time() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        first = asyncio.create_task(node.switch(TWO))
        await asyncio.sleep(0)
        with pytest.raises(SwitchRefusedError, match="is under way"):
            await node.switch(TWO)
        await first

    run(story)


def test_drain_waits_and_gives_up_in_time() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        first = asyncio.create_task(node.switch(TWO, "drain"))
        await node.until(lambda: node.router.places._waiters)
        node.request("late")
        assert "late" not in {rid for rids in node.where().values() for rid in rids}
        node.finish(*RIDS)
        assert (await first).requests == {"drained": 4}
        node.read()
        assert node.where() == {"tp2@0-1": ["late"]}
        with pytest.raises(SwitchRefusedError, match=r"have not ended: after 0\.2 s"):
            await node.switch(ONES, "drain")
        assert node.where() == {"tp2@0-1": ["late"]}

    run(story)


def test_requests_that_cannot_be_moved_end_first() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        [engine] = [name for name, rids in node.where().items() if "b" in rids]
        node.fakes[engine].staying = {"b": "has a session"}
        first = asyncio.create_task(node.switch(TWO))
        await node.until(lambda: node.router.places._waiters)
        node.fakes[engine].staying = {}
        node.finish("b")
        assert (await first).requests == {"drained": 1, "migrated": 3}

    run(story)


def test_what_comes_in_the_middle_waits_for_the_new_layout() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.during[("tp2@0-1", "AdoptCall")] = lambda: node.request("e", "f")
        await node.switch(TWO)
        node.read()
        assert node.where() == {"tp2@0-1": [*RIDS, "e", "f"]}

    run(story)


@pytest.mark.parametrize("at", [("tp1@0", "ExportCall"), ("tp2@0-1", "AdoptCall"), ("tp1@1", "ReleaseCall")])
def test_an_abort_in_the_middle_ends_the_request(at: tuple[str, str]) -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.during[at] = lambda: node.world.send(io_struct.AbortReq(rid="a"))
        await node.switch(TWO)
        await node.settle()
        assert node.ended() == {"a": 1}
        assert node.where() == {"tp2@0-1": ["b", "c", "d"]}

    run(story)


@pytest.mark.parametrize("back", [False, True])
def test_an_abort_that_reaches_an_engine_right_after_its_export(back: bool) -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        [engine] = [name for name, rids in node.where().items() if "a" in rids]
        node.turns[(engine, "ExportCall")] = 4

        async def late() -> None:
            while node.fakes[engine].held is None:
                await asyncio.sleep(0)
            # The router still has it at the engine, which holds it.
            assert "a" in node.router.engines[engine].in_flight
            node.world.send(io_struct.AbortReq(rid="a"))
            node.read()
            assert node.fakes[engine].given_up == {"a"}

        task = asyncio.create_task(late())
        if back:
            node.faults[("tp2@0-1", "AdoptCall")] = "refuse"
            with pytest.raises(SwitchRefusedError):
                await node.switch(TWO)
            # As stock does with a request that it runs again and that is to be aborted.
            del node.fakes[engine].running["a"]
            node.world.reply(engine, io_struct.AbortReq(rid="a"))
        else:
            await node.switch(TWO)
        await task
        await node.settle()
        assert node.ended() == {"a": 1}

    run(story)


def test_an_output_that_comes_before_the_switch_has_read_the_answer() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.turns[("tp2@0-1", "AdoptCall")] = 4

        async def quick() -> None:
            while "a" not in node.fakes["tp2@0-1"].running:
                await asyncio.sleep(0)
            assert "a" in node.router.moving.in_flight
            node.finish("a")

        task = asyncio.create_task(quick())
        await node.switch(TWO)
        await task
        assert node.ended() == {"a": 1}
        assert node.router.in_flight == 3

    run(story)


LEAVE = ("UnexportableCall", "ExportCall", "ReleaseCall")
PLACES = [
    *(
        (engine, call, TWO)
        for engine in ("tp1@0", "tp1@1")
        for call in ("UnexportableCall", "ExportCall", "ReleaseCall")
    ),
    ("tp2@0-1", "kv_map", TWO),
    ("tp2@0-1", "AdoptCall", TWO),
    *((engine, "AdoptCall", ONES) for engine in ("tp1@0", "tp1@1")),
    *(("tp2@0-1", call, ONES) for call in ("ExportCall", "ReleaseCall")),
]


@pytest.mark.parametrize("strategy", ["migrate", "recompute", "keep"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("engine", "call", "layout"), PLACES)
def test_no_fault_in_any_phase_loses_a_request_or_a_block(
    engine: str, call: str, layout: str, fault: str, strategy: str
) -> None:
    async def story(node: Node) -> None:
        if layout == ONES:
            await node.switch(TWO)
        node.request(*RIDS)
        node.faults[(engine, call)] = fault
        with contextlib.suppress(SwitchRefusedError, ZeroDivisionError):
            await node.switch(layout, strategy)
        await node.settle()
        node.check()
        assert strategy == "keep" or node.ended() == {}, "a request ended that only moved"
        # Layouts can be switched as before.
        await node.switch(TWO if str(node.router.layout) == ONES else ONES)

    run(story)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_restore_that_fails(fault: str) -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.faults[("tp2@0-1", "AdoptCall")] = "refuse"
        node.faults[("tp1@0", "RestoreCall")] = fault
        with pytest.raises((SwitchRefusedError, ZeroDivisionError)):
            await node.switch(TWO)

    run(story)


@pytest.mark.parametrize("turns", [1, 3, 6])
@pytest.mark.parametrize("dead", ["tp1@0", "tp1@1"])
def test_a_source_that_dies_around_its_answer_is_not_moved_twice(dead: str, turns: int) -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.during[("tp1@1", "ExportCall")] = lambda: node.die(dead)
        node.turns[("tp1@1", "ExportCall")] = turns
        # Its blocks come back when its processes are gone; until then there may be no room.
        with contextlib.suppress(SwitchRefusedError):
            await node.switch(TWO)
        await node.settle()
        assert sorted(rid for rids in node.where().values() for rid in rids) == [*RIDS]
        assert node.router.engines[dead].state is EngineState.READY

    run(story)


def test_an_engine_that_enters_and_dies_while_the_others_tell_their_requests() -> None:
    async def story(node: Node) -> None:
        node.request(*RIDS)
        node.during[("tp1@0", "SnapshotCall")] = lambda: node.die("tp2@0-1")
        node.turns[("tp1@0", "SnapshotCall")] = 20_000
        with pytest.raises(SwitchRefusedError, match="tp2@0-1 has died"):
            await node.switch(TWO)
        await node.settle()
        node.check()
        assert {name: len(rids) for name, rids in node.where().items()} == {"tp1@0": 2, "tp1@1": 2}

    run(story)


def test_an_engine_gets_few_blocks_with_its_requests_and_all_others_right_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leases: list[int] = []

    async def story(node: Node) -> None:
        node.request(*RIDS)
        before, _ = node.pools.counts(SPECS["tp1@0"])
        node.during["tp2@0-1", "kv_grow"] = lambda: leases.append(len(node.fakes["tp2@0-1"].lease[0]))
        await node.switch(TWO)
        # Four requests of 41 tokens, a page for the next token of each, and what every engine keeps.
        assert leases == [4 * 2 + 4 + SETTINGS.standby_blocks]
        leased, free = node.pools.counts(SPECS["tp2@0-1"])
        assert (leased, free) == (before, 0)

    monkeypatch.setattr(entering, "LENT_TOKENS", 0)
    monkeypatch.setattr(entering, "LEAVE_TOKENS", 32)
    run(story)


def test_requests_have_room_to_run_on_for_as_long_as_their_kv_is_copied() -> None:
    async def left(path: CopyPath) -> int:
        """Blocks that an engine keeps for each request while their KV is copied ahead."""
        node = Node(kv_copy=path)
        fake, seen = node.fakes["tp1@0"], []
        whole = fake.answer

        def answer(call: HandoffCall) -> list[object]:
            seen.extend([call.leave] if isinstance(call, SnapshotCall) else [])
            return list(whole(call))

        fake.answer = answer  # type: ignore[method-assign,assignment]
        node.request("a", "b", "c", "d")
        count = len(fake.running)
        await node.switch(TWO)
        [leave] = seen
        return leave // count

    page = SETTINGS.geometry.tokens_per_block(1)
    direct, staged = asyncio.run(left(CopyPath.PEER)), asyncio.run(left(CopyPath.STAGED))
    assert staged - direct == (512 - 256) // page
