"""A node whose layout a manager changes: the real planner, router and switch, and engines that answer as told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from switch_fakes import Node

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.policy.demand import Terms
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import Price
from sglang_adapt.policy.situation import Plan
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.manager import Manager, Planning
from sglang_adapt.router.switch import Outcome
from sglang_adapt.router.traffic import Traffic


class Line:
    """A step takes so long, and so much more for each request."""

    def __init__(self, step_ms: float, request_ms: float) -> None:
        self._step_ms, self._request_ms = step_ms, request_ms

    latency_ms = 0.0

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return 2.0 + 0.02 * tokens if tokens > 0 else 0.0

    def decode_ms(self, batch: float, context: float) -> float:
        return self._step_ms + self._request_ms * batch if batch > 0 else 0.0


SPEEDS = (
    Speed(1, Line(8.0, 0.2), Bounds(16, 2048, 64), 40_000, 1000),
    Speed(2, Line(5.0, 0.2), Bounds(32, 2048, 64), 80_000, 1000),
)


class Story:
    """A node with a manager; a window is a second long, whenever it is closed.

    Args:
        policy, terms: of the deployment.
        limits: tokens of the longest request at TP 1 and TP 2.
    """

    def __init__(
        self,
        policy: AdaptPolicy = AdaptPolicy.AUTO,
        terms: tuple[Terms, ...] = (Terms("all"),),
        limits: tuple[int, int] = (1000, 1000),
    ) -> None:
        by_name = {"tp1@0": limits[0], "tp1@1": limits[0], "tp2@0-1": limits[1]}
        self.node = Node(lengths=Lengths(by_name, policy))
        self.now_s = 0.0
        self.terms = terms
        self.speeds = tuple(replace(speed, request_tokens=tokens) for speed, tokens in zip(SPEEDS, limits, strict=True))
        self.plans: list[Plan] = []
        self.assigned: dict[str, frozenset[str]] = {}
        # Ids begin with the tier.
        self.traffic = Traffic(lambda rid: rid.split("-")[0], lambda: self.now_s)
        planning = Planning(
            gpus=2,
            terms=lambda: self.terms,
            speeds=lambda: self.speeds,
            token_bytes=1024,
            price=Price(1.0, 1e12),
            planned=lambda plan, seconds: self.plans.append(plan),
            assign=self._assign,
        )
        auto = policy is AdaptPolicy.AUTO
        if auto:
            self.node.router._traffic = self.traffic
            self.node.world.on_long = lambda: self.manager.hurry()
        self.manager = Manager(
            policy, self.node.modes, self.node.router, 1.0, planning if auto else None, self.traffic if auto else None
        )
        self.node.world.wake = self._wake
        ended = self.node.modes._ended

        def both(switch: object, outcome: Outcome) -> None:
            ended(switch, outcome)  # type: ignore[arg-type]
            self.manager.switched(switch, outcome)  # type: ignore[arg-type]

        self.node.modes._ended = both
        self._count = 0

    def _assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        self.assigned = dict(tiers_of)

    def _wake(self) -> None:
        self.node.repair.wake()
        self.manager.reassign()

    @property
    def layout(self) -> str:
        return str(self.node.router.layout)

    def arrive(self, requests: int, tier: str = "all", *, end: bool = True, tokens: int = 16) -> None:
        rids = [f"{tier}-{self._count + at}" for at in range(requests)]
        self._count += requests
        self.node.request(*rids, tokens=tokens)
        if end and rids:
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
