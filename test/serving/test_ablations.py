"""A server with mechanisms switched off for a measurement: it says so, runs without them, and answers as ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from switch_client import HTTP, LIMIT_S, Answer, ask, engines_of, prompt, switch

from server import Server

pytestmark = pytest.mark.engine

ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
BODY = {
    "input_ids": prompt(60, 5),
    "sampling_params": {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True},
    "stream": True,
}
SHORT = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}


def switched(server: Server) -> dict[str, Any]:
    """Two requests over a switch; what the switch says of itself. Their answers are the same as without one."""
    assert switch(server, ONES).status_code == 200
    alone = ask(server, BODY)
    deadline = monotonic() + LIMIT_S
    while (report := _over_a_switch(server, alone))["requests"] != {"migrated": 2}:
        assert monotonic() < deadline, f"one had always ended before the switch; the last one said {report}"
    return report


def _over_a_switch(server: Server, alone: Answer) -> dict[str, Any]:
    """One attempt: on a busy machine this process may not run while the requests do."""
    assert switch(server, ONES).status_code == 200
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, server, BODY) for _ in range(2)]
        while sum(engine["in_flight"] for engine in engines_of(server).values()) < 2:
            if any(answer.done() for answer in answers):
                break
        said = switch(server, TWO, "migrate")
        assert said.status_code == 200, said.text
        assert all(answer.result(LIMIT_S).equals(alone) for answer in answers)
    report: dict[str, Any] = said.json()
    return report


def test_requests_go_over_without_what_is_switched_off(start: Callable[..., Server]) -> None:
    server = start(
        "all_off",
        *("--adapt-virtual-gpus", "2", "--adapt-slo-config", "built-in", "--adapt-ablate-scheduler", "arrival"),
        *("--adapt-ablate-page-copies", "--adapt-ablate-stop-copy", "--adapt-ablate-reload-weights"),
    )
    log = server.log.read_text()
    (line,) = [line for line in log.splitlines() if "switched off for a measurement:" in line]
    assert all(word in line for word in ("scheduler", "a copy a page", "before a switch", "read them again"))
    # Each rank of three engines.
    assert log.count("KV arrives with a copy for each page, layer, K and V") == 4
    report = switched(server)
    assert report["ahead_tokens"] == 0 < report["kv_tokens"]
    assert "precopy" not in report["phases_ms"]
    assert 0 < report["steps_ms"]["reload"]["reload"] <= report["phases_ms"]["reload"] < report["pause_ms"]
    # Nothing is refused by arrival, whatever is asked for: with targets no engine could keep up with this.
    with ThreadPoolExecutor(16) as pool:
        said = [
            pool.submit(HTTP.post, f"{server.url}/generate", json={**BODY, "sampling_params": SHORT}).result
            for _ in range(16)
        ]
        assert {one(LIMIT_S).status_code for one in said} == {200}


def test_nothing_is_off_unless_it_is_asked_for(ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    log = server.log.read_text()
    assert "switched off" not in log and "with a copy for each page" not in log
    report = switched(server)
    assert report["ahead_tokens"] and "precopy" in report["phases_ms"] and "reload" not in report["phases_ms"]
