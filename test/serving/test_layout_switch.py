"""Switches of layout under a running server on four virtual GPUs, as clients and operators see them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from switch_client import (
    HTTP,
    LIMIT_S,
    Answer,
    RequestError,
    ask,
    bodies,
    engines_of,
    layout_of,
    prompt,
    switch,
)

from layouts import blocks_by_gpu
from server import Server
from sglang_adapt import ctl

pytestmark = pytest.mark.engine

ONES = "tp1@0,tp1@1,tp1@2,tp1@3"
TWOS = "tp2@0-1,tp2@2-3"
FOUR = "tp4@0-3"
MIXED = "tp2@0-1,tp1@2,tp1@3"
SPLIT = "tp2@0-1:prefill,tp1@2:decode,tp1@3:decode"
OTHER_SPLIT = "tp2@0-1:decode,tp1@2:prefill,tp1@3:prefill"
HALF_SPLIT = "tp2@0-1,tp1@2:prefill,tp1@3"
EVERY_PAIR = [TWOS, FOUR, ONES, FOUR, TWOS, ONES]
"""From ONES: each ordered pair of TP sizes once."""
TOKENS = 40
ENDLESS = {
    "input_ids": prompt(30, 9),
    "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(
        "switching",
        "--adapt-virtual-gpus",
        "4",
        "--adapt-tp-sizes",
        "1,2,4",
        "--adapt-restart-limit",
        "100",
        "--chunked-prefill-size",
        "64",
        "--constrained-json-disable-any-whitespace",
    )


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, tuple[dict[str, Any], Answer]]:
    """A request of each kind and its answer when nothing is switched."""
    home(server)
    asked = bodies(TOKENS)
    text = HTTP.post(f"{server.url}/generate", json={**asked["plain"], "stream": False}).json()["text"]
    stop = text[len(text) // 2 :][:4]
    sampling = {**asked["plain"]["sampling_params"], "stop": [stop]}
    asked["stopped"] = {**asked["plain"], "sampling_params": sampling}
    answers = {kind: (body, ask(server, body)) for kind, body in asked.items()}
    assert answers["stopped"][1].reason == "stop"
    assert len(answers["stopped"][1].ids[0]) < TOKENS
    assert len(answers["two"][1].ids) == 2
    assert answers["seeded"][1].ids != answers["plain"][1].ids
    assert len(answers["logprobs"][1].logprobs) >= TOKENS
    return answers


def home(server: Server) -> None:
    """All engines up, nothing kept, layout ONES."""
    until(lambda: all(e["state"] == "ready" for e in engines_of(server).values()), "all engines are ready")
    for name in layout_of(server)["kept"]:
        assert switch(server, {"tp1": ONES, "tp2": TWOS, "tp4": FOUR}[name[:3]], "migrate").status_code == 200
    assert switch(server, ONES, "migrate").status_code == 200


def until(condition: Callable[[], Any], what: str, seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.03)


def check_ledgers(server: Server, total: dict[int, int]) -> None:
    """Right after a switch: every block is someone's, and the ranks hold what the router's ledgers say."""
    engines, said = engines_of(server), layout_of(server)
    for name, engine in said["engines"].items():
        assert engine["leased_blocks"] == engines[name]["leased_blocks"], name
    blocks = blocks_by_gpu(engines)
    if said["kept"]:
        assert all(blocks[gpu] <= total[gpu] for gpu in total), (blocks, total, said["kept"])
    else:
        assert blocks == total
        # All that is free is the layout's.
        assert {engine["free_blocks"] for engine in engines.values()} == {0}
    assert set(said["serving"]) == {name.partition(":")[0] for name in said["active"].split(",")}


@pytest.fixture(scope="module")
def total(server: Server) -> dict[int, int]:
    home(server)
    return blocks_by_gpu(engines_of(server))


class Traffic:
    """Clients that ask for one answer after another, and leave now and then.

    Attributes:
        refusal: part of a 503 that a new request may get; what was accepted is answered whatever happens.
    """

    def __init__(self, server: Server, expected: dict[str, tuple[dict[str, Any], Answer]]) -> None:
        self._server = server
        self._expected = expected
        self._stop = threading.Event()
        self.refusal: str | None = None
        self.wrong: list[tuple[str, object]] = []
        self.right: dict[str, int] = {}
        self.left = 0

    def client(self, number: int) -> None:
        kinds = sorted(self._expected)
        for turn in range(number, 1_000_000):
            if self._stop.is_set():
                return
            kind = kinds[turn % len(kinds)]
            body, answer = self._expected[kind]
            try:
                got: object = ask(self._server, body)
            except RequestError as error:
                got = error
                if self.refusal is not None and self.refusal in str(error):
                    self._stop.wait(0.1)
                    continue
            if isinstance(got, Answer) and got.equals(answer):
                self.right[kind] = self.right.get(kind, 0) + 1
            else:
                self.wrong.append((kind, got))

    def leaver(self) -> None:
        """Goes away after a few tokens, in the middle of whatever the server does."""
        rng = random.Random(3)
        while not self._stop.is_set():
            body = {**ENDLESS, "stream": True}
            with HTTP.stream("POST", f"{self._server.url}/generate", json=body) as response:
                lines = response.iter_lines()
                for _ in range(rng.randrange(1, 12)):
                    next(lines, None)
            self.left += 1

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def traffic(
    server: Server, expected: dict[str, tuple[dict[str, Any], Answer]], leave: bool = True
) -> Iterator[Traffic]:
    """Clients beside the test; in the end all have had the right answers."""
    clients = Traffic(server, expected)
    with ThreadPoolExecutor(7) as pool:
        futures = [pool.submit(clients.client, number) for number in range(6)]
        futures += [pool.submit(clients.leaver)] if leave else []
        try:
            yield clients
        except BaseException:
            clients.stop()
            HTTP.post(f"{server.url}/abort_request", json={"abort_all": True})
            raise
        clients.stop()
    for future in futures:
        future.result()
    assert clients.wrong == []


def in_background(server: Server, body: dict[str, Any], results: list[httpx.Response]) -> threading.Thread:
    def post() -> None:
        results.append(HTTP.post(f"{server.url}/generate", json=body))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def in_flight(server: Server) -> int:
    return sum(engine["in_flight"] for engine in engines_of(server).values())


@pytest.mark.parametrize("strategy", ["migrate", "recompute", "auto", "keep"])
def test_answers_do_not_depend_on_switches(
    server: Server, expected: dict[str, tuple[dict[str, Any], Answer]], total: dict[int, int], strategy: str
) -> None:
    ways: dict[str, int] = {}
    with traffic(server, expected, leave=strategy != "keep") as clients:
        for layout in EVERY_PAIR:
            until(lambda: in_flight(server) >= 4 or strategy == "keep", "requests run")
            answer = switch(server, layout, strategy)
            assert answer.status_code == 200, answer.text
            report = answer.json()
            assert report["failures"] == []
            for way, count in report["requests"].items():
                ways[way] = ways.get(way, 0) + count
            check_ledgers(server, total)
        home(server)
    check_ledgers(server, total)
    assert clients.right
    moved = {"migrate": "migrated", "recompute": "recomputed", "keep": "resumed"}
    assert strategy == "auto" or ways.get(moved[strategy], 0) > 3, ways


def test_drain_waits_for_what_runs_and_serves_what_comes(
    server: Server, expected: dict[str, tuple[dict[str, Any], Answer]], total: dict[int, int]
) -> None:
    home(server)
    with traffic(server, expected, leave=False) as clients:
        for layout in (MIXED, ONES):
            until(lambda: in_flight(server) >= 4, "requests run")
            report = switch(server, layout, "drain").json()
            assert report["requests"].get("migrated", 0) == 0
            check_ledgers(server, total)
    assert clients.right


def test_one_switch_at_a_time(server: Server, total: dict[int, int]) -> None:
    home(server)
    results: list[httpx.Response] = []
    thread = in_background(server, {**ENDLESS, "rid": "in-the-way"}, results)
    until(lambda: in_flight(server) == 1, "the request runs")
    first: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: first.append(switch(server, FOUR, "drain")))
    waiting.start()
    until(lambda: layout_of(server)["switching_to"] == FOUR, "the first switch is under way")
    second = switch(server, TWOS)
    assert second.status_code == 409
    assert f"a switch from {ONES} to {FOUR} is under way" in second.text
    # What comes while all engines are paused waits, and is served by the new layout.
    late: list[httpx.Response] = []
    other = in_background(server, bodies(8)["whole"], late)
    HTTP.post(f"{server.url}/abort_request", json={"rid": "in-the-way"})
    for one in (thread, waiting, other):
        one.join(LIMIT_S)
    assert results[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert first[0].status_code == 200, first[0].text
    assert late[0].status_code == 200
    check_ledgers(server, total)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"layout": "tp1@0,tp1@1"}, "no engine uses GPU 2, 3"),
        ({"layout": "tp3@0-2,tp1@3"}, "TP size 3 is not among --adapt-tp-sizes 1, 2, 4"),
        ({"layout": "nonsense"}, "is not an engine"),
        ({"layout": "tp2@0-1:prefill,tp2@2-3:prefill"}, "all engines only prefill"),
        ({"layout": FOUR, "strategy": "teleport"}, "strategies are auto, migrate, keep, drain, recompute"),
        ({"layout": FOUR, "when": "now"}, "unknown field"),
        ({}, "missing required field"),
    ],
)
def test_bad_orders_are_refused_with_the_reason(server: Server, body: dict[str, Any], reason: str) -> None:
    before = layout_of(server)["active"]
    answer = HTTP.post(f"{server.url}/adapt/layout", json=body)
    assert answer.status_code == 400
    assert reason in answer.text
    assert layout_of(server)["active"] == before


def test_a_body_that_is_no_json(server: Server) -> None:
    answer = HTTP.post(f"{server.url}/adapt/layout", content=b"tp4@0-3")
    assert answer.status_code == 400
    assert "send {" in answer.json()["message"]


def test_the_layout_is_read_back_from_the_engines(server: Server) -> None:
    home(server)
    before = layout_of(server)
    assert (before["active"], before["switching_to"], before["kept"]) == (ONES, None, {})
    assert switch(server, MIXED).json()["to"] == MIXED
    after = layout_of(server)
    assert set(after["serving"]) == {"tp2@0-1", "tp1@2", "tp1@3"}
    assert after["epoch"] == before["epoch"] + 1
    # To where it is already: nothing happens.
    again = switch(server, MIXED).json()
    assert (again["requests"], again["phases_ms"]) == ({}, {})
    assert layout_of(server)["epoch"] == after["epoch"]


def test_ctl_tells_by_its_exit_code(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    home(server)
    assert ctl.main(["--url", server.url, "layout"]) == 0
    assert json.loads(capsys.readouterr().out)["active"] == ONES
    assert ctl.main(["--url", server.url, "layout", TWOS, "--strategy", "migrate"]) == 0
    assert json.loads(capsys.readouterr().out)["active"] == TWOS
    assert ctl.main(["--url", server.url, "layout", "tp1@0"]) == 1
    assert "no engine uses GPU" in capsys.readouterr().err
    assert ctl.main(["--url", "http://127.0.0.1:9", "layout"]) == 2
    assert "no answer from" in capsys.readouterr().err


def kept_away(server: Server, results: list[httpx.Response], *bodies: dict[str, Any]) -> list[threading.Thread]:
    """Requests that run in ONES and are kept there while TWOS serves."""
    home(server)
    threads = [in_background(server, body, results) for body in bodies]
    until(lambda: in_flight(server) == len(bodies), "the requests run")
    report = switch(server, TWOS, "keep").json()
    assert report["requests"] == {"kept": len(bodies)}
    assert sum(layout_of(server)["kept"].values()) == len(bodies)
    return threads


def test_a_kept_request_that_is_aborted_ends_at_once(server: Server, total: dict[int, int]) -> None:
    results: list[httpx.Response] = []
    [thread] = kept_away(server, results, {**ENDLESS, "rid": "kept"})
    HTTP.post(f"{server.url}/abort_request", json={"rid": "kept"})
    thread.join(180)
    assert results[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    home(server)
    until(lambda: in_flight(server) == 0, "the engine has forgotten it")
    check_ledgers(server, total)


def test_kept_requests_go_on_elsewhere_when_their_engine_dies(server: Server, total: dict[int, int]) -> None:
    results: list[httpx.Response] = []
    body = bodies(1000)["whole"]
    alone = ask(server, body)
    threads = kept_away(server, results, body, body)
    for name, engine in engines_of(server).items():
        if name in layout_of(server)["kept"]:
            os.kill(engine["pids"][0], signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT_S)
    assert [answer.status_code for answer in results] == [200] * 2, [answer.text[:300] for answer in results]
    assert [answer.json()["output_ids"] for answer in results] == alone.ids * 2
    home(server)
    check_ledgers(server, total)


@pytest.mark.parametrize(
    ("victim", "strategy"), [("tp1@0", "migrate"), ("tp2@0-1", "migrate"), ("tp2@2-3", "recompute")]
)
def test_an_engine_that_dies_in_a_switch(
    server: Server,
    expected: dict[str, tuple[dict[str, Any], Answer]],
    total: dict[int, int],
    victim: str,
    strategy: str,
) -> None:
    home(server)
    with traffic(server, expected, leave=False) as clients:
        until(lambda: in_flight(server) >= 6, "requests run")
        pid = engines_of(server)[victim]["pids"][-1]
        answers: list[httpx.Response] = []
        switching = threading.Thread(target=lambda: answers.append(switch(server, TWOS, strategy)))
        switching.start()
        os.kill(pid, signal.SIGKILL)
        switching.join(LIMIT_S)
        assert answers[0].status_code in (200, 409), answers[0].text
        until(lambda: all(e["state"] == "ready" for e in engines_of(server).values()), "the engine is back")
        right = sum(clients.right.values())
        until(lambda: sum(clients.right.values()) > right + 4, "requests are served")
    home(server)
    check_ledgers(server, total)


def check_pages(server: Server, total: dict[int, int]) -> None:
    """Nothing runs, nothing is handed over, and every block of an engine is free or in its prefix cache."""
    until(lambda: in_flight(server) == 0, "all requests have ended")
    until(lambda: sum(layout_of(server)["handovers"][key] for key in ("waiting", "under_way")) == 0, "nothing moves")
    check_ledgers(server, total)
    pages = {1: 8, 2: 16, 4: 32}

    def unaccounted() -> dict[str, int]:
        engines = layout_of(server)["engines"]
        return {
            name: engine["leased_blocks"] - engine["free_blocks"] - engine["cached_tokens"] // pages[int(name[2])]
            for name, engine in engines.items()
        }

    until(lambda: not any(unaccounted().values()), "no block is lost")


def handed_over(server: Server) -> int:
    count: int = layout_of(server)["handovers"].get("handed_over", 0)
    return count


def test_answers_do_not_depend_on_roles(
    server: Server, expected: dict[str, tuple[dict[str, Any], Answer]], total: dict[int, int]
) -> None:
    home(server)
    with traffic(server, expected) as clients:
        for layout in (SPLIT, OTHER_SPLIT, MIXED, HALF_SPLIT, SPLIT, FOUR, OTHER_SPLIT):
            before = switch(server, layout, "migrate")
            assert before.status_code == 200, before.text
            assert before.json()["failures"] == []
            check_ledgers(server, total)
            if ":" in layout:
                count = handed_over(server)
                until(lambda count=count: handed_over(server) > count + 8, "requests are handed over")
    assert clients.right
    check_pages(server, total)
    # Once more without any neighbour: what is not decoded where it was read is the same as well.
    count = handed_over(server)
    for kind, (body, answer) in expected.items():
        assert ask(server, body).equals(answer), kind
    assert handed_over(server) - count >= len(expected)
    check_pages(server, total)


def test_a_change_of_roles_moves_nothing(server: Server, total: dict[int, int]) -> None:
    home(server)
    assert switch(server, MIXED, "migrate").status_code == 200
    epoch = layout_of(server)["epoch"]
    report = switch(server, SPLIT).json()
    assert (report["from"], report["to"]) == (MIXED, SPLIT)
    assert (report["epoch"], report["requests"], report["phases_ms"]) == (epoch + 1, {}, {})
    said = layout_of(server)
    assert (said["switches"][-1]["to"], said["switches"][-1]["epoch"]) == (SPLIT, epoch + 1)
    assert (said["active"], said["epoch"]) == (SPLIT, epoch + 1)
    assert said["roles"] == {"tp2@0-1": "prefill", "tp1@2": "decode", "tp1@3": "decode"}
    assert engines_of(server)["tp1@2"]["role"] == "decode"
    check_ledgers(server, total)


def test_what_finds_no_slot_is_decoded_where_it_was_read(server: Server, total: dict[int, int]) -> None:
    home(server)
    assert switch(server, "tp2@0-1:prefill,tp2@2-3:decode", "migrate").status_code == 200
    before = layout_of(server)["handovers"].get("kept", 0)
    results: list[httpx.Response] = []
    # An engine has 64 slots.
    threads = [in_background(server, ENDLESS, results) for _ in range(68)]

    def all_decode() -> bool:
        """Also one that has waited its time for a slot, on a busy machine, goes on where it was read."""
        said, taken = layout_of(server)["handovers"], engines_of(server)["tp2@2-3"]["in_flight"]
        kept = said.get("kept", 0) - before
        assert taken <= 64
        return said["waiting"] == 0 and kept >= 4 and taken > 0 and taken + kept == 68

    until(all_decode, "slots are taken, and the others go on")
    HTTP.post(f"{server.url}/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join(LIMIT_S)
    reasons = [answer.json()["meta_info"]["finish_reason"]["type"] for answer in results]
    assert reasons == ["abort"] * 68
    check_pages(server, total)
    assert "leak detected" not in server.log.read_text()


def long_prompts(seed: int) -> list[dict[str, Any]]:
    """Of 11 parts: each by itself, two with one beginning, and one whose log probabilities are asked for."""
    shared = prompt(330, seed)
    ids = [prompt(700, seed + 1), shared + prompt(370, seed + 2), shared + prompt(350, seed + 3), prompt(690, seed + 4)]
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    asked: list[dict[str, Any]] = [{"input_ids": each, "sampling_params": greedy, "stream": True} for each in ids]
    asked[-1] |= {"return_logprob": True, "logprob_start_len": 0}
    return asked


def test_parts_of_long_prompts_go_ahead(server: Server, total: dict[int, int]) -> None:
    home(server)
    asked = {layout: long_prompts(seed) for layout, seed in ((SPLIT, 40), (OTHER_SPLIT, 50))}
    expected = {layout: [ask(server, body) for body in prompts] for layout, prompts in asked.items()}

    def ahead() -> int:
        return layout_of(server)["handovers"].get("ahead_tokens", 0)

    for layout, prompts in asked.items():
        assert switch(server, layout, "migrate").status_code == 200
        # What has been read before would be found, and not be read in parts.
        until(lambda: HTTP.post(f"{server.url}/flush_cache").status_code == 200, "nothing is cached")
        before, gone = ahead(), [{**ENDLESS, "input_ids": prompt(900, seed), "rid": f"gone{seed}"} for seed in (60, 61)]
        left: list[httpx.Response] = []
        leaving = [in_background(server, body, left) for body in gone]
        until(lambda: in_flight(server) == 2, "they have come")
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(ask, server, body) for body in prompts]
            for body in gone:
                assert HTTP.post(f"{server.url}/abort_request", json={"rid": body["rid"]}).status_code == 200
            for answer, right in zip(answers, expected[layout], strict=True):
                assert answer.result(LIMIT_S).equals(right)
        for thread in leaving:
            thread.join(LIMIT_S)
        assert [answer.json()["meta_info"]["finish_reason"]["type"] for answer in left] == ["abort"] * 2
        # All but two parts of each, or three: the last one, and what fills no block of TP 4.
        assert ahead() - before > 3 * 448
        check_pages(server, total)
    assert "leak detected" not in server.log.read_text()


@pytest.mark.parametrize("victim", ["tp2@0-1", "tp1@3"])
def test_an_engine_with_a_role_dies(
    server: Server, expected: dict[str, tuple[dict[str, Any], Answer]], total: dict[int, int], victim: str
) -> None:
    home(server)
    layout = SPLIT if victim == "tp2@0-1" else "tp2@0-1:prefill,tp1@2:prefill,tp1@3:decode"
    assert switch(server, layout, "migrate").status_code == 200
    with traffic(server, expected, leave=False) as clients:
        count = handed_over(server)
        until(lambda: handed_over(server) > count + 4, "requests are handed over")
        os.kill(engines_of(server)[victim]["pids"][-1], signal.SIGKILL)
        until(lambda: set(layout_of(server)["roles"].values()) == {"mixed"}, "the others are mixed meanwhile")
        until(lambda: victim in layout_of(server)["serving"], "the engine is back")
        assert set(layout_of(server)["roles"].values()) == {"prefill", "decode"}
        count = handed_over(server)
        until(lambda: handed_over(server) > count + 4, "requests are handed over again")
    assert clients.right
    check_pages(server, total)


def test_kept_requests_are_answered_before_the_server_ends(start: Callable[..., Server]) -> None:
    server = start("leaving", "--adapt-virtual-gpus", "2", "--adapt-drain-timeout", "60")
    body = {**ENDLESS, "sampling_params": {**ENDLESS["sampling_params"], "max_new_tokens": 400}}
    expected = ask(server, body)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, body)
        until(lambda: any(engine["in_flight"] for engine in engines_of(server).values()), "the request runs")
        report = switch(server, "tp2@0-1", "keep").json()
        assert report["requests"] == {"kept": 1}
        os.kill(server.pid, signal.SIGTERM)
        assert answer.result(LIMIT_S).equals(expected)
    assert server.wait(180) == 0
