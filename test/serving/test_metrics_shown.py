"""Metrics as a server exposes them: those documented and no others, bounded labels, all that board and alerts read."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from monitoring import MONITORING, ROOT, alert_queries, board_queries, needs, runnable
from prometheus_client.parser import text_string_to_metric_families

from server import Server
from sglang_adapt.core.layout import parse_layout
from sglang_adapt.kv.blocks import BlockState
from sglang_adapt.policy.admission import Outcome as AdmissionOutcome
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.situation import Trigger
from sglang_adapt.router.metrics import HANDOVER_OUTCOMES
from sglang_adapt.router.switch import Outcome, Phase, Way

pytestmark = pytest.mark.engine

TIERS = ("chat", "standard", "night")
ENGINES = {"tp1@0", "tp1@1", "tp2@0-1"}
LAYOUTS = {str(parse_layout(text, (1, 2), 2)) for text in ("tp1@0,tp1@1", "tp2@0-1")}
WORDS: dict[str, set[str]] = {
    "tier": set(TIERS),
    "engine": ENGINES,
    "gpu": {"0", "1"},
    "state": {state.name.lower() for state in BlockState},
    "from": LAYOUTS,
    "to": LAYOUTS,
    "reason": set(Trigger),
    "strategy": set(Strategy),
    "outcome": {*AdmissionOutcome, *Outcome, *HANDOVER_OUTCOMES},
    "phase": set(get_args(Phase)),
    "way": set(get_args(Way)),
    "which": {"ttft", "tpot"},
    "trigger": {*Trigger, "none"},
    "decision": {"stay", "wait", "move"},
    "mode": {"sp", "tp"},
    "kind": {"prefill", "decode"},
}


@dataclass(frozen=True)
class Family:
    """One metric: its type, labels, and the values that they have."""

    kind: str
    labels: frozenset[str]
    values: dict[str, set[str]]


@pytest.fixture(scope="module")
def used(shown: Server) -> Server:
    """The server after requests of each tier and a switch there and back."""
    for tier in TIERS:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "service_tier": tier}
        assert httpx.post(f"{shown.url}/v1/completions", json=body, timeout=180).status_code == 200
    for layout in ("tp2@0-1", "tp1@0,tp1@1"):
        assert httpx.post(f"{shown.url}/adapt/layout", json={"layout": layout}, timeout=180).status_code == 200
    return shown


def exposed(server: Server) -> dict[str, Family]:
    """All metrics now, by the names that their samples have."""
    text = httpx.get(f"{server.url}/metrics", timeout=180, follow_redirects=True).text
    families = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            known = families.setdefault(sample.name, Family(family.type, frozenset(sample.labels), {}))
            assert known.labels == frozenset(sample.labels), sample.name
            for label, value in sample.labels.items():
                known.values.setdefault(label, set()).add(value)
    return families


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric in docs/metrics.md."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) ?\|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name: (kind, frozenset(labels.replace(",", " ").split())) for name, kind, labels in rows}


def test_what_is_exposed_is_what_is_documented(used: Server) -> None:
    found = {}
    deadline = time.monotonic() + 180
    while set(found) != set(documented()) and time.monotonic() < deadline:
        # The state is told, and plans are made, every second.
        found = {}
        for name, family in exposed(used).items():
            if name.startswith("sglang_adapt:"):
                short = re.sub(r"_(bucket|count|sum)$", "", name) if family.kind == "histogram" else name
                found[short.removeprefix("sglang_adapt:")] = (family.kind, family.labels - {"le"})
    assert found == documented()


def test_labels_are_bounded(used: Server) -> None:
    for name, family in exposed(used).items():
        if name.startswith("sglang_adapt:"):
            for label, values in family.values.items():
                assert label == "le" or values <= WORDS[label], (name, label, values)


def test_nothing_of_a_request_becomes_a_label(used: Server) -> None:
    """Each value would be a set of series; only paths are known to be, by stock's `sglang:http_*` (docs/metrics.md)."""
    strange, number = "strange-0815", 4711
    named = {"user": strange, "rid": strange, "extra_key": strange, "routing_key": strange, "priority": number}
    completion = {"model": "demo", "prompt": "Hello", "max_tokens": 2, **named}
    generate = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}, **named}
    headers = {"x-adapt-tier": "chat", "x-custom-labels": f'{{"a": "{strange}"}}', "x-request-id": strange}
    asked = [
        ("/v1/completions", completion, {}, 200),
        ("/v1/completions", completion, headers, 200),
        ("/generate", {**generate, "conversation_id": strange}, {}, 200),
        ("/generate", {**generate, "text": ["Hello", "Hello"], "rid": [strange, "b"]}, {}, 200),
        ("/generate", {**generate, "custom_labels": {strange: strange}}, {}, 400),
        ("/generate", {**generate, "custom_labels": {"model_name": strange}}, {}, 400),
        ("/v1/completions", {**completion, "model": strange}, {}, 200),
        ("/v1/completions", {**completion, "service_tier": strange}, {}, 400),
        ("/v1/completions", completion, {"x-adapt-tier": strange}, 400),
    ]
    for path, body, extra, status in asked:
        answer = httpx.post(f"{used.url}{path}", json=body, headers=extra, timeout=180)
        assert answer.status_code == status, (path, body, answer.text)
    layout = {"layout": "tp1@0,tp1@1", "reason": strange}
    assert httpx.post(f"{used.url}/adapt/layout", json=layout, timeout=180).status_code == 200
    for name, family in exposed(used).items():
        for label, values in family.values.items():
            assert not values & {strange, str(number)}, (name, label)


def test_conventional_names_are_there(used: Server) -> None:
    names = {name.removeprefix("sglang_adapt:") for name in exposed(used) if name.startswith("sglang_adapt:")}
    counters = {"goodput_requests", "slo_violations", "admission", "switches", "kv_migrated_bytes"}
    histograms = {"time_to_first_token_seconds", "time_per_output_token_seconds", "switch_seconds"}
    expected = {f"{name}_total" for name in counters} | {f"{name}_bucket" for name in histograms}
    assert expected | {"active_layout", "kv_blocks"} <= names


@pytest.mark.parametrize("query", [*board_queries(), *alert_queries()])
def test_each_query_reads_what_is_exposed(used: Server, query: str) -> None:
    families = exposed(used)
    read = needs(query)
    assert read or query.startswith("up{")
    for name, labels in read.items():
        assert name in families, name
        assert labels <= families[name].labels, (name, labels - families[name].labels)


def test_names_keep_their_colon_whatever_format_is_asked_for(used: Server) -> None:
    """Prometheus before 3.0 asks for OpenMetrics first."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    text = httpx.get(f"{used.url}/metrics", headers={"accept": accept}, timeout=180).text
    assert "\nsglang_adapt:active_layout{" in text
    assert "\nsglang_adapt_" not in text


def test_what_a_query_needs() -> None:
    """The reader of queries itself: it must not miss a name or a label."""
    query = 'sum by (tier, le) (rate(sglang_adapt:x_bucket{a=~"b", instance="c"}[1m])) / sglang:y > 0'
    assert needs(query) == {"sglang_adapt:x_bucket": {"tier", "le", "a"}, "sglang:y": {"tier", "le"}}


@pytest.fixture(scope="module")
def prometheus(used: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Prometheus that scrapes the server each second, by our config."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is not installed (apt install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("server:30000", used.url.removeprefix("http://")).replace("5s", "1s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "alerts.yml", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
        try:
            url = f"http://{address}"
            deadline = time.monotonic() + 180
            while not _ask(url, "count_over_time(sglang_adapt:plans_total[1m]) > 2"):
                assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def _ask(url: str, query: str) -> list[Any]:
    """The result of a query; nothing while Prometheus is not ready."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=180)
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, (query, answer.text)
    result: list[Any] = answer.json()["data"]["result"]
    return result


def test_prometheus_itself_answers_the_queries(prometheus: str) -> None:
    empty = []
    for query in board_queries():
        if query.startswith("label_values("):
            continue
        if not _ask(prometheus, runnable(query)) and ">" not in query:
            empty.append(query)
    assert empty == []
    for query in alert_queries():
        _ask(prometheus, query)
    rules = httpx.get(f"{prometheus}/api/v1/rules", timeout=180).json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert firing == []


def test_promtool_accepts_config_and_rules() -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    command = [binary, "check", "config", str(Path(MONITORING) / "prometheus.yml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
