"""The course of one run: layout, requests that arrived and good ones among them, second by second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import aiohttp

_EVERY_S = 0.5


async def watch_layout(url: str) -> list[tuple[float, str]]:
    """Note the layout of a server of ours until cancelled: seconds from now, and each layout that is another one."""
    seen: list[tuple[float, str]] = []
    begun = perf_counter()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            while True:
                active = await _layout(session, url)
                if not seen or seen[-1][1] != active:
                    seen.append((round(perf_counter() - begun, 2), active))
                await asyncio.sleep(_EVERY_S)
    except asyncio.CancelledError:
        return seen


async def _layout(session: aiohttp.ClientSession, url: str) -> str:
    # The router alone answers this one; `/adapt/layout` would ask the engines.
    try:
        async with session.get(f"{url}/adapt/engines") as response:
            return str((await response.json())["layout"]) if response.status == 200 else "unknown"
    except (aiohttp.ClientError, TimeoutError):
        return "unknown"


def timeline(layouts: Sequence[tuple[float, str]], arrivals: Sequence[float], good: Sequence[bool]) -> dict[str, Any]:
    """As it is written into the result: `layouts`, and `sent` and `good` by second of arrival.

    Args:
        layouts: of `watch_layout`.
        arrivals: of all requests, in seconds from the start.
        good: whether each met its targets.
    """
    sent = Counter(int(at) for at in arrivals)
    met = Counter(int(at) for at, is_good in zip(arrivals, good, strict=True) if is_good)
    seconds = range(max(sent, default=-1) + 1)
    return {
        "layouts": [list(one) for one in layouts],
        "sent": [sent[second] for second in seconds],
        "good": [met[second] for second in seconds],
    }
