"""The course of one run: layout, what the planner thinks of others, requests that arrived and good ones among them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import aiohttp

_Noted = TypeVar("_Noted")
_EVERY_S = 0.5


async def watch_layout(url: str) -> list[tuple[float, str]]:
    """Note the layout of a server of ours until cancelled: seconds from now, and each layout that is another one."""
    return await _watch(url, _layout)


async def watch_plans(url: str) -> list[tuple[float, dict[str, float]]]:
    """Note what the planner of a server of ours thinks of each layout until cancelled.

    Returns:
        Seconds from now, and by layout the weighted requests/s that it is worth, the best one first. Nothing of a
        server that has no planner.
    """
    return await _watch(url, _values)


async def _watch(
    url: str, look: Callable[[aiohttp.ClientSession, str], Awaitable[_Noted]]
) -> list[tuple[float, _Noted]]:
    """Note what is seen until cancelled, when it is something and another thing than before."""
    seen: list[tuple[float, _Noted]] = []
    begun = perf_counter()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            while True:
                found = await look(session, url)
                if found and (not seen or seen[-1][1] != found):
                    seen.append((round(perf_counter() - begun, 2), found))
                await asyncio.sleep(_EVERY_S)
    except asyncio.CancelledError:
        return seen


async def _values(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    try:
        async with session.get(f"{url}/adapt/plan") as response:
            options = (await response.json())["options"] if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError):
        return {}
    return {option["engines"]: option["value"] for option in options}


async def _layout(session: aiohttp.ClientSession, url: str) -> str:
    # The router alone answers this one; `/adapt/layout` would ask the engines.
    try:
        async with session.get(f"{url}/adapt/engines") as response:
            return str((await response.json())["layout"]) if response.status == 200 else "unknown"
    except (aiohttp.ClientError, TimeoutError):
        return "unknown"


def timeline(
    layouts: Sequence[tuple[float, str]],
    plans: Sequence[tuple[float, Mapping[str, float]]],
    arrivals: Sequence[float],
    good: Sequence[bool],
) -> dict[str, Any]:
    """As it is written into the result: `layouts`, `plans`, and `sent` and `good` by second of arrival.

    Args:
        layouts: of `watch_layout`.
        plans: of `watch_plans`.
        arrivals: of all requests, in seconds from the start.
        good: whether each met its targets.
    """
    sent = Counter(int(at) for at in arrivals)
    met = Counter(int(at) for at, is_good in zip(arrivals, good, strict=True) if is_good)
    seconds = range(max(sent, default=-1) + 1)
    return {
        "layouts": [list(one) for one in layouts],
        "plans": [[at, dict(values)] for at, values in plans],
        "sent": [sent[second] for second in seconds],
        "good": [met[second] for second in seconds],
    }
