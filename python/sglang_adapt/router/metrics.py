"""Prometheus metrics of switches of layout, on stock's `/metrics` (`--enable-metrics`).

Each process of the server writes its metrics to files in one folder, from which the front answers `/metrics`; so this
process needs nothing but that folder. Labels are bounded: layouts, strategies, outcomes, ways and phases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.situation import Plan, Trigger
from sglang_adapt.router.switch import Outcome, Phase, Switch, Way

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms, in seconds: a pause takes tens of milliseconds, a drain up to its limit."""


class MetricsFolderError(RuntimeError):
    """Metrics of this process would stay in it, because the library for them was loaded too early."""


def check_folder() -> None:
    """Raises MetricsFolderError if `prometheus_client` was imported before its folder was set."""
    from prometheus_client import values

    if not values.ValueClass._multiprocess:
        raise MetricsFolderError(
            "PROMETHEUS_MULTIPROC_DIR was not set when prometheus_client was imported, so nobody would see the "
            "metrics of this process; start the server without --enable-metrics and report this"
        )


def metrics_folder() -> Path:
    """Where every process of the server writes its metrics; stock has made it before any of them starts."""
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])


class SwitchMetrics:
    """Counts switches as they end.

    - `sglang_adapt:switches_total{from,to,reason,strategy,outcome}`; reasons are those of `Trigger`
    - `sglang_adapt:switch_pause_seconds{outcome}`: how long the requests of the engines that left were paused
    - `sglang_adapt:switch_seconds{phase}`: how long each phase took
    - `sglang_adapt:switch_requests_total{way}`: what became of requests in switches that were made
    - `sglang_adapt:kv_migrated_bytes_total`: KV that was copied in them

    Args:
        labels: further labels of every metric, by name (`--extra-metric-labels`).

    Raises:
        MetricsFolderError: `prometheus_client` was imported before the folder was set.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        # Here, because it looks for the folder in the environment when it is imported.
        from prometheus_client import Counter, Histogram

        check_folder()
        self._labels = dict(labels)
        names = tuple(labels)
        self._switches = Counter(
            "sglang_adapt:switches",
            "Switches of layout that were asked for.",
            (*names, "from", "to", "reason", "strategy", "outcome"),
        )
        self._pause = Histogram(
            "sglang_adapt:switch_pause_seconds",
            "How long a switch paused the requests of the engines that left the layout.",
            (*names, "outcome"),
            buckets=_SECONDS,
        )
        self._phases = Histogram(
            "sglang_adapt:switch_seconds", "How long a phase of a switch took.", (*names, "phase"), buckets=_SECONDS
        )
        self._requests = Counter(
            "sglang_adapt:switch_requests", "Requests in switches, by what became of them.", (*names, "way")
        )
        self._bytes = Counter("sglang_adapt:kv_migrated_bytes", "Bytes of KV that switches have copied.", names)
        # A series that is there from the start shows its first increase.
        for outcome in Outcome:
            self._pause.labels(**self._labels, outcome=outcome.value)
        for phase in get_args(Phase):
            self._phases.labels(**self._labels, phase=phase)
        for way in get_args(Way):
            self._requests.labels(**self._labels, way=way)
        if names:
            self._bytes.labels(**self._labels)

    def ended(self, switch: Switch, outcome: Outcome) -> None:
        """A switch has ended. One to the layout that serves already is none."""
        if switch.before == switch.after:
            return
        ends = {"from": _label(switch.before), "to": _label(switch.after), "reason": switch.trigger.value}
        self._switches.labels(**self._labels, **ends, strategy=switch.strategy.value, outcome=outcome.value).inc()
        for phase, ms in switch.phases_ms.items():
            self._phases.labels(**self._labels, phase=phase).observe(ms / 1e3)
        if "export" in switch.phases_ms:
            self._pause.labels(**self._labels, outcome=outcome.value).observe(switch.pause_ms / 1e3)
        if outcome in (Outcome.SWITCHED, Outcome.IMPAIRED):
            for way, count in switch.requests.items():
                self._requests.labels(**self._labels, way=way).inc(count)
            (self._bytes.labels(**self._labels) if self._labels else self._bytes).inc(switch.kv_bytes)


_PLAN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class PlanMetrics:
    """Counts plans as they are made.

    - `sglang_adapt:plans_total{trigger,decision}`: decision `stay` (nothing better), `wait` (better, but not worth a
      switch yet) or `move`; trigger `none` where nothing better is known
    - `sglang_adapt:plan_seconds`: how long the planner took

    Args and errors: as of `SwitchMetrics`, which is made before.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Histogram

        self._labels = dict(labels)
        names = tuple(labels)
        self._plans = Counter(
            "sglang_adapt:plans", "Plans of the layout, by what they decided.", (*names, "trigger", "decision")
        )
        self._seconds = Histogram(
            "sglang_adapt:plan_seconds", "How long the planner took.", names, buckets=_PLAN_SECONDS
        )
        for trigger in (Trigger.LOAD, Trigger.PRIORITY, Trigger.LONG_CONTEXT):
            self._plans.labels(**self._labels, trigger=trigger.value, decision="move")

    def planned(self, plan: Plan, seconds: float) -> None:
        """A plan has been made."""
        trigger = "none" if plan.trigger is None else plan.trigger.value
        decision = "move" if plan.move else "stay" if plan.trigger is None else "wait"
        self._plans.labels(**self._labels, trigger=trigger, decision=decision).inc()
        (self._seconds.labels(**self._labels) if self._labels else self._seconds).observe(seconds)


HANDOVER_OUTCOMES = ("handed_over", "kept", "recomputed", "given_up")
"""What becomes of a request that was read by a prefill engine (`handovers.Told`)."""
_HANDOVER_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class HandoverMetrics:
    """Counts requests that go from an engine that prefills to one that decodes.

    - `sglang_adapt:handovers_total{outcome}`: `handed_over`, `kept` (decoded where they were prefilled), `recomputed`,
      `given_up`
    - `sglang_adapt:handover_seconds`: from the word of the one engine to the answer of the other
    - `sglang_adapt:handovers_waiting`: requests that wait for room now

    Args and errors: as of `SwitchMetrics`, which is made before.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        names = tuple(labels)
        self._requests = Counter(
            "sglang_adapt:handovers", "Requests handed over after their prefill, by outcome.", (*names, "outcome")
        )
        self._seconds = Histogram(
            "sglang_adapt:handover_seconds", "How long a hand-over took.", names, buckets=_HANDOVER_SECONDS
        )
        self._waiting = Gauge(
            "sglang_adapt:handovers_waiting",
            "Requests that wait for room at an engine that decodes.",
            names,
            multiprocess_mode="livesum",
        )
        for outcome in HANDOVER_OUTCOMES:
            self._requests.labels(**self._labels, outcome=outcome)

    def count(self, outcome: str, requests: int) -> None:
        self._requests.labels(**self._labels, outcome=outcome).inc(requests)

    def took(self, seconds: float) -> None:
        (self._seconds.labels(**self._labels) if self._labels else self._seconds).observe(seconds)

    def waits(self, requests: int) -> None:
        (self._waiting.labels(**self._labels) if self._labels else self._waiting).set(requests)


def _label(layout: Layout) -> str:
    """A layout without its roles, of which there are three for each engine: labels stay bounded."""
    return str(Layout(layout.engines))
