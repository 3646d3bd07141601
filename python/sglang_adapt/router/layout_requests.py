"""What the front is answered about the layout: which one serves, what the planner would do, whether it was changed."""

from __future__ import annotations

import logging
from typing import Any

from sglang_adapt.core import messages
from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.core.layout import LayoutError, parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.router.manager import Manager, OrderRefusedError
from sglang_adapt.router.planning import ALL
from sglang_adapt.router.readback import Readback
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import SwitchRefusedError
from sglang_adapt.router.view import view

logger = logging.getLogger(__name__)

LayoutQuestion = messages.SwitchRequest | messages.LayoutRequest | messages.PlanRequest | messages.ViewRequest
LAYOUT_QUESTIONS = (messages.SwitchRequest, messages.LayoutRequest, messages.PlanRequest, messages.ViewRequest)


async def answer_layout(
    request: LayoutQuestion, config: AdaptConfig, router: Router, readback: Readback | None, manager: Manager | None
) -> messages.LayoutAnswer:
    """HTTP status and body of what is asked about the layout, or of the switch that is asked for, when it is over."""
    status, body = await _answer(request, config, router, readback, manager)
    return messages.LayoutAnswer(request.id, status, body)


async def _answer(
    request: LayoutQuestion, config: AdaptConfig, router: Router, readback: Readback | None, manager: Manager | None
) -> tuple[int, dict[str, Any]]:
    if isinstance(request, messages.ViewRequest):
        return 200, view(config, router, manager)
    if readback is None or manager is None:
        return 409, {
            "code": "one_tp_size",
            "message": "this server has engines of one TP size, whose layout is fixed; start it with several "
            "--adapt-tp-sizes",
        }
    if isinstance(request, messages.LayoutRequest):
        return 200, await readback.read() | manager.said()
    if isinstance(request, messages.PlanRequest):
        return await _what_if(manager, router, request.rates)
    if request.layout == "auto":
        try:
            manager.release(request.reason)
        except OrderRefusedError as error:
            return 409, {"code": "no_planner", "message": str(error)}
        return 200, {"active": str(router.layout), "control": "planner"}
    try:
        layout = parse_layout(request.layout, config.tp_sizes, config.gpus)
        strategy = Strategy(request.strategy)
    except (LayoutError, ValueError) as error:
        return 400, {"code": "bad_layout", "message": str(error)}
    if not router.accepting:
        return 503, {"code": "draining", "message": "the server is shutting down"}
    try:
        switch = await manager.order(layout, strategy, request.reason)
    except OrderRefusedError as error:
        return 409, {"code": "static_layout", "message": str(error)}
    except SwitchRefusedError as error:
        return 409, {"code": "switch_refused", "message": str(error)}
    except Exception as error:
        logger.exception("layout %s was ordered, which broke off", layout)
        return 500, {"code": "switch_failed", "message": f"{type(error).__name__}: {error}"}
    return 200, {"active": str(router.layout), **switch.report()}


async def _what_if(manager: Manager, router: Router, rates: dict[str, float] | None) -> tuple[int, dict[str, Any]]:
    if router.admission is None and rates is not None and "" in rates:
        rates = {ALL: rates[""]}
    try:
        return 200, await manager.what_if(rates)
    except OrderRefusedError as error:
        return 409, {"code": "no_planner", "message": str(error)}
    except KeyError as error:
        return 400, {"code": "unknown_tier", "message": str(error.args[0]), "param": "rates"}
