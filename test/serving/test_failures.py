"""Processes that die, clients that leave, and the end of the server: nothing is lost and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import leftovers
from server import Server

pytestmark = pytest.mark.engine

LONG = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}}
MIDDLE = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}
SHORT = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


def engines(server: Server) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]}


def until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait for a condition; returns how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def in_background(server: Server, body: dict[str, Any], results: list[httpx.Response]) -> threading.Thread:
    def post() -> None:
        results.append(httpx.post(f"{server.url}/generate", json=body, timeout=120))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def session_of(server: Server) -> list[psutil.Process]:
    """The processes that the server started, whoever their parent is now."""
    pid = server.pid
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def named(server: Server, title: str) -> int:
    [pid] = [p.pid for p in session_of(server) if title in " ".join(p.cmdline())]
    return pid


def files_of(server: Server) -> set[Path]:
    """What a server that runs might leave: its run folder, and shared memory that its processes have open."""
    return leftovers.folders_of(server.pid) | leftovers.shared_memory_of(server.pid)


def left(files: set[Path]) -> list[Path]:
    return [file for file in files if file.exists()]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Server]) -> Server:
    """Two TP 1 engines and nothing else, to kill."""
    return start("pair", "--adapt-virtual-gpus", "2", "--adapt-tp-sizes", "1", "--adapt-restart-limit", "100")


@pytest.fixture
def single(start_by_command: Callable[..., Server]) -> Iterator[Server]:
    """One engine; a new server for each test."""
    server = start_by_command("single", "--adapt-virtual-gpus", "1", "--adapt-drain-timeout", "20")
    yield server
    server.stop()


def test_a_client_that_leaves_frees_its_request(pair: Server) -> None:
    with httpx.stream("POST", f"{pair.url}/generate", json={**LONG, "stream": True}, timeout=180) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(e["in_flight"] for e in engines(pair).values()) >= 1
    until(lambda: sum(e["in_flight"] for e in engines(pair).values()) == 0, 10, "the request is aborted")


def test_abort_request_ends_it(pair: Server) -> None:
    results: list[httpx.Response] = []
    thread = in_background(pair, {**LONG, "rid": "to-be-aborted"}, results)
    until(lambda: sum(e["in_flight"] for e in engines(pair).values()) == 1, 10, "the request runs")
    assert httpx.post(f"{pair.url}/abort_request", json={"rid": "to-be-aborted"}).status_code == 200
    thread.join(180)
    assert results[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    until(lambda: sum(e["in_flight"] for e in engines(pair).values()) == 0, 5, "nothing is in flight")


def test_kill_an_engine_rank(pair: Server) -> None:
    whole = httpx.post(f"{pair.url}/generate", json=MIDDLE, timeout=180).json()
    results: list[httpx.Response] = []
    thread = in_background(pair, MIDDLE, results)
    until(lambda: any(e["in_flight"] for e in engines(pair).values()), 10, "the request runs")
    victim = next(e for e in engines(pair).values() if e["in_flight"])
    os.kill(victim["pids"][0], signal.SIGKILL)
    noticed = until(lambda: httpx.get(f"{pair.url}/health").json()["status"] == "degraded", 2, "health says so")
    assert noticed < 2
    assert httpx.get(f"{pair.url}/health").json()["down"] == [victim["name"]]
    # The other engine goes on with its request and serves meanwhile, and the first one comes back.
    thread.join(180)
    assert results[0].json()["output_ids"] == whole["output_ids"]
    assert httpx.post(f"{pair.url}/generate", json=SHORT, timeout=180).status_code == 200
    until(lambda: engines(pair)[victim["name"]]["state"] in ("starting", "ready"), 60, "it is started")
    started = engines(pair)[victim["name"]]
    assert len(started["pids"]) == len(victim["pids"]) and not set(started["pids"]) & set(victim["pids"])
    assert f"(pid {victim['pids'][0]}) ended while serving" in started["last_death"]
    until(lambda: engines(pair)[victim["name"]]["state"] == "ready", 60, "the engine is back")
    assert engines(pair)[victim["name"]]["restarts"] == victim["restarts"] + 1
    assert httpx.get(f"{pair.url}/health").json()["status"] == "ok"


def test_kill_during_a_stream(pair: Server) -> None:
    whole = httpx.post(f"{pair.url}/generate", json=MIDDLE, timeout=180).json()
    with httpx.stream("POST", f"{pair.url}/generate", json={**MIDDLE, "stream": True}, timeout=180) as response:
        lines = response.iter_lines()
        next(lines)
        victim = next(e for e in engines(pair).values() if e["in_flight"])
        os.kill(victim["pids"][0], signal.SIGKILL)
        chunks = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    assert (chunks[-1]["output_ids"], chunks[-1]["text"]) == (whole["output_ids"], whole["text"])
    until(lambda: engines(pair)[victim["name"]]["state"] == "ready", 60, "the engine is back")


def test_no_engine_left(pair: Server) -> None:
    for engine in engines(pair).values():
        os.kill(engine["pids"][0], signal.SIGKILL)
    until(lambda: httpx.get(f"{pair.url}/ready").status_code == 503, 2, "the server is not ready")
    refused = httpx.post(f"{pair.url}/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2}, timeout=180)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"
    assert refused.headers["retry-after"] == "1"
    native = httpx.post(f"{pair.url}/generate", json=SHORT, timeout=180)
    if native.status_code == 503:
        assert native.json()["code"] == "no_engine"
    until(lambda: httpx.get(f"{pair.url}/ready").status_code == 200, 60, "the server is ready again")
    assert httpx.post(f"{pair.url}/generate", json=SHORT, timeout=180).status_code == 200


def test_sigterm_to_all_processes_drains(single: Server) -> None:
    """As `timeout`, terminals and service managers send it. What was accepted is answered, also requests of several
    samples, which come to the router in two steps, the second one long after the front has accepted them."""
    files = files_of(single)
    body = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 600}}
    results: list[httpx.Response] = []
    thread = in_background(single, body, results)
    until(lambda: any(e["in_flight"] for e in engines(single).values()), 10, "the request runs")
    started = session_of(single)
    # The process that is named is the one that signals are for.
    assert f"ready: {single.url}, process {single.pid}\n" in single.log.read_text()
    sampled = {**LONG, "sampling_params": {**LONG["sampling_params"], "n": 2, "max_new_tokens": 200}}
    many: list[httpx.Response] = []
    threads = [in_background(single, sampled, many) for _ in range(8)]
    until(lambda: sum(e["in_flight"] for e in engines(single).values()) > 1, 30, "the first of them has come")
    os.killpg(os.getpgid(single.pid), signal.SIGTERM)

    def refuses() -> bool:
        answer = httpx.post(f"{single.url}/generate", json=SHORT, timeout=180)
        return answer.status_code == 503 and answer.json()["code"] == "draining"

    until(refuses, 5, "new requests are refused")
    for one in (thread, *threads):
        one.join(180)
    assert results[0].status_code == 200
    assert results[0].json()["meta_info"]["completion_tokens"] == 600
    assert {answer.status_code for answer in many} <= {200, 503}
    served = [answer.json() for answer in many if answer.status_code == 200]
    lengths = [[one["meta_info"]["completion_tokens"] for one in answer] for answer in served]
    assert lengths == [[200, 200]] * len(served)
    said = re.search(r"shutting down: (\d+) requests to finish", single.log.read_text())
    assert said is not None and len(served) + 1 == int(said[1])
    assert single.wait(180) == 0
    assert not [process for process in started if process.is_running()]
    assert left(files) == []


@pytest.mark.parametrize("sig", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGHUP])
def test_drain_timeout_ends_requests_with_an_error(
    start_by_command: Callable[..., Server], sig: signal.Signals
) -> None:
    server = start_by_command("impatient", "--adapt-virtual-gpus", "1", "--adapt-drain-timeout", "0.2")
    results: list[httpx.Response] = []
    thread = in_background(server, LONG, results)
    until(lambda: any(e["in_flight"] for e in engines(server).values()), 10, "the request runs")
    # Ctrl-C goes to every process of the foreground group, and so does a hang-up of its terminal.
    os.killpg(server.pid, sig)
    thread.join(180)
    assert results[0].status_code == 503
    assert "shut down before this request was done" in results[0].text
    assert server.wait(180) == 0


@pytest.mark.parametrize(
    ("title", "told"),
    [
        ("sglang_adapt::router", "error: "),
        pytest.param("sglang::detokenizer", "error: ", marks=pytest.mark.full),
        pytest.param("sglang_adapt::forkserver", "error: the forkserver ended", marks=pytest.mark.full),
    ],
)
def test_death_of_a_central_process_ends_the_server(single: Server, title: str, told: str) -> None:
    files = files_of(single)
    started = session_of(single)
    os.kill(named(single, title), signal.SIGKILL)
    assert single.wait(180) == 1
    assert told in single.log.read_text()
    assert not [process for process in started if process.is_running()]
    assert left(files) == []


def test_death_of_the_front_is_told(single: Server) -> None:
    files = files_of(single)
    os.kill(named(single, "sglang_adapt::front"), signal.SIGKILL)
    assert single.wait(180) == 1
    assert "error: the front ended with SIGKILL (a line above says so if another" in single.log.read_text()
    assert left(files) == []


def test_kill_the_first_process(single: Server) -> None:
    shared = leftovers.shared_memory_of(single.pid)
    started = session_of(single)
    os.kill(single.pid, signal.SIGKILL)
    single.wait(5)
    until(lambda: not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 5, "no orphan")
    # The run's folder stays until the next start; nobody is left to remove it.
    assert left(shared) == []
