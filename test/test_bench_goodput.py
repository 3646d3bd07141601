"""How goodput is counted."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from trace_files import write_trace

from bench_goodput import (
    Load,
    Seen,
    TierLoad,
    add_load_flags,
    faster,
    judge,
    parse_tier,
    poisson,
    replay,
    requests_of,
    table,
)
from load import Request

STRICT, LOOSE = TierLoad("strict", 1, 100, 10), TierLoad("loose", 1, 500, 50)


def test_refused_failed_and_late_requests_are_sent_but_not_good() -> None:
    seen = [
        Seen("strict", 200, 90.0, 9.0, 5),
        Seen("strict", 200, 110.0, 9.0, 5),
        Seen("strict", 200, 90.0, 11.0, 5),
        Seen("strict", 429, None, None, 0),
        Seen("strict", 503, None, None, 0),
        Seen("loose", 200, 110.0, None, 1),
    ]
    judged = judge(seen, [STRICT, LOOSE], 2.0)
    strict = judged["strict"]
    assert (strict["sent"], strict["refused"], strict["failed"]) == (5, 1, 1)
    assert (strict["met_ttft"], strict["met_tpot"], strict["good"]) == (2, 2, 1)
    assert (strict["goodput_rps"], strict["attainment"]) == (0.5, 0.2)
    assert (judged["total"]["sent"], judged["total"]["good"]) == (6, 2)
    assert len(table(judged).splitlines()) == 4


def test_arrivals() -> None:
    requests = poisson(10, 100, 20, 8, random.Random(0))
    assert 850 < len(requests) < 1150
    assert all(10 <= r.input_tokens <= 30 and 4 <= r.output_tokens <= 12 for r in requests)
    assert faster(requests, 2)[-1].arrival_s == requests[-1].arrival_s / 2


def test_tiers() -> None:
    assert parse_tier("strict:1:100:10") == STRICT
    for text in ("strict", "strict:1:2", "a:0:1:1", "a:1:-1:1", "a:x:1:1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_tier(text)


def test_what_of_a_trace_is_sent(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.csv", ((1000 * second, 10, second + 1) for second in range(20)))
    parser = argparse.ArgumentParser()
    add_load_flags(parser)

    def outputs(times: float, *flags: str) -> list[int]:
        options = parser.parse_args(["--tier", "a:1:1:1", "--trace", str(trace), *flags])
        return [one.output_tokens for one in requests_of(Load("t", times, trace), options)]

    assert outputs(1, "--seconds", "4") == [1, 2, 3, 4]
    assert outputs(2, "--seconds", "4") == list(range(1, 9))
    assert outputs(2, "--count", "3", "--seconds", "1") == [1, 2, 3]
    assert outputs(1, "--seconds", "4", "--longest", "12") == [1, 2]


def test_another_run_has_the_same_tiers_and_lengths_and_other_prompts() -> None:
    async def sent(name: str) -> list[tuple[str, list[int]]]:
        got = []

        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            got.append((request.headers["x-adapt-tier"], body["input_ids"]))
            return web.Response(text='data: {"meta_info": {"completion_tokens": 1}}\n\n')

        app = web.Application()
        app.router.add_post("/generate", generate)
        requests = [Request(0.001 * number, 20 + number, 1) for number in range(8)]
        async with TestServer(app) as server:
            seen, _ = await replay(
                str(server.make_url("")).rstrip("/"), "m", requests, [STRICT, LOOSE], 0, 1000, True, name
            )
        assert [one.status for one in seen] == [200] * 8
        return sorted(got, key=lambda one: len(one[1]))

    first, again, other = (asyncio.run(sent(name)) for name in ("code 1", "code 1", "code 2"))
    assert first == again
    assert [(tier, len(prompt)) for tier, prompt in first] == [(tier, len(prompt)) for tier, prompt in other]
    assert all(mine[:4] != theirs[:4] for (_, mine), (_, theirs) in zip(first, other, strict=True))
