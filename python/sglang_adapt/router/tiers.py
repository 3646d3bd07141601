"""What tiers add to the router's process: admission, the engines' limits, and a look at what waits every so often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sglang_adapt.core.messages import RequestReport
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.limits import LimitKeeper
from sglang_adapt.router.router import Router

_LET_GO_INTERVAL_S = 0.05
_MOST_REQUESTS = 4096
"""That an engine runs at a time, where stock bounds it by its memory only."""


def make_admission(args: RouterArgs, report: Callable[[RequestReport], None]) -> Admission | None:
    """Admission by the deployment's tiers; None if it has none.

    Args:
        args: of the router.
        report: told how each request has ended.
    """
    if args.tiers is None or args.tiers.config is None:
        return None
    return Admission(
        args.tiers,
        {spec.name: spec.tp for spec in args.config.candidates},
        {tp: bounds_of(server_args) for tp, server_args in args.server_args.items()},
        report,
        lambda: time.monotonic() * 1000,
        args.config.ablation,
    )


async def let_go(router: Router, limits: LimitKeeper) -> None:
    """What waits for room gets it as time passes, too: prompts are forgotten, and work grows old."""
    while True:
        await asyncio.sleep(_LET_GO_INTERVAL_S)
        router.let_go()
        limits.refresh(router.serving())


def bounds_of(server_args: Any) -> Bounds:
    """What engines with these stock ServerArgs can do in an iteration."""
    chunk = server_args.chunked_prefill_size
    return Bounds(
        page_tokens=server_args.page_size or 1,
        prefill_tokens=chunk if chunk is not None and chunk > 0 else server_args.max_prefill_tokens,
        requests=server_args.max_running_requests or _MOST_REQUESTS,
    )
