"""What the front is answered about the layout: which one serves, and whether it could be changed."""

from __future__ import annotations

from typing import Any

from sglang_adapt.core import messages
from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.core.layout import LayoutError, parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import SwitchRefusedError


async def answer_layout(
    request: messages.SwitchRequest | messages.LayoutRequest, config: AdaptConfig, router: Router, modes: Modes | None
) -> messages.LayoutAnswer:
    """HTTP status and body of what is asked about the layout, or of the switch that is asked for, when it is over."""
    status, body = await _answer(request, config, router, modes)
    return messages.LayoutAnswer(request.id, status, body)


async def _answer(
    request: messages.SwitchRequest | messages.LayoutRequest, config: AdaptConfig, router: Router, modes: Modes | None
) -> tuple[int, dict[str, Any]]:
    if modes is None:
        return 409, {
            "code": "one_tp_size",
            "message": "this server has engines of one TP size, whose layout is fixed; start it with several "
            "--adapt-tp-sizes",
        }
    if isinstance(request, messages.LayoutRequest):
        return 200, await modes.readback()
    try:
        layout = parse_layout(request.layout, config.tp_sizes, config.gpus)
        strategy = Strategy(request.strategy)
    except (LayoutError, ValueError) as error:
        return 400, {"code": "bad_layout", "message": str(error)}
    if not router.accepting:
        return 503, {"code": "draining", "message": "the server is shutting down"}
    try:
        switch = await modes.switch(layout, strategy, request.reason)
    except SwitchRefusedError as error:
        return 409, {"code": "switch_refused", "message": str(error)}
    except Exception as error:  # noqa: BLE001 -- logged where it happened, and told
        return 500, {"code": "switch_failed", "message": f"{type(error).__name__}: {error}"}
    return 200, {"active": str(router.layout), **switch.report()}
