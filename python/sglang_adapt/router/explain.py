"""A plan as plain values, for `GET /adapt/layout` and `GET /adapt/plan`."""

from __future__ import annotations

import math
from typing import Any

from sglang_adapt.policy.situation import Plan
from sglang_adapt.policy.worth import Row


def explain(plan: Plan) -> dict[str, Any]:
    """The decision with its reason, and all figures behind it.

    Returns:
        `layout`, `move`, `wanted`, `trigger`, `strategy`, `reason` of the plan; `tiers`: by engine of `wanted`, what it
        is there for; `estimates`: a row for each tier and TP size; `options`: the layouts that were compared, the best
        first; `price`: of a switch to `wanted`; `roles`: the best engines in roles against the best mixed
        ones; `waited`: windows, by tier.
    """
    return {
        "layout": str(plan.layout),
        "move": plan.move,
        "wanted": str(plan.wanted),
        "trigger": None if plan.trigger is None else plan.trigger.value,
        "strategy": plan.strategy.value,
        "reason": plan.reason,
        "tiers": {engine: list(tiers) for engine, tiers in plan.tiers.items()},
        "demand": [_demand(row) for row in plan.rows],
        "estimates": [estimate for row in plan.rows for estimate in _estimates(row)],
        "options": [
            {
                "engines": str(option),
                "value": _round(option.worth.value),
                "ends_rps": None if option.ends_rps is None else _round(option.ends_rps),
                "carried_rps": {tier: _round(rate) for tier, rate in option.worth.carried_rps.items()},
                "request_ms": {tier: _round(ms) for tier, ms in option.worth.time_ms.items()},
            }
            for option in plan.options
        ],
        "price": {
            "requests_paused": plan.bill.requests,
            "kv_bytes": round(plan.bill.kv_bytes),
            "pause_ms": _round(plan.bill.pause_ms),
        },
        "roles": None
        if plan.roles is None
        else {
            "engines": plan.roles.engines or None,
            "roles_rps": _round(plan.roles.roles_rps),
            "mixed_rps": _round(plan.roles.mixed_rps),
            "chosen": plan.roles.chosen,
            "reason": plan.roles.reason,
        },
        "waited": dict(plan.history.waited),
    }


def _demand(row: Row) -> dict[str, Any]:
    demand = row.demand
    return {
        "tier": row.tier,
        "rate_rps": _round(demand.rate_rps),
        "offered_rps": _round(row.offered_rps),
        "prompt_tokens": _round(demand.prompt_tokens),
        "output_tokens": _round(demand.output_tokens),
        "unfinished": demand.unfinished.requests,
        "waiting": demand.unfinished.waiting,
    }


def _estimates(row: Row) -> list[dict[str, Any]]:
    return [
        {
            "tier": row.tier,
            "tp": tp,
            "capacity_rps": _round(one.capacity_rps),
            "goodput_per_gpu_rps": _round(row.efficiency(tp)),
            "ttft_ms": _round(one.ttft_ms),
            "tpot_ms": _round(one.tpot_ms),
            "batch": _round(one.batch),
            "alone_ms": _round(one.alone_ms),
        }
        for tp, one in row.estimates.items()
    ]


def _round(value: float) -> float | None:
    """Four digits; None for what is never."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
