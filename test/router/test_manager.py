"""The loop that lets the layout follow the traffic: real planner, router and switch, engines that answer as told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from manager_story import Story, run
from sglang.srt.managers import io_struct
from switch_fakes import ONES, SPLIT, TWO

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import Layout, parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Terms
from sglang_adapt.policy.pilot import REST_WINDOWS, WINDOWS
from sglang_adapt.policy.situation import CALM
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.manager import PAUSED_WINDOWS, OrderRefusedError
from sglang_adapt.router.switch import Outcome, Switch, SwitchRefusedError

LOOSE, STRICT = Terms("loose", 1.0, 3000.0, 60.0), Terms("strict", 4.0, 500.0, 7.0)


def test_the_layout_follows_low_load_and_bursts() -> None:
    async def tell(story: Story) -> None:
        seen = []
        for requests in (*[1] * (CALM + 1), *[1200] * 2, *[1] * 8, *[1200] * 2):
            await story.window(requests)
            seen.append(story.layout)
        assert seen[CALM - 1] == seen[CALM] == TWO
        # A burst counts in its first window.
        assert seen[CALM + 1] == ONES
        assert seen[-3] == TWO
        assert seen[-1] == ONES
        said = story.manager.said()
        assert (said["control"], said["trigger"]) == ("planner", "load")
        assert "carries" in said["reason"]
        assert [switch["to"] for switch in said["switches"]] == [TWO, ONES, TWO, ONES]
        assert {switch["outcome"] for switch in said["switches"]} == {"switched"}
        assert said["switches"][0]["reason"].startswith("load: ")

    run(tell)


def test_requests_that_run_move_with_the_layout() -> None:
    async def tell(story: Story) -> None:
        story.arrive(4, end=False, tokens=40)
        for _ in range(CALM):
            await story.window(1)
        assert {name: len(rids) for name, rids in story.node.where().items()} == {TWO: 4}
        assert story.plans[0].bill.requests == 4
        # 4 prompts of about 40 tokens.
        assert story.plans[0].bill.kv_bytes == pytest.approx(160 * 1024, rel=0.2)

    run(tell)


def test_a_tight_tier_gets_a_wide_engine_at_once() -> None:
    async def tell(story: Story) -> None:
        await story.window(20, "loose")
        assert story.layout == ONES
        await story.window(1, "strict")
        said = story.manager.said()
        assert (story.layout, said["trigger"]) == (TWO, "priority")
        assert said["switches"][-1]["reason"].startswith("priority: tier strict")
        assert {row["tier"] for row in said["planner"]["estimates"]} == {"loose", "strict"}

    run(tell, terms=(LOOSE, STRICT))


def test_others_are_paused_in_place_for_a_tight_tier_and_go_on_after_it() -> None:
    async def tell(story: Story) -> None:
        story.arrive(4, "loose", end=False, tokens=40)
        await story.window(1, "strict")
        switch = story.manager.said()["switches"][-1]
        assert (story.layout, switch["strategy"], switch["requests"]) == (TWO, "keep", {"kept": 4})
        assert switch["reason"].startswith("priority: tier strict")
        assert story.node.where() == {}
        # The rate of the tight tier is known for as many windows as count.
        for _ in range(WINDOWS):
            await story.window(1, "loose")
        assert (story.layout, story.node.where()) == (TWO, {})
        await story.window(1200, "loose")
        assert story.layout == ONES
        switch = story.manager.said()["switches"][-1]
        assert switch["requests"] == {"resumed": 4}
        assert sum(map(len, story.node.where().values())) == 4

    run(tell, terms=(LOOSE, STRICT))


def test_what_is_paused_is_not_paused_for_ever() -> None:
    async def tell(story: Story) -> None:
        story.arrive(4, "loose", end=False, tokens=40)
        for _ in range(PAUSED_WINDOWS + 1):
            await story.window(1, "strict")
            assert (story.layout, story.node.where()) == (TWO, {})
        await story.window(1, "strict")
        await story.node.settle()
        assert {name: len(rids) for name, rids in story.node.where().items()} == {TWO: 4}

    run(tell, terms=(LOOSE, STRICT))


def test_what_is_paused_gives_its_blocks_to_a_long_request() -> None:
    async def tell(story: Story) -> None:
        story.arrive(4, "loose", end=False, tokens=40)
        await story.window(1, "strict")
        assert story.node.where() == {}
        # Two blocks or three of each engine are kept: this one fits beside them.
        story.node.request("strict-long", tokens=1200)
        await story.window(0)
        assert story.node.where() == {TWO: ["strict-long"]}
        story.node.request("strict-longest", tokens=3000)
        await story.node.settle()
        assert len(story.node.where()[TWO]) == 6

    run(tell, terms=(LOOSE, STRICT), limits=(1000, 3136))


def test_requests_of_the_tight_tier_itself_are_moved_and_not_paused() -> None:
    async def tell(story: Story) -> None:
        story.arrive(2, "loose", end=False, tokens=40)
        story.arrive(1, "strict", end=False, tokens=40)
        await story.window(0)
        assert story.manager.said()["switches"][-1]["requests"] == {"migrated": 3}

    run(tell, terms=(LOOSE, STRICT))


def test_tiers_are_promised_on_the_engines_that_are_there_for_them() -> None:
    async def tell(story: Story) -> None:
        await story.window(200, "loose")
        both = frozenset({"loose", "strict"})
        # Nobody has asked for the strict tier, which is promised wherever it can be.
        assert story.assigned == {"tp1@0": both, "tp1@1": both}
        await story.window(1, "strict")
        assert (story.layout, story.assigned) == (TWO, {TWO: both})
        # Another layout than the one that was planned.
        await story.manager.order(parse_layout(ONES, (1, 2), 2), Strategy.AUTO, "mine")
        assert story.assigned == {}

    run(tell, terms=(LOOSE, STRICT))


def test_tiers_of_engines_that_are_down_are_promised_on_the_others() -> None:
    even = (replace(LOOSE, ttft_ms=2000.0), replace(STRICT, weight=1.0, ttft_ms=2000.0, tpot_ms=60.0))

    async def tell(story: Story) -> None:
        story.arrive(400, "loose")
        await story.window(400, "strict")
        assert story.layout == ONES
        # Both meet their targets on either engine.
        both = ["loose", "strict"]
        assert story.manager.said()["planner"]["tiers"] == {"tp1@0": both, "tp1@1": both}
        assert story.assigned == {"tp1@0": frozenset(both), "tp1@1": frozenset(both)}
        # As if they did so on one each.
        decided = story.manager._plan
        assert decided is not None
        story.manager._plan = replace(decided, serving={"tp1@0": ("loose",), "tp1@1": ("strict",)})
        story.manager.reassign()
        alone = {"tp1@0": frozenset({"loose"}), "tp1@1": frozenset({"strict"})}
        assert story.assigned == alone
        story.node.die("tp1@0")
        assert story.assigned == {"tp1@0": frozenset({"loose"}), "tp1@1": frozenset({"loose", "strict"})}
        await story.node.settle()
        assert story.assigned == alone

    run(tell, terms=even)


def test_an_operators_order_holds_until_control_is_given_back() -> None:
    async def tell(story: Story) -> None:
        await story.manager.order(parse_layout(ONES, (1, 2), 2), Strategy.AUTO, "maintenance")
        said = story.manager.said()
        assert (said["control"], said["trigger"], said["reason"]) == ("operator", "operator", "maintenance")
        for _ in range(2 * CALM):
            decided = await story.window(1)
        assert story.layout == ONES
        # It is still told what would be better.
        assert decided is not None
        assert str(decided.wanted) == TWO
        story.manager.release("test")
        await story.window(1)
        assert (story.layout, story.manager.said()["control"]) == (TWO, "planner")

    run(tell)


def test_an_order_that_is_refused_leaves_control_where_it_was() -> None:
    async def tell(story: Story) -> None:
        story.node.faults["tp2@0-1", "AdoptCall"] = "refuse"
        story.arrive(1, end=False)
        with pytest.raises(SwitchRefusedError):
            await story.manager.order(parse_layout(TWO, (1, 2), 2), Strategy.AUTO, "try")
        assert story.manager.said()["control"] == "planner"

    run(tell)


def test_who_may_decide_by_each_policy() -> None:
    async def manual(story: Story) -> None:
        await story.manager.run()
        await story.manager.order(parse_layout(TWO, (1, 2), 2), Strategy.AUTO, "by hand")
        assert story.layout == TWO
        with pytest.raises(OrderRefusedError, match="--adapt-policy auto"):
            story.manager.release("test")
        with pytest.raises(OrderRefusedError, match="--adapt-policy auto"):
            await story.manager.what_if({})
        assert story.manager.said()["planner"] is None

    async def static(story: Story) -> None:
        with pytest.raises(OrderRefusedError, match="static"):
            await story.manager.order(parse_layout(TWO, (1, 2), 2), Strategy.AUTO, "by hand")
        assert (story.layout, story.manager.said()["policy"]) == (ONES, "static")

    run(manual, policy=AdaptPolicy.MANUAL)
    run(static, policy=AdaptPolicy.STATIC)


def test_a_switch_that_is_refused_is_not_asked_for_each_window() -> None:
    async def tell(story: Story) -> None:
        for number in range(CALM + REST_WINDOWS + 1):
            story.node.faults["tp2@0-1", "AdoptCall"] = "refuse"
            if number == 0:
                story.arrive(1, end=False)
            await story.window(1)
        assert story.node.outcomes == [f"{TWO}: refused"] * 2
        assert story.layout == ONES

    run(tell)


def test_an_engine_that_is_down_is_waited_for() -> None:
    async def tell(story: Story) -> None:
        story.node.router.engines[TWO].state = EngineState.STARTING
        for _ in range(CALM + 1):
            await story.window(1)
        assert (story.layout, story.node.outcomes) == (ONES, [])
        story.node.router.engines[TWO].state = EngineState.READY
        for _ in range(REST_WINDOWS):
            await story.window(1)
        assert story.layout == TWO

    run(tell)


def test_the_price_is_learned_from_the_switches_that_were_made() -> None:
    async def tell(story: Story) -> None:
        before = layouts(ONES, TWO)
        made = Switch(*before, Strategy.AUTO, "test")
        made.phases_ms["export"] = 500.0
        for _ in range(20):
            story.manager.switched(made, Outcome.REFUSED)
            story.manager.switched(Switch(before[0], before[0], Strategy.AUTO, "none"), Outcome.SWITCHED)
        assert (await story.manager.what_if({"all": 1.0}))["price"]["pause_ms"] == 1.0
        story.manager.switched(Switch(*layouts(ONES, SPLIT), Strategy.AUTO, "roles"), Outcome.SWITCHED)
        assert (await story.manager.what_if({"all": 1.0}))["price"]["pause_ms"] == 1.0
        for _ in range(30):
            story.manager.switched(made, Outcome.SWITCHED)
        assert (await story.manager.what_if({"all": 1.0}))["price"]["pause_ms"] > 300.0
        # Only the last ones are told, and none that was no switch.
        assert [one["outcome"] for one in story.manager.said()["switches"]] == ["switched"] * 10

    run(tell)


def test_a_change_of_roles_is_among_the_last_switches() -> None:
    async def tell(story: Story) -> None:
        epoch = story.node.pools.epoch
        for layout in (SPLIT, SPLIT, ONES):
            await story.manager.order(parse_layout(layout, (1, 2), 2), Strategy.AUTO, "by hand")
        said = [(one["to"], one["epoch"], one["outcome"]) for one in story.manager.said()["switches"]]
        # An order of what serves already is none.
        assert said == [(SPLIT, epoch + 1, "switched"), (ONES, epoch + 2, "switched")]

    run(tell)


def test_nothing_is_switched_before_anybody_has_asked() -> None:
    async def tell(story: Story) -> None:
        for _ in range(2 * CALM):
            decided = await story.window(0)
            assert decided is not None
            assert (decided.move, decided.wanted, decided.trigger) == (False, story.node.router.layout, None)
            assert decided.reason == "no requests yet: the layout stays as it is"
        # It is told all the same what would be better at some load, and at none.
        assert (await story.manager.what_if({"strict": 1.0}))["wanted"] == TWO
        idle = await story.manager.what_if({})
        assert idle["reason"] == (
            "tier strict (500 / 7 ms) has no requests now, and the next one 2 x TP 1 cannot serve within its targets"
        )
        # From the first request on the layout is made ready for the next one, of any tier.
        await story.window(1, "loose")
        for _ in range(CALM):
            await story.window(0)
        assert story.layout == TWO

    run(tell, terms=(LOOSE, STRICT))


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [
        (EngineState.STARTING, "INFO", "tp2@0-1 is starting;"),
        (EngineState.FAILED, "WARNING", "tp2@0-1 is not up (failed);"),
    ],
)
def test_an_engine_that_starts_is_not_called_down(
    state: EngineState, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell(story: Story) -> None:
        story.node.router.engines[TWO].state = state
        with caplog.at_level("INFO"):
            for _ in range(CALM):
                await story.window(1)
        said = [one for one in caplog.records if "would be better" in one.message]
        assert [one.levelname for one in said] == [level]
        assert words in said[0].message
        story.node.router.engines[TWO].state = EngineState.READY

    run(tell)


def layouts(*texts: str) -> list[Layout]:
    return [parse_layout(text, (1, 2), 2) for text in texts]


def test_the_reason_is_that_of_the_layout_from_when_it_serves_on() -> None:
    """Not the last one's, while the engines that have left still give their blocks back."""

    async def tell(story: Story) -> None:
        node, told = story.node, []
        story.arrive(2, end=False)
        # What engines that leave are asked last.
        node.during["tp1@0", "ReleaseCall"] = lambda: told.append((str(node.router.layout), story.manager.said()))
        await story.manager.order(parse_layout(TWO, (1, 2), 2), Strategy.AUTO, "by hand")
        ((layout, said),) = told
        assert (layout, said["trigger"], said["reason"]) == (TWO, "operator", "by hand")
        assert story.manager.said()["reason"] == "by hand"

    run(tell)


def test_what_if_changes_nothing() -> None:
    async def tell(story: Story) -> None:
        await story.window(1)
        said = await story.manager.what_if({"all": 900.0})
        assert (said["wanted"], said["move"]) == (ONES, False)
        said = await story.manager.what_if({"all": 1.0})
        assert (said["wanted"], said["trigger"]) == (TWO, "load")
        assert [row["tp"] for row in said["estimates"]] == [1, 2]
        assert said["demand"][0]["rate_rps"] == 1.0
        assert (story.layout, len(story.plans)) == (ONES, 1)
        # Without rates, what is asked for now.
        story.arrive(3, end=False)
        said = await story.manager.what_if(None)
        (row,) = said["demand"]
        assert (row["rate_rps"], row["unfinished"]) == (story.plans[0].rows[0].demand.rate_rps, 3)
        assert f"for 2 of {CALM} windows" in said["reason"]
        assert (story.layout, len(story.plans)) == (ONES, 1)
        with pytest.raises(KeyError, match="there is no tier gold; there are all"):
            await story.manager.what_if({"gold": 1.0})

    run(tell)


def test_the_event_loop_goes_on_while_a_plan_is_made() -> None:
    async def tell(story: Story) -> None:
        story.arrive(1, end=False)
        story.now_s += 1.0
        step = asyncio.ensure_future(story.manager.step())
        await asyncio.sleep(0)
        assert not step.done()
        # A request that ends in the meantime is no fault.
        story.node.finish()
        await step
        assert len(story.plans) == 1

    run(tell)


def test_aborted_requests_are_forgotten_and_teach_no_length() -> None:
    async def tell(story: Story) -> None:
        story.arrive(3, end=False)
        story.node.world.send(io_struct.AbortReq(rid="", abort_all=True))
        story.node.read()
        decided = await story.window(0)
        assert decided is not None
        demand = decided.rows[0].demand
        assert (demand.unfinished.requests, demand.rate_rps, demand.output_tokens) == (0, 3.0, 128.0)
        assert story.traffic._tiers == {}

    run(tell)
