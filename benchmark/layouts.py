"""The layout of a running server of ours, read and changed over HTTP, and what its ledgers must add up to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import aiohttp


class SwitchFailedError(RuntimeError):
    """The server did not switch; the text has its reason."""


@dataclass(frozen=True)
class Switched:
    """A switch as the client saw it: when it asked and when it was answered (perf_counter, seconds), and the report."""

    asked_s: float
    answered_s: float
    report: dict[str, Any]


class Layouts:
    """`/adapt/layout` of a server.

    Args:
        session: with no limit on connections.
        url: of the server.
        timeout_s: for one switch.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float = 120.0) -> None:
        self._session = session
        self._url = f"{url}/adapt/layout"
        self._engines_url = f"{url}/adapt/engines"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def switch(self, layout: str, strategy: str = "auto") -> Switched:
        """Go over to a layout. Raises SwitchFailedError, aiohttp.ClientError, TimeoutError."""
        asked = perf_counter()
        body = {"layout": layout, "strategy": strategy, "reason": "benchmark"}
        async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
            report = await response.json()
        if response.status != 200:
            raise SwitchFailedError(
                f"to {layout} by {strategy}: HTTP {response.status}: {report.get('message', report)}"
            )
        return Switched(asked, perf_counter(), report)

    async def get(self) -> dict[str, Any]:
        """What the engines say of themselves. Raises SwitchFailedError, aiohttp.ClientError, TimeoutError."""
        async with self._session.get(self._url, timeout=self._timeout) as response:
            body: dict[str, Any] = await response.json()
        if response.status != 200:
            raise SwitchFailedError(f"GET: HTTP {response.status}: {body.get('message', body)}")
        return body

    async def engines(self) -> dict[str, dict[str, Any]]:
        """The router's view of each engine by name, asked for now. Raises as `get`."""
        async with self._session.get(self._engines_url, timeout=self._timeout) as response:
            return {engine["name"]: engine for engine in (await response.json())["engines"]}


def sizes_of(layout: str) -> list[int]:
    """The TP sizes of a layout's engines; their sum is the number of GPUs."""
    return [int(tp) for tp in re.findall(r"tp(\d+)@", layout)]


def gpus_of(engine: str) -> range:
    """The GPUs of an engine by its name."""
    first, _, last = engine.split("@")[1].partition("-")
    return range(int(first), int(last or first) + 1)


def blocks_by_gpu(engines: dict[str, dict[str, Any]]) -> dict[int, int]:
    """Blocks of each GPU that some engine has leased or nobody has; the rest are on the move or kept.

    Args:
        engines: what `/adapt/engines` says of each. Free blocks of an engine are those of its GPU that has fewest, so
            that they are right at TP 1, and else if the GPUs of the smallest engines have the same.
    """
    gpus = sorted({gpu for name in engines for gpu in gpus_of(name)})
    smallest = {gpu: min((len(gpus_of(name)), name) for name in engines if gpu in gpus_of(name))[1] for gpu in gpus}
    free = {gpu: engines[smallest[gpu]]["free_blocks"] for gpu in gpus}
    leased = {gpu: sum(e["leased_blocks"] for name, e in engines.items() if gpu in gpus_of(name)) for gpu in gpus}
    return {gpu: free[gpu] + leased[gpu] for gpu in gpus}
