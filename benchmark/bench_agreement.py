"""Whether a switch changes answers more than another TP size does: greedy tokens of the same requests, compared.

    python benchmark/bench_agreement.py --layouts tp1@0,tp1@1 tp2@0-1 --vocab 100000 -- FLAGS
    python benchmark/bench_agreement.py --virtual 2 --vocab 1000    # float32: all must be equal

In bf16 two TP sizes, and two batches of one TP size, do not give the same tokens for ever: sums come in another order,
and near ties fall the other way. So a switch is held against that. `--prompts` requests run in layout A, and while all
of them decode, the server goes to layout B. What each had given when the switch was asked for is then put behind its
prompt, and the tokens that follow are asked for in A and in B, which stay; each twice, the second time in another
order, so that other engines and batches get them, and each time with an empty prefix cache. The same from B to A.

For each pair: of how many requests all tokens are equal, and how many tokens there are until the first that differs.
The comparison fails if a switched answer is much further from both than they are from each other and themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from layouts import Layouts, sizes_of
from server import Server, environment, our_flags, write_json
from sglang_adapt.core.urls import KEEP_ALIVE_S

_POLL_S = 0.001
_LIMIT_S = 120.0
_MUCH = 0.5
"""A switched answer that agrees for less than this share of the tokens that the worst pair of static ones agrees for
is not explained by rounding."""

Tokens = list[int]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        sizes = {tp for layout in options.layouts for tp in sizes_of(layout)}
        flags = [
            *options.flags,
            "--skip-tokenizer-init",
            *our_flags(options.layouts[0], sizes, options.start_method, options.virtual),
        ]
        with Server("ours", "sglang_adapt.launch_server", flags, logs / "ours.log") as server:
            pairs = asyncio.run(_compare(server.url, options))
    told = {name: str(value) for name, value in vars(options).items()}
    failed = _unexplained(pairs)
    write_json(options.out, {**environment(), "options": told, "pairs": pairs, "failed": failed})
    for text in failed:
        print(f"FAILED {text}")
    raise SystemExit(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs=2, metavar=("A", "B"), default=["tp1@0,tp1@1", "tp2@0-1"])
    parser.add_argument("--vocab", type=int, required=True, help="token ids are drawn below this")
    parser.add_argument("--prompts", type=int, default=32, help="requests that run at a time")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--before", type=int, default=16, help="tokens that each has given before the switch")
    parser.add_argument("--after", type=int, default=64, help="tokens that are compared")
    parser.add_argument("--virtual", type=int, default=0, metavar="N", help="virtual GPUs (no CUDA)")
    parser.add_argument("--start-method", help="--adapt-start-method")
    parser.add_argument("--logs", type=Path, help="keep the server's log in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_agreement.json"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags for the server")
    options = parser.parse_args()
    options.flags = [flag for flag in options.flags if flag not in ("--", "--skip-tokenizer-init")]
    return options


async def _compare(url: str, o: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways; each pair's row, which is printed, too."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    rows = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        server = _Server(session, url)
        for here, there in (o.layouts, o.layouts[::-1]):
            rng = random.Random(here)
            prompts = [[rng.randrange(10, o.vocab) for _ in range(o.input)] for _ in range(o.prompts)]
            begun, switched = await server.through_a_switch(prompts, here, there, o.before, o.after)
            static: dict[str, list[Tokens]] = {}
            for layout in (here, there):
                longer = [prompt + first for prompt, first in zip(prompts, begun, strict=True)]
                static[layout] = await server.answers(longer, layout, o.after)
                static[f"{layout} again"] = (await server.answers(longer[::-1], layout, o.after))[::-1]
            sides = {**static, f"{here} -> {there}": switched}
            for one, other in (
                (here, f"{here} again"),
                (there, f"{there} again"),
                (here, there),
                (f"{here} -> {there}", here),
                (f"{here} -> {there}", there),
            ):
                row = {"one": one, "other": other, **_agreement(sides[one], sides[other])}
                rows.append(row)
                print(row, flush=True)
    return rows


class _Server:
    """Greedy answers of a running server, in a layout and through a switch."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._layouts = Layouts(session, url)

    async def through_a_switch(
        self, prompts: Sequence[Tokens], here: str, there: str, before: int, after: int
    ) -> tuple[list[Tokens], list[Tokens]]:
        """Of each request, what it had given when the switch was asked for, and the `after` tokens that follow."""
        await self._go(here)
        given: list[Tokens] = [[] for _ in prompts]
        # More than are compared, so that all still run when the layout changes.
        asked = 4 * (before + after)
        tasks = [asyncio.create_task(self._answer(p, asked, g)) for p, g in zip(prompts, given, strict=True)]
        async with asyncio.timeout(_LIMIT_S):
            while min(map(len, given)) < before:
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(_POLL_S)
        counts = [len(tokens) for tokens in given]
        done = await self._layouts.switch(there, "migrate")
        moved = done.report["requests"].get("migrated", 0)
        if moved != len(prompts):
            raise RuntimeError(f"{moved} of {len(prompts)} requests were migrated: {done.report['requests']}")
        await asyncio.gather(*tasks)
        begun = [tokens[:count] for tokens, count in zip(given, counts, strict=True)]
        return begun, [tokens[count : count + after] for tokens, count in zip(given, counts, strict=True)]

    async def answers(self, prompts: Sequence[Tokens], layout: str, count: int) -> list[Tokens]:
        """The first tokens of all, asked for at once in one layout."""
        await self._go(layout)
        given: list[Tokens] = [[] for _ in prompts]
        await asyncio.gather(*(self._answer(p, count, g) for p, g in zip(prompts, given, strict=True)))
        return given

    async def _go(self, layout: str) -> None:
        if (await self._layouts.get())["active"] != layout:
            await self._layouts.switch(layout)
        async with self._session.post(f"{self._url}/flush_cache") as response:
            response.raise_for_status()

    async def _answer(self, prompt: Tokens, count: int, given: Tokens) -> None:
        """Add a request's tokens to `given` as they come. Raises RuntimeError if there are not `count` of them."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    if "output_ids" not in said:
                        raise RuntimeError(str(said)[:200])
                    given.extend(said["output_ids"])
        if len(given) != count:
            raise RuntimeError(f"HTTP {response.status}: {len(given)} tokens came of {count}")


def _agreement(one: Sequence[Tokens], other: Sequence[Tokens]) -> dict[str, Any]:
    """Of two answers to each of the same requests: how many are equal, and where the others begin to differ."""
    same = [
        next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, other, strict=True)
    ]
    equal = sum(x == y for x, y in zip(one, other, strict=True))
    return {
        "requests": len(same),
        "equal": equal,
        "tokens": len(one[0]),
        "same_tokens_mean": round(statistics.fmean(same), 1),
        "same_tokens_median": statistics.median(same),
        "same_tokens_least": min(same),
    }


def _unexplained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Switched answers that agree with neither layout as its own answers do."""
    failed = []
    ways = len(rows) // 2
    for way in (rows[:ways], rows[ways:]):
        static = min(row["same_tokens_mean"] for row in way if "->" not in row["one"])
        for row in way:
            if "->" in row["one"] and row["same_tokens_mean"] < _MUCH * static:
                failed.append(
                    f"{row['one']} agrees with {row['other']} for {row['same_tokens_mean']} tokens, "
                    f"static layouts with each other for {static}"
                )
    return failed


if __name__ == "__main__":
    main()
