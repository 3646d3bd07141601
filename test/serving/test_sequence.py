"""A server whose wide engine runs large batches sequence-parallel: answers, switches of layout, what it says of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from switch_client import HTTP, LIMIT_S, Answer, ask, bodies, engines_of, layout_of, prompt, switch

from layouts import blocks_by_gpu
from server import Server

pytestmark = pytest.mark.engine

THRESHOLD = 4
"""Prompts run sequence-parallel, and decode steps of 4 requests and more: both ways alternate as requests come."""
TOKENS = 48
Asked = dict[str, tuple[dict[str, Any], Answer]]


@dataclass(frozen=True)
class Case:
    """TP sizes of a server, layouts of the narrow engines and of the wide one, and how that runs such batches."""

    tp_sizes: str
    narrow: str
    wide: str
    base: dict[str, int]


CASES = (
    Case("1,2", "tp1@0,tp1@1", "tp2@0-1", {"sp": 2, "tp": 1}),
    pytest.param(Case("2,4", "tp2@0-1,tp2@2-3", "tp4@0-3", {"sp": 2, "tp": 2}), marks=pytest.mark.full),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.wide)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], case: Case) -> Server:
    return start(
        f"sequences-{case.wide}",
        "--adapt-virtual-gpus",
        case.tp_sizes.split(",")[-1],
        "--adapt-tp-sizes",
        case.tp_sizes,
        "--adapt-sp",
        str(THRESHOLD),
        "--chunked-prefill-size",
        "64",
        "--enable-metrics",
        "--constrained-json-disable-any-whitespace",
    )


@pytest.fixture(scope="module")
def expected(server: Server, case: Case) -> Asked:
    """A request of each kind and its answer of narrow engines, which is stock's."""
    assert switch(server, case.narrow).status_code == 200
    return {kind: (body, ask(server, body)) for kind, body in bodies(TOKENS).items()}


def batches(server: Server, case: Case) -> dict[str, dict[str, int]]:
    """Batches of the wide engine so far, by mode and kind."""
    said = layout_of(server)["engines"][case.wide]["sequence"]
    assert (said["tokens"], said["base"], said["unable"]) == (THRESHOLD, case.base, {})
    counted: dict[str, dict[str, int]] = said["batches"]
    return counted


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.03)


def in_flight(server: Server) -> int:
    return sum(engine["in_flight"] for engine in engines_of(server).values())


@contextmanager
def clients(server: Server, expected: Asked) -> Iterator[None]:
    """Two clients for each request beside the test, which ask again until it is over; all answers have been right."""
    over = threading.Event()

    def client(kind: str) -> list[str]:
        body, answer = expected[kind]
        wrong = []
        while True:
            if not ask(server, body).equals(answer):
                wrong.append(kind)
            if over.is_set():
                return wrong

    with ThreadPoolExecutor(2 * len(expected)) as pool:
        futures = [pool.submit(client, kind) for kind in (*expected, *expected)]
        try:
            yield
        finally:
            over.set()
    assert [kind for future in futures for kind in future.result()] == []


def test_answers_are_those_of_narrow_engines(server: Server, case: Case, expected: Asked) -> None:
    assert switch(server, case.wide).status_code == 200
    before = batches(server, case)
    with clients(server, expected):
        pass
    for body, answer in expected.values():
        # Alone, and with what it has asked before in the prefix cache.
        assert ask(server, body).equals(answer)
    after = batches(server, case)
    grown = {mode: {kind: after[mode][kind] - count for kind, count in before[mode].items()} for mode in after}
    assert grown["sp"]["prefill"] >= 10
    assert min(grown["sp"]["decode"], grown["tp"]["decode"]) >= 10


def test_requests_go_on_through_switches(server: Server, case: Case, expected: Asked) -> None:
    assert switch(server, case.narrow).status_code == 200
    total = blocks_by_gpu(engines_of(server))
    before = batches(server, case)["sp"]["decode"]
    moved = 0
    with clients(server, expected):
        for layout in (case.wide, case.narrow, case.wide, case.narrow, case.wide):
            until(lambda: in_flight(server) >= 2, "requests run")
            steps = batches(server, case)["sp"]["decode"]
            report = switch(server, layout, "migrate").json()
            assert report["failures"] == []
            moved += report["requests"].get("migrated", 0)
            if layout == case.wide:
                until(
                    lambda steps=steps: batches(server, case)["sp"]["decode"] > steps or in_flight(server) < THRESHOLD,
                    "a sequence-parallel decode step",
                )
    assert moved >= 4
    assert batches(server, case)["sp"]["decode"] > before
    assert blocks_by_gpu(engines_of(server)) == total


def test_what_is_aborted_leaves_nothing(server: Server, case: Case, expected: Asked) -> None:
    assert switch(server, case.wide).status_code == 200
    endless = {"sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
    for number in range(4):
        body = {**endless, "input_ids": prompt(150 + number, number)}
        with HTTP.stream("POST", f"{server.url}/generate", json=body) as response:
            lines = response.iter_lines()
            for _ in range(number):
                next(lines, None)
    until(lambda: engines_of(server)[case.wide]["in_flight"] == 0, "those whose clients have left are gone")
    with clients(server, expected):
        pass


def test_the_metric_says_how_batches_ran(server: Server, case: Case) -> None:
    assert switch(server, case.wide).status_code == 200
    assert ask(server, bodies(4)["long"]).reason == "length"
    lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
    values = {
        line.partition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("sglang_adapt:engine_batches_total")
    }
    for mode in ("sp", "tp"):
        for kind, count in batches(server, case)[mode].items():
            [value] = [
                v for k, v in values.items() if f'mode="{mode}"' in k and f'kind="{kind}"' in k and case.wide in k
            ]
            assert value == count, (mode, kind)
    assert not any(name in series for name in case.narrow.split(",") for series in values)
