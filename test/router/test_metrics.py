"""The metrics of switches, as the front's process reads them from the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STORY = """
import json
import sys

from sglang_adapt.core.layout import parse_layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.situation import Trigger
from sglang_adapt.router.metrics import SwitchMetrics
from sglang_adapt.router.switch import Outcome, Switch

ones, two = (parse_layout(text, (1, 2), 2) for text in ("tp1@0,tp1@1", "tp2@0-1"))
metrics = SwitchMetrics(json.loads(sys.argv[1]))

done = Switch(ones, two, Strategy.AUTO, "test", Trigger.LOAD)
done.requests.update(migrated=3, recomputed=1)
done.kv_bytes = 4096
done.phases_ms |= {"prepare": 400.0, "export": 30.0, "plan": 1.0, "adopt": 9.0, "release": 5.0}
metrics.ended(done, Outcome.SWITCHED)
metrics.ended(done, Outcome.IMPAIRED)

refused = Switch(two, ones, Strategy.KEEP, "test")
metrics.ended(refused, Outcome.REFUSED)
refused.phases_ms |= {"prepare": 1.0, "export": 30.0, "plan": 1.0}
refused.requests.update(migrated=100)
refused.kv_bytes = 10**9
metrics.ended(refused, Outcome.REFUSED)
metrics.ended(Switch(ones, ones, Strategy.AUTO, "nothing to do"), Outcome.SWITCHED)

from types import SimpleNamespace

from sglang_adapt.router.metrics import PlanMetrics

plans = PlanMetrics(json.loads(sys.argv[1]))
for trigger, move in ((None, False), (Trigger.LOAD, False), (Trigger.LOAD, True), (Trigger.PRIORITY, True)):
    plans.planned(SimpleNamespace(trigger=trigger, move=move), 0.002)

from sglang_adapt.core.messages import EngineStatus, RouterStatus
from sglang_adapt.router.state_metrics import StateMetrics

def engine(name, state, active, in_flight, restarts):
    return EngineStatus(name, state, active, in_flight, restarts, [])

state = StateMetrics(json.loads(sys.argv[1]))
blocks = {0: {"free": 7, "leased": 3}, 1: {"free": 2, "leased": 8}}
status = RouterStatus("tp1@0,tp1@1", [engine("tp1@0", "ready", True, 4, 1), engine("tp2@0-1", "ready", False, 0, 0)])
state.tell(status, 9, blocks)
status = RouterStatus("tp2@0-1", [engine("tp1@0", "dead", False, 0, 3), engine("tp2@0-1", "ready", True, 5, 0)])
state.tell(status, 7, {0: {"free": 6, "leased": 4}, 1: {"free": 2, "leased": 8}})

from prometheus_client import CollectorRegistry, multiprocess

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps([[s.name, s.labels, s.value] for family in registry.collect() for s in family.samples]))
"""


def tell(folder: Path | None, labels: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    env |= {} if folder is None else {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-c", STORY, json.dumps(labels)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_is_counted(tmp_path: Path) -> None:
    run = tell(tmp_path, {})
    assert run.returncode == 0, run.stderr
    samples = {
        (name, *sorted(labels.items())): value
        for name, labels, value in json.loads(run.stdout)
        if not name.endswith("_bucket")
    }

    def value(name: str, **labels: str) -> float:
        return float(samples[(f"sglang_adapt:{name}", *sorted(labels.items()))])

    there = {"from": "tp1@0,tp1@1", "to": "tp2@0-1", "reason": "load", "strategy": "auto"}
    back = {"from": "tp2@0-1", "to": "tp1@0,tp1@1", "reason": "operator", "strategy": "keep"}
    assert value("switches_total", **there, outcome="switched") == 1
    assert value("switches_total", **there, outcome="impaired") == 1
    assert value("switches_total", **back, outcome="refused") == 2
    # A switch to the layout that serves is none.
    assert sum(count for (name, *_), count in samples.items() if name == "sglang_adapt:switches_total") == 4
    assert value("switch_pause_seconds_sum", outcome="switched") == 0.04
    # One of the two was refused before anything was paused.
    assert value("switch_pause_seconds_count", outcome="refused") == 1
    assert value("switch_pause_seconds_count", outcome="broken_off") == 0
    assert value("switch_seconds_count", phase="prepare") == 3
    assert value("switch_seconds_count", phase="release") == 2
    assert value("plans_total", trigger="none", decision="stay") == 1
    assert value("plans_total", trigger="load", decision="wait") == 1
    assert value("plans_total", trigger="load", decision="move") == 1
    assert value("plans_total", trigger="priority", decision="move") == 1
    assert value("plans_total", trigger="long_context", decision="move") == 0
    assert value("plan_seconds_count") == 4
    # What was refused has moved nothing.
    assert value("switch_requests_total", way="migrated") == 6
    assert value("switch_requests_total", way="recomputed") == 2
    assert value("switch_requests_total", way="kept") == 0
    assert value("kv_migrated_bytes_total") == 8192


def test_what_is_now(tmp_path: Path) -> None:
    run = tell(tmp_path, {})
    assert run.returncode == 0, run.stderr
    samples = [(name.removeprefix("sglang_adapt:"), labels, value) for name, labels, value in json.loads(run.stdout)]

    def values(metric: str, label: str) -> dict[str, float]:
        return {labels[label]: value for name, labels, value in samples if name == metric}

    assert values("active_layout", "engine") == {"tp1@0": 0, "tp2@0-1": 1}
    assert values("engine_up", "engine") == {"tp1@0": 0, "tp2@0-1": 1}
    assert values("engine_requests", "engine") == {"tp1@0": 0, "tp2@0-1": 5}
    assert values("engine_restarts_total", "engine") == {"tp1@0": 3, "tp2@0-1": 0}
    assert [value for name, _, value in samples if name == "waiting_requests"] == [2]
    blocks = {(labels["gpu"], labels["state"]): value for name, labels, value in samples if name == "kv_blocks"}
    assert blocks == {("0", "free"): 6, ("0", "leased"): 4, ("1", "free"): 2, ("1", "leased"): 8}


def test_further_labels_are_on_every_metric(tmp_path: Path) -> None:
    run = tell(tmp_path, {"cluster": "a"})
    assert run.returncode == 0, run.stderr
    samples = json.loads(run.stdout)
    assert {labels.get("cluster") for _, labels, _ in samples} == {"a"}
    assert [value for name, _, value in samples if name == "sglang_adapt:kv_migrated_bytes_total"] == [8192]


def test_metrics_that_nobody_would_see_are_an_error() -> None:
    run = tell(None, {})
    assert run.returncode != 0
    assert "MetricsFolderError: PROMETHEUS_MULTIPROC_DIR was not set" in run.stderr


DEATH = """
import json
import os
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess

from sglang_adapt.router.dead_gauges import forget_gauges

gauge = Gauge("running", "Requests.", ["engine"], multiprocess_mode="mostrecent")
counter = Counter("ended", "Requests.", ["engine"])
engines = []
for name in ("e0", "e1"):
    pid = os.fork()
    if pid == 0:
        gauge.labels(name).set(5)
        counter.labels(name).inc(7)
        os._exit(0)
    os.waitpid(pid, 0)
    engines.append(pid)

def now():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return sorted((s.name, s.labels["engine"], s.value) for family in registry.collect() for s in family.samples)

folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
listed = sorted(folder.glob("*.db"))
before = now()
forget_gauges(folder, engines[0])
after = now()
values = multiprocess.MmapedDict(str(folder / f"gauge_mostrecent_{engines[0]}.db"))
values.write_value(json.dumps(["running", "running", {"engine": "e0"}, "Requests."]), 3, 9.0)
values.close()
print(json.dumps([before, after, now(), sorted(folder.iterdir()) == listed]))
"""


def test_gauges_of_a_dead_engine_go_and_its_counters_stay(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", DEATH], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    before, after, reused, same_files = json.loads(run.stdout)
    ended = [["ended_total", "e0", 7], ["ended_total", "e1", 7]]
    assert before == [*ended, ["running", "e0", 5], ["running", "e1", 5]]
    assert after == [*ended, ["running", "e1", 5]]
    # A process that gets the same id writes to the same file.
    assert reused == [*ended, ["running", "e0", 3], ["running", "e1", 5]]
    # One that has listed the folder before finds all files, and nothing else has come.
    assert same_files
