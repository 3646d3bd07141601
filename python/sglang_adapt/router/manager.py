"""Who decides on the layout, and the loop that lets it follow the traffic.

Every interval the manager closes a window of `traffic.Traffic`, lets `policy.planner` decide in a thread, and has
`modes.Modes` make the switch. An operator's order holds until control is given back. Flying Serving, 2.3;
Nitsum, 3.3.1.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.assign import promises
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Terms, Unfinished
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.pilot import REST_WINDOWS, Pilot
from sglang_adapt.policy.planner import STARVED, plan
from sglang_adapt.policy.price import Price, Running
from sglang_adapt.policy.situation import History, Plan, Situation, Trigger
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.explain import explain
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Outcome, Switch, SwitchRefusedError
from sglang_adapt.router.traffic import Traffic

logger = logging.getLogger(__name__)

PAUSED_WINDOWS = 2 * STARVED
"""Requests that were paused for a tier with tight targets go on, wherever that is, after so many windows."""
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
        gives_roles: engines may be given roles.
        planned: told each plan and the seconds that it took.
        assign: told which tiers are promised their targets on which engines, by name; an engine that is not named takes
            all.
    """

    gpus: int
    terms: Callable[[], tuple[Terms, ...]]
    speeds: Callable[[], tuple[Speed, ...]]
    token_bytes: int
    price: Price
    gives_roles: bool = False
    planned: Callable[[Plan, float], None] = lambda plan, seconds: None
    assign: Callable[[Mapping[str, frozenset[str]]], None] = lambda tiers_of: None


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
        self._hurry = asyncio.Event()
        self._pilot = None if planning is None else Pilot(planning.price, interval_s, gives_roles=planning.gives_roles)
        self._paused_windows = 0
        self._plan: Plan | None = None
        self._trigger: Trigger | None = None
        self._reason = "as the server was started"
        self._switches: deque[dict[str, Any]] = deque(maxlen=_LAST_SWITCHES)

    async def run(self) -> None:
        """Plan every interval, for ever; returns at once if nobody plans."""
        if self._planning is None:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval_s
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), due - loop.time())
            in_turn = loop.time() >= due
            if in_turn:
                due = loop.time() + self._interval_s
            try:
                await self.step(in_turn=in_turn)
            except Exception:
                # A fault in this program must not end the control for good; the layout stays as it is.
                logger.exception("planning broke off; the layout stays for %d windows", REST_WINDOWS)
                assert self._pilot is not None
                self._pilot.rest()

    def hurry(self) -> None:
        """A request waits for an engine that holds it: plan now, not when the window is over."""
        self._hurry.set()

    async def step(self, *, in_turn: bool = True) -> Plan | None:
        """Plan, and switch if it says so. Returns the plan; None if there was none to make.

        Args:
            in_turn: a window is over; else this plan is one between two windows, and counts for no other one.
        """
        assert self._planning is not None and self._traffic is not None and self._pilot is not None
        self._hurry.clear()
        if in_turn:
            self._traffic.close()
            self._paused_windows = self._paused_windows + 1 if self._modes.kept.exports else 0
        self._go_on_with_paused()
        now = self._situation()
        if self._modes.switching or not (self._router.accepting or self._router.long.waiting):
            return None
        began = time.perf_counter()
        decided = await asyncio.to_thread(plan, now)
        self._planning.planned(decided, time.perf_counter() - began)
        self._plan = decided
        if self._pilot.may_follow(decided, in_turn=in_turn) and self._by_planner and not self._modes.switching:
            await self._follow(decided)
        self.reassign()
        return decided

    def _go_on_with_paused(self) -> None:
        """What was paused for a tier goes on elsewhere if it has waited long."""
        if self._by_planner and self._paused_windows > PAUSED_WINDOWS:
            self._modes.let_go(f"it has been paused for {PAUSED_WINDOWS} windows")

    def reassign(self) -> None:
        """The layout, the plan or the state of an engine is another one: say which tiers are promised where."""
        if self._planning is None:
            return
        router = self._router
        planned = {} if self._plan is None or self._plan.layout != router.layout else self._plan.serving
        up = [name for name in planned if router.engines[name].state is EngineState.READY]
        self._planning.assign(promises(planned, [terms.tier for terms in self._planning.terms()], up))

    async def _follow(self, decided: Plan) -> None:
        assert decided.trigger is not None and self._pilot is not None
        states = self._router.engines
        for name in (engine.name for engine in decided.layout.engines):
            state = states[name].state
            if state is not EngineState.READY:
                logger.log(
                    logging.INFO if state is EngineState.STARTING else logging.WARNING,
                    "layout %s would be better (%s), but %s %s; asked again in %d windows at the earliest",
                    decided.layout,
                    decided.reason,
                    name,
                    "is starting" if state is EngineState.STARTING else f"is not up ({state.value})",
                    REST_WINDOWS,
                )
                self._pilot.rest()
                return
        reason = f"{decided.trigger}: {decided.reason}"
        try:
            await self._modes.switch(decided.layout, decided.strategy, reason, decided.trigger)
        except SwitchRefusedError as error:
            logger.warning("%s; asked again in %d windows at the earliest", error, REST_WINDOWS)
            self._pilot.rest()
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
        self._refuse_what_would_wait(layout)
        before = self._by_planner
        self._take_control(by_planner=False)
        try:
            switch = await self._modes.switch(layout, strategy, reason)
        except BaseException:
            self._take_control(by_planner=before)
            raise
        self._trigger, self._reason = Trigger.OPERATOR, reason
        return switch

    def release(self, reason: str) -> None:
        """Give control back to the planner. Raises OrderRefusedError if there is none."""
        self._require_planner()
        if not self._by_planner:
            logger.info("layout %s: the planner decides again (%s)", self._router.layout, reason)
        self._take_control(by_planner=True)

    def _take_control(self, *, by_planner: bool) -> None:
        self._by_planner = self._router.long.may_bind = by_planner

    def _refuse_what_would_wait(self, layout: Layout) -> None:
        """Raises SwitchRefusedError if a request waits for an engine, and no one would bind it one any more."""
        router = self._router
        for rid in router.long.waiting:
            if not router.long.held_by_one((spec.name for spec in layout.engines), rid):
                raise SwitchRefusedError(
                    f"layout {router.layout} stays with the planner: request {rid} waits for an engine that holds "
                    f"{router.long.needs[rid]} tokens, and layout {layout} has none; name one that has, or ask "
                    f"again when it has ended"
                )

    @property
    def switch(self) -> Switch | None:
        """The switch that is under way."""
        return self._modes.current

    def switched(self, switch: Switch, outcome: Outcome) -> None:
        """A switch that was asked for has ended."""
        if self._router.long.waiting:
            self.hurry()
        self.reassign()
        if switch.before == switch.after:
            return
        self._switches.append({"outcome": outcome.value, "at": round(time.time(), 3), **switch.report()})
        # A change of roles alone pauses nobody, and says nothing about what a switch costs.
        if self._pilot is not None and switch.leaving and outcome in (Outcome.SWITCHED, Outcome.IMPAIRED):
            self._pilot.learn(switch.pause_ms, switch.kv_bytes)

    def handed_over(self, seconds: float) -> None:
        """A request went from an engine that had read it to one that decodes, in so long a time."""
        if self._pilot is not None:
            self._pilot.learn_handover(1e3 * seconds)

    # What is told.

    def said(self) -> dict[str, Any]:
        """For `GET /adapt/layout`: who decides, why this layout, the longest request that is accepted and how many wait
        for an engine that holds them, the last switches, the planner's last table."""
        trigger, reason = self._why()
        return {
            "policy": self._policy.value,
            "control": "planner" if self._by_planner else "operator",
            "trigger": None if trigger is None else trigger.value,
            "reason": reason,
            "longest_request": {
                "tokens": self._router.request_tokens,
                "waiting": len(self._router.long.waiting),
            },
            "switches": list(self._switches),
            "planner": None if self._plan is None else explain(self._plan),
        }

    def _why(self) -> tuple[Trigger | None, str]:
        """Why this layout; of a switch from when its engines serve, while the old ones give back their blocks."""
        switch = self._modes.current
        if switch is not None and switch.leaving and self._router.layout == switch.after:
            return switch.trigger, switch.reason.removeprefix(f"{switch.trigger}: ")
        return self._trigger, self._reason

    async def what_if(self, rates: Mapping[str, float] | None) -> dict[str, Any]:
        """What the planner would do at these rates, in requests/s by tier, with nothing unfinished. Nothing changes.

        None as rates: what it would do now, at what is asked for, with what is unfinished.

        Raises:
            OrderRefusedError: there is no planner.
            KeyError: there is no such tier.
        """
        self._require_planner()
        now = self._situation()
        if rates is None:
            return explain(await asyncio.to_thread(plan, now))
        known = {demand.terms.tier for demand in now.demands}
        unknown = sorted(set(rates) - known)
        if unknown:
            raise KeyError(f"there is no tier {unknown[0] or 'without a name'}; there are {', '.join(sorted(known))}")
        asked = tuple(
            replace(demand, rate_rps=rates.get(demand.terms.tier, 0.0), unfinished=Unfinished())
            for demand in now.demands
        )
        then = replace(now, demands=asked, longest_tokens=0, history=History(), asked=True)
        decided = await asyncio.to_thread(plan, then)
        return explain(decided)

    def _require_planner(self) -> None:
        """Raises OrderRefusedError if there is none."""
        if self._planning is None:
            raise OrderRefusedError(
                f"this server has no planner (--adapt-policy {self._policy}); start it with --adapt-policy auto"
            )

    def _situation(self) -> Situation:
        assert self._planning is not None and self._traffic is not None and self._pilot is not None
        planning, router = self._planning, self._router
        speeds = planning.speeds()
        capacity = {speed.tp: speed.kv_tokens for speed in speeds}
        weights = {terms.tier: terms.weight for terms in planning.terms()}
        running = {
            engine.name: self._running(engine.name, capacity[engine.tp], weights) for engine in router.layout.engines
        }
        return self._pilot.situation(
            terms=planning.terms(),
            windows=tuple(self._traffic.windows),
            unfinished=self._traffic.unfinished(router.unfinished()),
            speeds=speeds,
            gpus=planning.gpus,
            layout=router.layout,
            running=running,
            longest_tokens=max(router.long.needs.values(), default=0),
        )

    def _running(self, name: str, capacity: int, weights: Mapping[str, float]) -> Running:
        """What an engine has.

        Args:
            name: of the engine.
            capacity: tokens of KV that it can have in a layout.
            weights: of the tiers.
        """
        assert self._planning is not None
        journal, in_flight = self._router.journal, self._router.engines[name].in_flight
        tokens = sum(in_flight.values()) + sum(len(journal[rid].ids) for rid in _known(in_flight, journal))
        assert self._traffic is not None
        # One whose tier nobody knows, as it came before it was renamed, is not paused for another one.
        weight = max((weights.get(self._traffic.tier(rid) or "", math.inf) for rid in in_flight), default=0.0)
        return Running(
            len(in_flight),
            float(tokens * self._planning.token_bytes),
            self._longest_on(name),
            tokens / capacity,
            weight,
        )

    def _longest_on(self, name: str) -> int:
        """Tokens of the longest request of an engine that not every engine holds."""
        in_flight = self._router.engines[name].in_flight
        return max((need for rid, need in self._router.long.needs.items() if rid in in_flight), default=0)


def _known(rids: Mapping[str, int], journal: Mapping[str, Any]) -> Iterator[str]:
    return (rid for rid in rids if rid in journal)
