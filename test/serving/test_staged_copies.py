"""A server whose KV goes through host memory: answers are stock's, whatever moves, and whoever leaves or dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from switch_client import HTTP, LIMIT_S, Answer, ask, bodies, engines_of, layout_of, switch
from test_layout_switch import check_ledgers, check_pages, handed_over, in_flight, traffic, until
from test_weights_keeper import keepers

from layouts import blocks_by_gpu
from server import Server

pytestmark = pytest.mark.engine

ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
SPLIT, OTHER_SPLIT = "tp1@0:prefill,tp1@1:decode", "tp1@0:decode,tp1@1:prefill"
WITHOUT_KEEPER = "is up; try again shortly"
"""All engines go with the only keeper."""
EXPECTED = dict[str, tuple[dict[str, Any], Answer]]


@pytest.fixture(scope="module")
def staged(start: Callable[..., Server]) -> Server:
    flags = ["--adapt-virtual-gpus", "2", "--adapt-kv-copy", "staged", "--adapt-restart-limit", "100"]
    return start("staged", *flags, "--chunked-prefill-size", "64", "--constrained-json-disable-any-whitespace")


@pytest.fixture(scope="module")
def expected(stock: Server, staged: Server) -> EXPECTED:
    """A request of each kind, and stock's answer. What stock draws by a seed depends on its batches, so that answer is
    ours, of before anything moves."""
    asked = bodies(40)
    return {kind: (body, ask(staged if kind == "seeded" else stock, body)) for kind, body in asked.items()}


def home(server: Server) -> None:
    until(lambda: all(e["state"] == "ready" for e in engines_of(server).values()), "all engines are ready")
    assert switch(server, ONES, "migrate").status_code == 200


@pytest.fixture(scope="module")
def total(staged: Server) -> dict[int, int]:
    home(staged)
    return blocks_by_gpu(engines_of(staged))


def test_the_way_is_told(staged: Server) -> None:
    assert HTTP.get(f"{staged.url}/server_info").json()["adapt_kv_copy"] == "staged"
    assert layout_of(staged)["kv_copy"] == "staged"
    log = staged.log.read_text()
    assert "KV between GPUs: staged: through two buffers in host memory" in log


def test_answers_are_stocks_while_the_layout_changes(staged: Server, expected: EXPECTED, total: dict[int, int]) -> None:
    copied = 0
    with traffic(staged, expected) as clients:
        for layout in (TWO, ONES, TWO, SPLIT, OTHER_SPLIT, TWO, ONES):
            until(lambda: in_flight(staged) >= 4, "requests run")
            answer = switch(staged, layout, "migrate")
            assert answer.status_code == 200, answer.text
            assert answer.json()["failures"] == []
            copied += answer.json()["kv_bytes"]
            check_ledgers(staged, total)
            if ":" in layout:
                count = handed_over(staged)
                until(lambda count=count: handed_over(staged) > count + 8, "requests are handed over")
    assert clients.right and clients.left
    # Several times what the two buffers of a virtual GPU hold.
    assert copied > 10 * 2 * (128 << 10)
    home(staged)
    check_pages(staged, total)


def test_what_is_handed_over_alone_is_stocks(staged: Server, expected: EXPECTED, total: dict[int, int]) -> None:
    home(staged)
    assert switch(staged, SPLIT).status_code == 200
    count = handed_over(staged)
    for kind, (body, answer) in expected.items():
        assert ask(staged, body).equals(answer), kind
    assert handed_over(staged) - count >= len(expected)
    check_pages(staged, total)


@pytest.mark.parametrize("victim", ["tp1@0", "tp2@0-1", "keeper"])
def test_a_death_in_a_switch_loses_nothing(
    staged: Server, expected: EXPECTED, total: dict[int, int], victim: str
) -> None:
    home(staged)
    with traffic(staged, expected, leave=False) as clients:
        until(lambda: in_flight(staged) >= 6, "requests run")
        [keeper] = keepers(staged)
        clients.refusal = WITHOUT_KEEPER if victim == "keeper" else None
        pid = keeper if victim == "keeper" else engines_of(staged)[victim]["pids"][-1]
        answers: list[httpx.Response] = []
        switching = threading.Thread(target=lambda: answers.append(switch(staged, TWO, "migrate")))
        switching.start()
        os.kill(pid, signal.SIGKILL)
        switching.join(LIMIT_S)
        assert answers[0].status_code in (200, 409), answers[0].text
        until(lambda: all(e["state"] == "ready" for e in engines_of(staged).values()), "all engines are back")
        right = sum(clients.right.values())
        until(lambda: sum(clients.right.values()) > right + 4, "requests are served")
    home(staged)
    check_ledgers(staged, total)


@pytest.mark.parametrize("victim", ["tp1@0", "tp1@1", "keeper"])
def test_a_death_while_requests_are_handed_over_loses_nothing(
    staged: Server, expected: EXPECTED, total: dict[int, int], victim: str
) -> None:
    home(staged)
    assert switch(staged, SPLIT).status_code == 200
    with traffic(staged, expected, leave=False) as clients:
        count = handed_over(staged)
        until(lambda: handed_over(staged) > count + 4, "requests are handed over")
        [keeper] = keepers(staged)
        clients.refusal = WITHOUT_KEEPER if victim == "keeper" else None
        os.kill(keeper if victim == "keeper" else engines_of(staged)[victim]["pids"][-1], signal.SIGKILL)
        until(lambda: any(e["state"] != "ready" for e in engines_of(staged).values()), "the death is seen")
        until(lambda: all(e["state"] == "ready" for e in engines_of(staged).values()), "all engines are back")
        count = handed_over(staged)
        until(lambda: handed_over(staged) > count + 4, "requests are handed over again")
    assert clients.right
    check_pages(staged, total)
    assert "leak detected" not in staged.log.read_text()
