"""Prometheus metrics of what is now: layout, engines, KV blocks (`--enable-metrics`); `metrics.py` counts events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_adapt.core.messages import RouterStatus
from sglang_adapt.router.engine import EngineState

if TYPE_CHECKING:
    from prometheus_client import Gauge


class StateMetrics:
    """Tells the state each time that it is given.

    - `sglang_adapt:active_layout{engine}`: 1 for the engines of the layout that serves, 0 for the others
    - `sglang_adapt:engine_up{engine}`: 1 if it is ready
    - `sglang_adapt:engine_restarts_total{engine}`
    - `sglang_adapt:engine_requests{engine}`: accepted and unfinished on it
    - `sglang_adapt:waiting_requests`: accepted, and in no engine now: they wait for room or a switch, or are kept
    - `sglang_adapt:kv_blocks{gpu,state}`: states of `kv.blocks.BlockState`; only with several TP sizes

    Args:
        labels: further labels of every metric, by name (`--extra-metric-labels`).

    `SwitchMetrics` or `metrics.check_folder` has found before that somebody sees them.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter

        self._labels = dict(labels)
        names = tuple(labels)
        self._active = self._gauge("active_layout", "Is the engine in the layout that serves?", "engine")
        self._up = self._gauge("engine_up", "Is the engine ready?", "engine")
        self._requests = self._gauge("engine_requests", "Accepted and unfinished requests on the engine.", "engine")
        self._waiting = self._gauge("waiting_requests", "Accepted requests that are in no engine now.")
        self._blocks = self._gauge("kv_blocks", "KV blocks of a GPU by state.", "gpu", "state")
        self._restarts = Counter(
            "sglang_adapt:engine_restarts", "How often the engine was started again.", (*names, "engine")
        )
        self._restarted: dict[str, int] = {}

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        # Of one process only; without a mode each series would have its process id as a label.
        return Gauge(f"sglang_adapt:{name}", text, (*self._labels, *labels), multiprocess_mode="mostrecent")

    def tell(self, status: RouterStatus, unfinished: int, blocks: Mapping[int, Mapping[str, int]]) -> None:
        """The state now.

        Args:
            status: of all engines.
            unfinished: requests accepted and not ended, on engines or not.
            blocks: number of KV blocks by GPU and state; empty without a shared pool.
        """
        for engine in status.engines:
            named = {**self._labels, "engine": engine.name}
            self._active.labels(**named).set(engine.active)
            self._up.labels(**named).set(engine.state == EngineState.READY)
            self._requests.labels(**named).set(engine.in_flight)
            self._restarts.labels(**named).inc(engine.restarts - self._restarted.get(engine.name, 0))
            self._restarted[engine.name] = engine.restarts
        on_engines = sum(engine.in_flight for engine in status.engines)
        waiting = self._waiting.labels(**self._labels) if self._labels else self._waiting
        waiting.set(max(0, unfinished - on_engines))
        for gpu, states in blocks.items():
            for state, count in states.items():
                self._blocks.labels(**self._labels, gpu=str(gpu), state=state).set(count)
