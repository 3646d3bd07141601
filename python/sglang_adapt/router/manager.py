"""Who decides on the layout, and the loop that lets it follow the traffic.

Every interval the manager closes a window of `traffic.Traffic`, lets `policy.planner` decide in a thread, and has
`modes.Modes` make the switch. An operator's order holds until control is given back. Flying Serving, 2.3;
Nitsum, 3.3.1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Demand, Terms, Unfinished, demands
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.planner import History, Plan, Situation, Trigger, plan
from sglang_adapt.policy.price import Price, Running
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.explain import explain
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Outcome, Switch, SwitchRefusedError
from sglang_adapt.router.traffic import WINDOWS, Traffic

logger = logging.getLogger(__name__)

REST_WINDOWS = 5
"""After a switch that was refused the planner waits so many windows."""
_LAST_SWITCHES = 10


class OrderRefusedError(RuntimeError):
    """Control of the layout is not as the operator would have it; the text says why and what to do."""


@dataclass(frozen=True)
class Planning:
    """What planning needs beside the traffic.

    Attributes:
        gpus: of the deployment.
        terms: the tiers now; one without targets where there are none.
        speeds: of the engines now, by TP size, ascending.
        token_bytes: of the KV of one token, over all ranks.
        price: of a switch, before any has been made.
        planned: told each plan and the seconds that it took.
    """

    gpus: int
    terms: Callable[[], tuple[Terms, ...]]
    speeds: Callable[[], tuple[Speed, ...]]
    token_bytes: int
    price: Price
    planned: Callable[[Plan, float], None] = lambda plan, seconds: None


class Manager:
    """See the module.

    Args:
        policy: who decides when the server starts.
        modes: makes the switches.
        router: where requests are.
        interval_s: of a window.
        planning: None unless the policy is `auto`.
        traffic: likewise.
    """

    def __init__(
        self,
        policy: AdaptPolicy,
        modes: Modes,
        router: Router,
        interval_s: float = 1.0,
        planning: Planning | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        if policy is AdaptPolicy.AUTO and (planning is None or traffic is None):
            raise ValueError("the policy auto needs planning and traffic")
        self._policy = policy
        self._modes = modes
        self._router = router
        self._interval_s = interval_s
        self._planning = planning
        self._traffic = traffic
        self._by_planner = policy is AdaptPolicy.AUTO
        self._history = History()
        self._demands: dict[str, Demand] = {}
        self._price = None if planning is None else planning.price
        self._rest = 0
        self._plan: Plan | None = None
        self._trigger: Trigger | None = None
        self._reason = "as the server was started"
        self._switches: deque[dict[str, Any]] = deque(maxlen=_LAST_SWITCHES)

    async def run(self) -> None:
        """Plan every interval, for ever; returns at once if nobody plans."""
        if self._planning is None:
            return
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.step()
            except Exception:
                # A fault in this program must not end the control for good; the layout stays as it is.
                logger.exception("planning broke off; the layout stays for %d windows", REST_WINDOWS)
                self._rest = REST_WINDOWS

    async def step(self) -> Plan | None:
        """One window: plan, and switch if it says so. Returns the plan; None if there was none to make."""
        assert self._planning is not None and self._traffic is not None
        self._traffic.close()
        now = self._situation()
        if self._modes.switching or not self._router.accepting:
            return None
        began = time.perf_counter()
        decided = await asyncio.to_thread(plan, now)
        self._planning.planned(decided, time.perf_counter() - began)
        self._plan, self._history = decided, decided.history
        if self._rest:
            self._rest -= 1
        elif self._by_planner and decided.move and not self._modes.switching:
            await self._follow(decided)
        return decided

    async def _follow(self, decided: Plan) -> None:
        assert decided.trigger is not None
        states = self._router.engines
        down = [engine.name for engine in decided.layout.engines if states[engine.name].state is not EngineState.READY]
        if down:
            logger.warning("layout %s would be better (%s), but %s is down", decided.layout, decided.reason, down[0])
            self._rest = REST_WINDOWS
            return
        reason = f"{decided.trigger}: {decided.reason}"
        try:
            await self._modes.switch(decided.layout, Strategy.AUTO, reason, decided.trigger)
        except SwitchRefusedError as error:
            logger.warning("%s; asked again in %d windows at the earliest", error, REST_WINDOWS)
            self._rest = REST_WINDOWS
            return
        self._trigger, self._reason = decided.trigger, decided.reason

    # What the operator orders.

    async def order(self, layout: Layout, strategy: Strategy, reason: str) -> Switch:
        """Go over to a layout and stay there until `release`.

        Raises:
            OrderRefusedError: the policy is `static`.
            SwitchRefusedError: nothing has changed.
        """
        if self._policy is AdaptPolicy.STATIC:
            raise OrderRefusedError(
                "the layout of this server is static; start it with --adapt-policy manual or auto to change it"
            )
        before, self._by_planner = self._by_planner, False
        try:
            switch = await self._modes.switch(layout, strategy, reason)
        except BaseException:
            self._by_planner = before
            raise
        self._trigger, self._reason = Trigger.OPERATOR, reason
        return switch

    def release(self) -> None:
        """Give control back to the planner. Raises OrderRefusedError if there is none."""
        if self._planning is None:
            raise OrderRefusedError(
                f"this server has no planner (--adapt-policy {self._policy}); start it with --adapt-policy auto"
            )
        if not self._by_planner:
            logger.info("layout %s: the planner decides again", self._router.layout)
        self._by_planner = True

    def switched(self, switch: Switch, outcome: Outcome) -> None:
        """A switch that was asked for has ended."""
        if not switch.leaving:
            return
        self._switches.append({"outcome": outcome.value, "at": round(time.time(), 3), **switch.report()})
        if self._price is not None and outcome in (Outcome.SWITCHED, Outcome.IMPAIRED):
            self._price = self._price.learned(switch.pause_ms, switch.kv_bytes)

    # What is told.

    def said(self) -> dict[str, Any]:
        """For `GET /adapt/layout`: who decides, why this layout, the last switches, the planner's last table."""
        return {
            "policy": self._policy.value,
            "control": "planner" if self._by_planner else "operator",
            "trigger": None if self._trigger is None else self._trigger.value,
            "reason": self._reason,
            "switches": list(self._switches),
            "planner": None if self._plan is None else explain(self._plan),
        }

    async def what_if(self, rates: Mapping[str, float]) -> dict[str, Any]:
        """What the planner would do at these rates, in requests/s by tier, with nothing unfinished. Nothing changes.

        Raises:
            OrderRefusedError: there is no planner.
            KeyError: there is no such tier.
        """
        if self._planning is None:
            raise OrderRefusedError(
                f"this server has no planner (--adapt-policy {self._policy}); start it with --adapt-policy auto"
            )
        now = self._situation()
        known = {demand.terms.tier for demand in now.demands}
        unknown = sorted(set(rates) - known)
        if unknown:
            raise KeyError(f"there is no tier {unknown[0] or 'without a name'}; there are {', '.join(sorted(known))}")
        asked = tuple(
            replace(demand, rate_rps=rates.get(demand.terms.tier, 0.0), unfinished=Unfinished())
            for demand in now.demands
        )
        decided = await asyncio.to_thread(plan, replace(now, demands=asked, longest_tokens=0, history=History()))
        return explain(decided)

    def _situation(self) -> Situation:
        assert self._planning is not None and self._traffic is not None and self._price is not None
        planning, router = self._planning, self._router
        asked = demands(
            planning.terms(),
            tuple(self._traffic.windows),
            self._traffic.unfinished(router.unfinished()),
            self._demands,
        )
        self._demands = {demand.terms.tier: demand for demand in asked}
        running = {name: self._running(name) for name in (engine.name for engine in router.layout.engines)}
        longest = max((tokens for engine in router.engines.values() for tokens in engine.in_flight.values()), default=0)
        return Situation(
            demands=asked,
            speeds=planning.speeds(),
            gpus=planning.gpus,
            layout=router.layout,
            running=running,
            price=self._price,
            longest_tokens=longest,
            horizon_s=WINDOWS * self._interval_s,
            history=self._history,
        )

    def _running(self, name: str) -> Running:
        assert self._planning is not None
        journal, in_flight = self._router.journal, self._router.engines[name].in_flight
        tokens = sum(in_flight.values()) + sum(len(journal[rid].ids) for rid in _known(in_flight, journal))
        return Running(len(in_flight), float(tokens * self._planning.token_bytes))


def _known(rids: Mapping[str, int], journal: Mapping[str, Any]) -> Iterator[str]:
    return (rid for rid in rids if rid in journal)
