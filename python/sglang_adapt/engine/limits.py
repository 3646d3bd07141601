"""The router's call `limits`: how much an engine may do in one iteration."""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.limits import set_limits


def limit(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Limit the iterations from the next one on.

    Args:
        payload: `prefill_tokens` of prompts before each decode step and `requests` that decode, or None for stock's.

    Raises:
        LimitsError: a value that cannot be; nothing has changed.
    """
    set_limits(scheduler, payload["prefill_tokens"], payload["requests"])
    return {}
