"""The deployment as the live page shows it (`front/live.py`): asked for once a second while somebody looks.

Nothing is asked of the engines, so that looking costs them nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.router.manager import Manager
from sglang_adapt.router.router import Router
from sglang_adapt.router.status import status_of

_NO_TIER = ""
"""Stands for the tier of all requests where there are no tiers."""


def view(config: AdaptConfig, router: Router, manager: Manager | None) -> dict[str, Any]:
    """What the router knows now, as plain values.

    Returns:
        `gpus`, `virtual`, `tp_sizes`; `layout`; `accepting`: False while the server drains; `engines`: a row each, with
        role and requests by tier, `running` and `reading` (before their first token); `waiting`: requests that no
        engine has, by tier; `switching`: the switch that is under way, or None; `control`, `policy`, `trigger`,
        `reason`, `switches`: as in `GET /adapt/layout`; `planner`: what it wants and why, or None.
    """
    statuses = {status.name: status for status in status_of(router).engines}
    on_engines: set[str] = set()
    engines = []
    for spec in config.candidates:
        status = statuses.get(spec.name)
        running: Counter[str] = Counter()
        reading: Counter[str] = Counter()
        if status is not None:
            for rid in router.engines[spec.name].in_flight:
                on_engines.add(rid)
                entry = router.journal.get(rid)
                (running if entry is not None and entry.ids else reading)[_tier(router, rid)] += 1
        engines.append(
            {
                **_place(spec),
                "state": "starting" if status is None else status.state,
                "active": status is not None and status.active,
                "role": Role.MIXED.value if status is None else status.role,
                "restarts": 0 if status is None else status.restarts,
                "running": dict(running),
                "reading": dict(reading),
                "leased_blocks": None if status is None else status.leased_blocks,
                "free_blocks": None if status is None else status.free_blocks,
            }
        )
    waiting = Counter(_tier(router, rid) for rid, _ in router.unfinished() if rid not in on_engines)
    return {
        "gpus": config.gpus,
        "virtual": config.virtual,
        "tp_sizes": list(config.tp_sizes),
        "layout": str(router.layout),
        "accepting": router.accepting,
        "engines": engines,
        "waiting": dict(waiting),
        "switching": None if manager is None else _switching(manager),
        **_control(manager),
    }


def _place(spec: EngineSpec) -> dict[str, Any]:
    return {"name": spec.name, "tp": spec.tp, "first_gpu": spec.first_gpu}


def _tier(router: Router, rid: str) -> str:
    return _NO_TIER if router.admission is None else router.admission.tier_now(rid)


def _switching(manager: Manager) -> dict[str, Any] | None:
    switch = manager.switch
    return None if switch is None or not switch.leaving else switch.report()


def _control(manager: Manager | None) -> dict[str, Any]:
    """Who decides, and what came of it; with one TP size nobody does."""
    if manager is None:
        return {
            "policy": "static",
            "control": "nobody",
            "trigger": None,
            "reason": "one TP size has one layout",
            "switches": [],
            "planner": None,
        }
    said = manager.said()
    plan = said["planner"]
    kept = ("layout", "wanted", "move", "trigger", "reason")
    return said | {"planner": None if plan is None else {name: plan[name] for name in kept}}
