"""What an operator does to a server that runs: metrics, control requests that fail, a port that is taken."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from forked_servers import run_to_its_end

from server import Server
from sglang_adapt.core.profile import read_profile
from sglang_adapt.policy.profile import MeasuredTimes

pytestmark = pytest.mark.engine


@pytest.fixture
def metered(ours: Callable[[str], Server]) -> Server:
    """Two TP 1 engines and one of TP 2, with metrics."""
    return ours("tp1")


def test_every_engine_has_its_own_gauges(metered: Server) -> None:
    text = httpx.get(f"{metered.url}/metrics", timeout=180, follow_redirects=True).text
    for gauge in ("num_running_reqs", "token_usage"):
        engines = [re.findall(r'engine="([^"]*)"', line) for line in re.findall(rf"^sglang:{gauge}{{.*", text, re.M)]
        assert sorted(engines) == [["tp1@0"], ["tp1@1"], ["tp2@0-1"]]


def test_switches_are_counted(metered: Server) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"{metered.url}/metrics", timeout=180, follow_redirects=True).text
        lines = re.findall(r"^sglang_adapt:(\S+) (\S+)$", text, re.M)
        return {name: float(value) for name, value in lines}

    def switch(layout: str, strategy: str) -> int:
        body = {"layout": layout, "strategy": strategy}
        return httpx.post(f"{metered.url}/adapt/layout", json=body, timeout=180).status_code

    there = 'switches_total{from="tp1@0,tp1@1",outcome="switched",reason="operator",strategy="migrate",to="tp2@0-1"}'
    pauses = 'switch_pause_seconds_count{outcome="switched"}'
    before = values()
    assert 'switch_requests_total{way="migrated"}' in before
    assert switch("tp2@0-1", "migrate") == 200
    assert switch("tp2@0-1", "migrate") == 200
    after = values()
    assert after[there] == before.get(there, 0.0) + 1
    assert after[pauses] == before[pauses] + 1
    for phase in ("prepare", "export", "adopt", "release"):
        count = f'switch_seconds_count{{phase="{phase}"}}'
        assert after[count] == before[count] + 1
    assert switch("tp1@0,tp1@1", "migrate") == 200


def test_a_profile_is_measured_and_the_layout_stays(metered: Server, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    # A process of its own: what is loaded beside it here would make pauses in what it sees.
    command = [sys.executable, "-m", "sglang_adapt.profile", "--url", metered.url, "--output", str(file)]
    command += ["--longest", "110", "--repeats", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    measured = read_profile(file)
    assert [size.tp for size in measured.sizes] == [1, 2]
    for size in measured.sizes:
        assert size.beside_ms is not None and size.beside_ms > 0
        assert MeasuredTimes(size).latency_ms < size.prefill[0].ms
    assert httpx.get(f"{metered.url}/adapt/layout", timeout=180).json()["active"] == "tp1@0,tp1@1"


@pytest.mark.parametrize("path", ["/start_expert_distribution_record", "/send_weights_to_remote_instance"])
def test_a_control_request_that_fails_says_why_and_ends_no_engine(metered: Server, path: str) -> None:
    before = _restarts(metered)
    body = {"master_address": "127.0.0.1", "ports": "1,2", "group_name": "none"} if "remote" in path else None
    answer = httpx.post(f"{metered.url}{path}", json=body, timeout=180)
    assert answer.status_code in (400, 500)
    assert "tp1@0: " in answer.text
    assert _restarts(metered) == before


def _restarts(server: Server) -> list[int]:
    return [engine["restarts"] for engine in httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]]


def test_a_second_server_on_the_port_is_refused(metered: Server, tmp_path: Path) -> None:
    port = metered.url.rsplit(":", 1)[1]
    log = tmp_path / "second.log"
    assert run_to_its_end(["--port", port], log, 120) == 2
    assert f"error: 127.0.0.1:{port} cannot be listened on (Address already in use)" in log.read_text()
    assert httpx.get(f"{metered.url}/health", timeout=180).json()["status"] == "ok"
