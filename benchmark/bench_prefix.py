"""What a switch of layout leaves of the prefix cache.

    python benchmark/bench_prefix.py                  # two virtual GPUs, every strategy, both ways

Half of the prompts' prefixes belong to requests that run while the layout is switched, half to requests that have
ended. Each look sends one request for every prefix, with an ending of its own, and reads from the answers how much of
the prefix was cached: before the switch, right after it (the first request of each prefix), and after more of them. By
`keep` the layout is switched back as well. Both layouts were warm before; the cache was flushed before each case.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from layouts import Layouts
from server import Server, environment, write_json

ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
STRATEGIES = ("migrate", "recompute", "keep", "drain")
_ROUNDS = 8
"""Looks before "before" and "later" are taken: with several engines each has to meet every prefix."""
_ENDING = 16
"""Tokens of each prompt behind its prefix."""
_RUN_TOKENS = 3000
"""Output tokens of a request that is to run all the while."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=12, help="an even number; half of them of running requests")
    parser.add_argument("--tokens", type=int, default=256, help="of each prefix")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_prefix_cpu.json"))
    options = parser.parse_args()
    flags = ["--adapt-virtual-gpus", "2", "--adapt-tp-sizes", "1,2", "--incremental-streaming-output"]
    with tempfile.TemporaryDirectory() as temporary:
        log = options.log or Path(temporary) / "server.log"
        with Server("ours", "sglang_adapt.launch_server", flags, log) as server:
            cases = asyncio.run(Bench(options, server.url).run())
    shape = {"prefixes": options.prefixes, "prefix_tokens": options.tokens, "server_flags": flags}
    write_json(options.out, {**environment(), **shape, "cases": cases})
    return 0


@dataclass(frozen=True)
class Prefix:
    """A beginning that prompts share; `runs`: a request that has it runs during the switch."""

    ids: list[int]
    runs: bool


class Bench:
    """All cases on one server.

    Args:
        options: the command line.
        url: of the server.
    """

    def __init__(self, options: argparse.Namespace, url: str) -> None:
        self._o = options
        self._url = url
        self._rng = random.Random(options.seed)

    async def run(self) -> list[dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            self._layouts = Layouts(session, self._url)
            cases = []
            for strategy in self._o.strategies:
                for before, after in ((ONES, TWO), (TWO, ONES)):
                    case = await self._case(before, after, strategy)
                    print(case, flush=True)
                    cases.append(case)
            return cases

    async def _case(self, before: str, after: str, strategy: str) -> dict[str, Any]:
        await self._layouts.switch(before, "migrate")
        async with self._session.post(f"{self._url}/flush_cache?timeout=30") as response:
            response.raise_for_status()
        # A drained request cannot run through the switch.
        count = self._o.prefixes
        prefixes = [Prefix(self._draw(self._o.tokens), strategy != "drain" and at % 2 == 0) for at in range(count)]
        looks = {}
        for _ in range(_ROUNDS):
            await self._look(prefixes)
        async with AsyncExitStack() as stack:
            for prefix in prefixes:
                if prefix.runs:
                    await stack.enter_async_context(self._running(prefix))
            looks["before"] = await self._look(prefixes)
            report = (await self._layouts.switch(after, strategy)).report
            looks["right after"] = await self._look(prefixes)
            for _ in range(_ROUNDS - 1):
                await self._look(prefixes)
            looks["later"] = await self._look(prefixes)
            if strategy == "keep":
                await self._layouts.switch(before, "migrate")
                looks["right after the way back"] = await self._look(prefixes)
        return {
            "from": before,
            "to": after,
            "strategy": strategy,
            "requests": report["requests"],
            "part_of_prefix_cached": looks,
        }

    async def _look(self, prefixes: list[Prefix]) -> dict[str, float]:
        """One request for each prefix; the mean part of the prefix that was cached, by whether its request runs."""
        parts: dict[str, list[float]] = {}
        # All at once, so that each engine gets its part of them, and in another order each time.
        order = self._rng.sample(prefixes, len(prefixes))
        cached = await asyncio.gather(*map(self._cached_tokens, order))
        for prefix, tokens in zip(order, cached, strict=True):
            part = min(tokens, len(prefix.ids)) / len(prefix.ids)
            parts.setdefault("of running requests" if prefix.runs else "of ended requests", []).append(part)
        return {kind: round(statistics.fmean(values), 3) for kind, values in sorted(parts.items())}

    async def _cached_tokens(self, prefix: Prefix) -> int:
        async with self._session.post(f"{self._url}/generate", json=self._body(prefix, 1)) as response:
            response.raise_for_status()
            cached: int = (await response.json())["meta_info"]["cached_tokens"]
            return cached

    @asynccontextmanager
    async def _running(self, prefix: Prefix) -> AsyncIterator[None]:
        """A request that decodes until the block ends; its client leaves then."""
        body = self._body(prefix, _RUN_TOKENS) | {"stream": True}
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            response.raise_for_status()
            await response.content.readline()
            yield
            response.close()

    def _body(self, prefix: Prefix, tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": prefix.ids + self._draw(_ENDING), "sampling_params": sampling}

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 900) for _ in range(count)]


if __name__ == "__main__":
    raise SystemExit(main())
