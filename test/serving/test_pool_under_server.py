"""The server's KV pools: who has which blocks, more work than fits at once, requests that never fit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server import Server

pytestmark = pytest.mark.engine

BLOCKS = 64
TOKENS = 16 * BLOCKS
STANDBY = 3
BODY = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


@pytest.fixture(scope="module")
def small(start: Callable[..., Server]) -> Server:
    """One engine at TP 2, idle ones at TP 1, and a small pool."""
    pool = ("--max-total-tokens", str(TOKENS), "--page-size", "16")
    return start("small", "--adapt-virtual-gpus", "2", "--adapt-layout", "tp2@0-1", *pool)


def engines(server: Server) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]}


def blocks(server: Server) -> dict[str, tuple[int, int]]:
    return {name: (engine["leased_blocks"], engine["free_blocks"]) for name, engine in engines(server).items()}


def body_of(tokens: int, new: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [7 + i % 500 for i in range(tokens)], "sampling_params": sampling}


def generate(server: Server, tokens: int, new: int) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body_of(tokens, new), timeout=120)


def last_chunk(server: Server, tokens: int, new: int, begun: threading.Event) -> dict[str, Any]:
    """The whole answer of a stream; `begun` is set when its first token is there."""
    lines: list[str] = []
    body = body_of(tokens, new) | {"stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                lines.append(line)
                begun.set()
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    return answer


LEASES = {"tp1@0": (STANDBY, 0), "tp1@1": (STANDBY, 0), "tp2@0-1": (BLOCKS, 0)}


def test_the_layout_has_all_blocks(small: Server) -> None:
    assert blocks(small) == LEASES


@pytest.mark.parametrize(("layout", "tokens"), [("tp1@0,tp1@1", TOKENS - 32), ("tp2@0-1", 2 * (TOKENS - 32))])
def test_the_longest_request_is_what_the_layout_holds(small: Server, layout: str, tokens: int) -> None:
    assert httpx.post(f"{small.url}/adapt/layout", json={"layout": layout}, timeout=180).status_code == 200
    refused = generate(small, tokens - 5, 4)
    assert refused.status_code == 400
    assert f"exceeds the maximum allowed length ({tokens - 5} tokens): layout {layout} holds" in refused.text
    assert ("start the server with --adapt-policy auto" in refused.text) == (tokens < TOKENS)
    longest = generate(small, tokens - 6, 4)
    assert longest.status_code == 200
    assert longest.json()["meta_info"]["completion_tokens"] == 4
    assert httpx.get(f"{small.url}/server_info", timeout=180).json()["max_req_input_len"] == tokens - 5


def test_more_requests_than_fit_at_once_wait_and_end(small: Server) -> None:
    """Eight of 700 tokens in a pool of 2048 at TP 2."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: generate(small, 600 + i, 100), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert {answer.json()["meta_info"]["completion_tokens"] for answer in answers} == {100}


def go_over(server: Server, layout: str, strategy: str) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/adapt/layout", json={"layout": layout, "strategy": strategy}, timeout=180)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()["requests"]
    return report


def kept(server: Server) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{server.url}/adapt/layout", timeout=180).json()["kept"]
    return found


@pytest.mark.parametrize(("tokens", "new"), [(1600, 20), (700, 900)])
def test_what_is_kept_gives_its_blocks_to_a_request_that_outgrows_the_rest(
    small: Server, tokens: int, new: int
) -> None:
    """One of 300 tokens and more is kept on a GPU, so that TP 2 holds about 1,500 tokens beside it, of 1,984."""
    go_over(small, "tp1@0,tp1@1", "migrate")
    alone = generate(small, 300, 680).json()["output_ids"]
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        paused = pool.submit(last_chunk, small, 300, 680, begun)
        assert begun.wait(180)
        assert go_over(small, "tp2@0-1", "keep") == {"kept": 1}
        # What fits beside it leaves it where it is.
        assert generate(small, 50, 20).status_code == 200
        assert sum(kept(small).values()) == 1
        big = pool.submit(generate, small, tokens, new)
        wait_until(lambda: not kept(small))
        answers = [generate(small, 50, 20), big.result()]
        whole = paused.result()
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text[:200] for answer in answers]
    assert [answer.json()["meta_info"]["completion_tokens"] for answer in answers] == [20, new]
    assert whole["output_ids"] == alone
    wait_until(lambda: blocks(small) == LEASES)


def wait_until(condition: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 180, "not within 180 s"
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["tp2@0-1", "tp1@1"])
def test_a_killed_engine_has_its_blocks_again_and_serves(small: Server, name: str) -> None:
    before = httpx.post(f"{small.url}/generate", json=BODY, timeout=180).json()["output_ids"]
    restarts = engines(small)[name]["restarts"]
    os.kill(engines(small)[name]["pids"][0], signal.SIGKILL)
    started = time.monotonic()
    while not (engines(small)[name]["restarts"] > restarts and engines(small)[name]["state"] == "ready"):
        assert time.monotonic() - started < 180, "the engine is not back within 180 s"
        time.sleep(0.05)
    assert blocks(small) == LEASES
    after = httpx.post(f"{small.url}/generate", json=BODY, timeout=180).json()["output_ids"]
    assert after == before
