"""Tiers on a real server: terms of requests, refusals before tokenizing, background work, reload, the request log."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import Server

pytestmark = pytest.mark.engine

TIERS = """\
default: standard
tiers:
  - {name: picky, ttft_ms: 60000, tpot_ms: 60000, when_infeasible: reject, queue_limit: 2, service_tiers: [priority]}
  - {name: standard, ttft_ms: 60000, tpot_ms: 60000}
  - {name: night, background: true, service_tiers: [flex]}
"""


@pytest.fixture(scope="module")
def tiered(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Path, Path]:
    """(server of one virtual GPU, its file of tiers, its request log)."""
    folder = tmp_path_factory.mktemp("tiers")
    config, log = folder / "tiers.yaml", folder / "requests.jsonl"
    config.write_text(TIERS)
    flags = ["--adapt-virtual-gpus", "1", "--adapt-slo-config", str(config), "--adapt-request-log", str(log)]
    return start("tiered", *flags, "--enable-metrics"), config, log


def ask(server: Server, tier: str | None = None, tokens: int = 4, **headers: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "demo", "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
    if tier is not None:
        body["service_tier"] = tier
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


def logged(log: Path, count: int) -> list[dict[str, Any]]:
    """The log once it has so many lines."""
    deadline = time.monotonic() + 180
    while len(lines := log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    return [json.loads(line) for line in lines]


def test_each_request_is_of_the_tier_that_it_names(tiered: tuple[Server, Path, Path]) -> None:
    server, _, log = tiered
    before = len(log.read_text().splitlines())
    used = [ask(server, tier).headers["x-adapt-tier"] for tier in (None, "auto", "priority", "flex", "picky")]
    assert used == ["standard", "standard", "picky", "night", "picky"]
    assert ask(server, "flex", **{"x-adapt-tier": "picky"}).headers["x-adapt-tier"] == "picky"
    # A batch has as many requests of the tier as prompts.
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{server.url}/generate", json=body, headers={"x-adapt-tier": "night"}).status_code == 200
    lines = logged(log, before + 8)[before:]
    assert sorted(line["tier"] for line in lines) == sorted([*used, "picky", "night", "night"])
    outcomes = {line["tier"]: line["outcome"] for line in lines}
    assert outcomes == {"standard": "feasible", "picky": "feasible", "night": "background"}
    assert all(line["ended"] == "finished" and line["ttft_ms"] > 0 for line in lines)


def test_own_targets_are_used(tiered: tuple[Server, Path, Path]) -> None:
    server, _, log = tiered
    before = len(log.read_text().splitlines())
    assert ask(server, **{"x-slo-ttft-ms": "12345"}).status_code == 200
    assert logged(log, before + 1)[before]["ttft_target_ms"] == 12345.0


@pytest.mark.parametrize(
    ("tier", "headers", "code"),
    [
        ("gold", {}, "unknown_tier"),
        (None, {"x-slo-tpot-ms": "-1"}, "bad_target"),
        (None, {"x-slo-tpot-ms": "0.001"}, "unmeetable_target"),
    ],
)
def test_bad_terms_get_a_400(
    tiered: tuple[Server, Path, Path], tier: str | None, headers: dict[str, str], code: str
) -> None:
    answer = ask(tiered[0], tier, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_full_tier_refuses_with_the_time_to_come_again(tiered: tuple[Server, Path, Path]) -> None:
    server = tiered[0]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask(server, "picky", tokens=16), range(24)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "tier_capacity_exhausted"
    text = httpx.get(f"{server.url}/metrics", timeout=180, follow_redirects=True).text
    assert 'sglang_adapt:admission_total{outcome="refused",tier="picky"}' in text
    assert 'sglang_adapt:goodput_requests_total{tier="picky"}' in text


def counted(server: Server, name: str, *labels: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=180, follow_redirects=True).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


def test_every_refusal_is_counted_and_logged_once(tiered: tuple[Server, Path, Path]) -> None:
    """Whichever way it went: most are told before the app."""
    server, _, log = tiered
    ours = ("sglang_adapt:admission_total", 'outcome="refused"', 'tier="picky"')
    stocks = ("sglang:http_responses_total", 'endpoint="/v1/completions"', 'status_code="429"')
    requests = ("sglang:http_requests_total", 'endpoint="/v1/completions"', 'method="POST"')
    series = (ours, stocks, requests)
    before = [counted(server, *one) for one in series]
    lines = len(log.read_text().splitlines())

    def some(number: int) -> list[httpx.Response]:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 64, "ignore_eos": True, "service_tier": "picky"}
        with httpx.Client(timeout=120) as client:
            return [client.post(f"{server.url}/v1/completions", json=body) for _ in range(40)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [answer for some in pool.map(some, range(8)) for answer in some]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) > 160 and {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 and "date" in answer.headers for answer in refused)
    assert all(answer.json()["error"]["code"] == "tier_capacity_exhausted" for answer in refused)
    after = [counted(server, *one) for one in series]
    assert [now - was for now, was in zip(after, before, strict=True)] == [len(refused), len(refused), len(answers)]
    told = logged(log, lines + len(answers))[lines:]
    assert sum(line["outcome"] == "refused" for line in told) == len(refused)


def test_tiers_are_read_again_upon_sighup_and_a_bad_file_is_not_used(tiered: tuple[Server, Path, Path]) -> None:
    server, config, _ = tiered
    config.write_text(TIERS.replace("standard", "other"))
    os.kill(server.pid, signal.SIGHUP)
    deadline = time.monotonic() + 180
    while httpx.get(f"{server.url}/adapt/slo", timeout=180).json()["config"]["default"] != "other":
        assert time.monotonic() < deadline, server.tail()
        time.sleep(0.05)
    assert ask(server).headers["x-adapt-tier"] == "other"
    config.write_text(TIERS.replace("60000", "-1"))
    answer = httpx.post(f"{server.url}/adapt/slo", timeout=180)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_slo_config")
    assert "line 3, tiers[0].ttft_ms" in answer.json()["message"]
    assert ask(server).headers["x-adapt-tier"] == "other"
