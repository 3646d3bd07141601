"""A server whose layout follows low load, bursts and long prompts (`--adapt-policy auto`), on two virtual GPUs.

On two CPU cores a wide engine is never quicker, so the planner is given a profile in which it is, as on GPUs: what is
tested is that the layout follows, not that it pays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from switch_client import HTTP, LIMIT_S, Answer, ask, layout_of, prompt, switch

from server import Server
from sglang_adapt.core.overheads import VIRTUAL_GPU
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, TpProfile, write_profile
from sglang_adapt.demo import demo_model_path
from sglang_adapt.upstream.front import parse_server_args, profile_key

pytestmark = pytest.mark.engine

ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
TOKENS = 16
CLIENTS = 16
POOL_TOKENS = 1024
"""At TP 1; twice as many at TP 2. Stock's has 32,768."""
LONGEST = {ONES: POOL_TOKENS - 2 * 8, TWO: 2 * (POOL_TOKENS - 2 * 8)}
PAUSE_S = 0.7
"""Between the requests of the low load, as its clients have it: at most one and a half a second."""


def profile(path: Path) -> Path:
    """At TP 2 a request alone takes half the time, and 64 take twelve times that of TP 1."""
    args = parse_server_args(["--model-path", str(demo_model_path()), "--dtype", "float32"])
    prefill = tuple(PrefillPoint(tokens, 0, 4.0 + 0.01 * tokens) for tokens in (16, 1024))

    def size(tp: int, one_ms: float, many_ms: float) -> TpProfile:
        steps = ((1, one_ms), (64, many_ms))
        return TpProfile(
            tp, prefill, tuple(DecodePoint(batch, context, ms) for batch, ms in steps for context in (1, 4096))
        )

    write_profile(path, Profile(profile_key(args, VIRTUAL_GPU), (size(1, 8.0, 20.0), size(2, 4.0, 250.0))))
    return path


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    file = profile(tmp_path_factory.mktemp("profile") / "profile.json")
    flags = ["--adapt-virtual-gpus", "2", "--adapt-policy", "auto", "--adapt-interval", "0.3", "--enable-metrics"]
    flags += ["--max-total-tokens", str(POOL_TOKENS)]
    return start("follows", *flags, "--adapt-profile", str(file))


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[tuple[dict[str, Any], Answer]]:
    """Requests, and stock's greedy answers to them."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    asked = [{"input_ids": prompt(20 + 5 * at, at), "sampling_params": sampling, "stream": True} for at in range(8)]
    return [(body, ask(stock, body)) for body in asked]


def low_load(server: Server, expected: list[tuple[dict[str, Any], Answer]], until: Callable[[], bool]) -> int:
    """One request at a time, at most one each `PAUSE_S`; returns how many."""
    deadline = time.monotonic() + LIMIT_S
    for number in count():
        if until():
            return number
        assert time.monotonic() < deadline, layout_of(server)
        due = time.monotonic() + PAUSE_S
        body, answer = expected[number % len(expected)]
        assert ask(server, body).equals(answer)
        time.sleep(max(0.0, due - time.monotonic()))
    raise AssertionError


@contextmanager
def burst(server: Server, expected: list[tuple[dict[str, Any], Answer]]) -> Iterator[list[int]]:
    """As many requests at a time as there are clients, while it lasts; the list has a number for each answer."""
    stop = threading.Event()
    right: list[int] = []

    def client(number: int) -> None:
        for turn in count(number):
            if stop.is_set():
                return
            body, answer = expected[turn % len(expected)]
            assert ask(server, body).equals(answer)
            right.append(number)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield right
        finally:
            stop.set()
        for one in clients:
            one.result(LIMIT_S)


def wait_for(condition: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, layout_of(server)
        time.sleep(0.05)


def active(server: Server) -> str:
    layout: str = HTTP.get(f"{server.url}/adapt/engines").json()["layout"]
    return layout


def test_the_layout_follows_and_all_answers_are_stocks(
    server: Server, expected: list[tuple[dict[str, Any], Answer]]
) -> None:
    for _ in range(2):
        low_load(server, expected, lambda: active(server) == TWO)
        with burst(server, expected) as right:
            wait_for(lambda: active(server) == ONES, server)
            wanted = len(right) + CLIENTS
            wait_for(lambda right=right, wanted=wanted: len(right) >= wanted, server)
    low_load(server, expected, lambda: active(server) == TWO)
    said = layout_of(server)
    assert (said["policy"], said["control"], said["trigger"], said["active"]) == ("auto", "planner", "load", TWO)
    assert {one["outcome"] for one in said["switches"]} == {"switched"}
    assert [one["to"] for one in said["switches"]].count(ONES) >= 2
    assert all(one["reason"].startswith("load: load ") for one in said["switches"])
    # Requests moved with it.
    assert sum(sum(one["requests"].values()) for one in said["switches"]) > 0
    metrics = HTTP.get(f"{server.url}/metrics").text
    moves = [line for line in metrics.splitlines() if line.startswith("sglang_adapt:plans_total") and '"move"' in line]
    made = sum(float(line.split()[-1]) for line in moves if 'trigger="load"' in line)
    assert made >= len(said["switches"])


def longest_prompt(server: Server) -> int:
    tokens: int = HTTP.get(f"{server.url}/server_info").json()["max_req_input_len"]
    return tokens


def long_amid_others(
    server: Server,
    pool: ThreadPoolExecutor,
    right: list[int],
    long: tuple[dict[str, Any], Answer],
    steady: tuple[dict[str, Any], Answer],
) -> bool:
    """A prompt that only a wide engine holds, sent while narrow ones serve; whether it was why the layout changed."""
    wait_for(lambda: active(server) == ONES, server)
    assert longest_prompt(server) == LONGEST[TWO] - 5
    before = len(right)
    other = pool.submit(ask, server, steady[0])
    wait_for(lambda: len(right) >= before + CLIENTS, server)
    sent = pool.submit(ask, server, long[0])
    wait_for(lambda: (said := layout_of(server))["active"] == TWO and said["switching_to"] is None, server)
    bound: bool = layout_of(server)["switches"][-1]["reason"].startswith("long_context: a request of ")
    if bound:
        # No one can take its engine from it.
        refused = switch(server, ONES)
        assert refused.status_code == 409, refused.text
        assert f"hold requests of {LONGEST[ONES]}; let it end first (strategy drain)" in refused.json()["message"]
    assert sent.result(LIMIT_S).equals(long[1])
    assert other.result(LIMIT_S).equals(steady[1])
    # It is let go afterwards, and the others have gone on all the time.
    wait_for(lambda: active(server) == ONES, server)
    assert len(right) >= before + 2 * CLIENTS
    return bound


def test_a_prompt_that_only_a_wide_engine_holds_amid_others(
    server: Server, stock: Server, expected: list[tuple[dict[str, Any], Answer]]
) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": prompt(LONGEST[ONES] * 3 // 2, 99), "sampling_params": greedy, "stream": True}
    steady = body | {"input_ids": prompt(40, 98), "sampling_params": greedy | {"max_new_tokens": 400}}
    answer, steady_answer = ask(stock, body), ask(stock, steady)
    with burst(server, expected) as right, ThreadPoolExecutor(2) as pool:
        # On a machine so busy that its load looks low, the planner may have gone over just then, for the load's sake.
        wait_for(lambda: long_amid_others(server, pool, right, (body, answer), (steady, steady_answer)), server)
    bound = [one for one in layout_of(server)["switches"] if one["reason"].startswith("long_context: a request of ")]
    assert (bound[-1]["outcome"], bound[-1]["to"]) == ("switched", TWO)
    assert sum(bound[-1]["requests"].values()) > 0
    metrics = HTTP.get(f"{server.url}/metrics").text.splitlines()
    assert any('decision="move"' in line and 'trigger="long_context"' in line for line in metrics)
    text = HTTP.post(f"{server.url}/generate", json=body | {"input_ids": prompt(LONGEST[TWO], 1)}).text
    assert f"exceeds the maximum allowed length ({LONGEST[TWO] - 5} tokens): tp2@0-1, the widest engine" in text


def test_an_operator_takes_control_and_gives_it_back(
    server: Server, expected: list[tuple[dict[str, Any], Answer]]
) -> None:
    assert switch(server, ONES).status_code == 200
    before = layout_of(server)
    assert (before["control"], before["trigger"]) == ("operator", "operator")
    # The planner goes on to tell what it would do, and does not do it.
    low_load(server, expected, lambda: (layout_of(server)["planner"] or {}).get("move", False))
    assert active(server) == ONES
    # In its hands nothing wider is bound, and that is the limit.
    assert longest_prompt(server) == LONGEST[ONES] - 5
    body = {"input_ids": prompt(LONGEST[ONES], 1), "sampling_params": {"max_new_tokens": 4}}
    too_long = HTTP.post(f"{server.url}/generate", json=body)
    assert too_long.status_code == 400
    assert "tp2@0-1 would hold 2016: let the planner decide again (POST /adapt/layout with auto)" in too_long.text
    assert switch(server, "auto").json() == {"active": ONES, "control": "planner"}
    low_load(server, expected, lambda: active(server) == TWO)


def test_what_the_planner_would_do(server: Server) -> None:
    url = f"{server.url}/adapt/plan"
    wide, narrow = HTTP.get(f"{url}?rates=0.5").json(), HTTP.get(f"{url}?rates=50").json()
    assert wide["options"][0]["engines"] == "1 x TP 2"
    assert narrow["options"][0]["engines"] == "2 x TP 1"
    capacity = {row["tp"]: row["capacity_rps"] for row in narrow["estimates"]}
    assert capacity[2] < 50 < 2 * capacity[1]
    now = HTTP.get(url).json()
    assert now["layout"] == active(server) and {row["tier"] for row in now["demand"]} == {"all"}
    assert HTTP.get(f"{url}?rates=gold:5").status_code == 400
    assert "give rates as ?rates=20, or leave rates out" in HTTP.get(f"{url}?rates=many").text
