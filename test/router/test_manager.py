"""The loop that lets the layout follow the traffic: real planner, router and switch, engines that answer as told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from sglang.srt.managers import io_struct
from switch_fakes import ONES, TWO, Node

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import Layout, parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Terms
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.pilot import REST_WINDOWS
from sglang_adapt.policy.planner import CALM, Plan
from sglang_adapt.policy.price import Price
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.manager import Manager, OrderRefusedError, Planning
from sglang_adapt.router.switch import Outcome, Switch, SwitchRefusedError
from sglang_adapt.router.traffic import Traffic

LOOSE, STRICT = Terms("loose", 1.0, 3000.0, 60.0), Terms("strict", 4.0, 500.0, 7.0)


class Line:
    """A step takes so long, and so much more for each request."""

    def __init__(self, step_ms: float, request_ms: float) -> None:
        self._step_ms, self._request_ms = step_ms, request_ms

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return 2.0 + 0.02 * tokens if tokens > 0 else 0.0

    def decode_ms(self, batch: float, context: float) -> float:
        return self._step_ms + self._request_ms * batch if batch > 0 else 0.0


SPEEDS = (
    Speed(1, Line(8.0, 0.2), Bounds(16, 2048, 64), 40_000, 1000),
    Speed(2, Line(5.0, 0.2), Bounds(32, 2048, 64), 80_000, 1000),
)


class Story:
    """A node with a manager; a window is a second long, whenever it is closed."""

    def __init__(
        self, policy: AdaptPolicy = AdaptPolicy.AUTO, terms: tuple[Terms, ...] = (Terms("all"),), layout: str = ONES
    ) -> None:
        self.node = Node()
        self.now_s = 0.0
        self.terms = terms
        self.speeds = SPEEDS
        self.plans: list[Plan] = []
        # Ids begin with the tier.
        self.traffic = Traffic(lambda rid: rid.split("-")[0], lambda: self.now_s)
        planning = Planning(
            gpus=2,
            terms=lambda: self.terms,
            speeds=lambda: self.speeds,
            token_bytes=1024,
            price=Price(1.0, 1e12),
            planned=lambda plan, seconds: self.plans.append(plan),
        )
        auto = policy is AdaptPolicy.AUTO
        if auto:
            self.node.router._traffic = self.traffic
        self.manager = Manager(
            policy, self.node.modes, self.node.router, 1.0, planning if auto else None, self.traffic if auto else None
        )
        ended = self.node.modes._ended

        def both(switch: object, outcome: Outcome) -> None:
            ended(switch, outcome)  # type: ignore[arg-type]
            self.manager.switched(switch, outcome)  # type: ignore[arg-type]

        self.node.modes._ended = both
        self._count = 0

    @property
    def layout(self) -> str:
        return str(self.node.router.layout)

    def arrive(self, requests: int, tier: str = "all", *, end: bool = True, tokens: int = 16) -> None:
        rids = [f"{tier}-{self._count + at}" for at in range(requests)]
        self._count += requests
        self.node.request(*rids, tokens=tokens)
        if end:
            self.node.finish(*rids)

    async def window(self, requests: int = 0, tier: str = "all", **more: object) -> Plan | None:
        self.arrive(requests, tier, **more)  # type: ignore[arg-type]
        self.now_s += 1.0
        decided = await self.manager.step()
        await self.node.settle()
        self.node.check()
        return decided


def run(tell: Callable[[Story], Awaitable[None]], **made: object) -> None:
    async def all_of_it() -> None:
        story = Story(**made)  # type: ignore[arg-type]
        await tell(story)
        story.node.finish()
        await story.node.settle()
        assert set(story.node.ended()) == story.node.sent
        assert set(story.node.ended().values()) <= {1}

    asyncio.run(all_of_it())


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


def test_a_long_request_gets_an_engine_that_holds_it() -> None:
    async def tell(story: Story) -> None:
        story.speeds = (replace(SPEEDS[0], request_tokens=100), replace(SPEEDS[1], request_tokens=1000))
        story.arrive(1, end=False, tokens=150)
        await story.window(1)
        assert (story.layout, story.manager.said()["trigger"]) == (TWO, "long_context")

    run(tell)


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
        story.manager.release()
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
            story.manager.release()
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
        for _ in range(30):
            story.manager.switched(made, Outcome.SWITCHED)
        assert (await story.manager.what_if({"all": 1.0}))["price"]["pause_ms"] > 300.0
        # Only the last ones are told, and none that was no switch.
        assert [one["outcome"] for one in story.manager.said()["switches"]] == ["switched"] * 10

    run(tell)


def layouts(*texts: str) -> list[Layout]:
    return [parse_layout(text, (1, 2), 2) for text in texts]


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
