"""How requests with tiers have fared: metrics (`--enable-metrics`) and a line a request (`--adapt-request-log`).

Clocks start when a request arrives in the front. Times are taken where the router passes tokens on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from sglang_adapt.core.messages import RequestReport
from sglang_adapt.core.slo import Terms
from sglang_adapt.policy.admission import Outcome

logger = logging.getLogger(__name__)

_TTFT_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TPOT_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Accounting:
    """See the module.

    Args:
        log: file to which a JSON object a line is added, line by line; None for none.
        with_metrics: count for Prometheus as well.
        tiers: that there are at the start; what is counted of them is there from then on.
    """

    def __init__(self, log: TextIO | None, with_metrics: bool, tiers: Sequence[str] = ()) -> None:
        self._log = log
        self._with_metrics = with_metrics
        self._tiers = tuple(tiers)
        self._metrics: _Metrics | None = None

    def begin(self) -> None:
        """The server starts, and stock has said where metrics are kept."""
        if self._with_metrics and self._tiers:
            self._counted().expect(self._tiers)

    def ended(self, report: RequestReport) -> None:
        """A request that was admitted has ended."""
        ttft_met, tpot_met = report.met
        if self._log is not None:
            self._write(
                {
                    "rid": report.rid,
                    "tier": report.terms.tier,
                    "outcome": report.outcome,
                    "ended": report.ended,
                    "engine": report.engine,
                    "age_ms": round(time.monotonic() * 1000 - report.arrived_ms, 3),
                    "ttft_target_ms": report.terms.ttft_ms,
                    "tpot_target_ms": report.terms.tpot_ms,
                    "queue_ms": _rounded(report.queue_ms),
                    "ttft_ms": _rounded(report.ttft_ms),
                    "tpot_ms": _rounded(report.tpot_ms),
                    "forecast_ttft_ms": _rounded(report.forecast_ttft_ms),
                    "forecast_tpot_ms": _rounded(report.forecast_tpot_ms),
                    "met_ttft": ttft_met,
                    "met_tpot": tpot_met,
                    "prompt_tokens": report.prompt_tokens,
                    "output_tokens": report.output_tokens,
                }
            )
        if self._with_metrics:
            self._counted().ended(report)

    def refused(self, terms: Terms) -> None:
        """A request was refused with a 429."""
        if self._log is not None:
            self._write({"rid": None, "tier": terms.tier, "outcome": Outcome.REFUSED.value, "ended": "refused"})
        if self._with_metrics:
            self._counted().refused(terms.tier)

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._log is not None
        try:
            self._log.write(json.dumps({"time": round(time.time(), 6), **fields}) + "\n")
        except OSError as error:
            logger.error("the request log cannot be written any more, and stops here: %s", error)
            self._log = None

    def _counted(self) -> _Metrics:
        if self._metrics is None:
            self._metrics = _Metrics()
        return self._metrics


class _Metrics:
    """Prometheus' collectors; made after stock has said where they are kept (PROMETHEUS_MULTIPROC_DIR)."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.admission = Counter("sglang_adapt:admission_total", "Requests by what became of them", ["tier", "outcome"])
        self._refused: dict[str, Callable[[], None]] = {}
        self._ttft = Histogram(
            "sglang_adapt:time_to_first_token_seconds", "From arrival to the first token.", ["tier"], buckets=_TTFT_S
        )
        self._tpot = Histogram(
            "sglang_adapt:time_per_output_token_seconds", "Mean between later tokens.", ["tier"], buckets=_TPOT_S
        )
        self._queue = Histogram(
            "sglang_adapt:queue_seconds", "From arrival until sent to an engine.", ["tier"], buckets=_TTFT_S
        )
        self._goodput = Counter("sglang_adapt:goodput_requests_total", "Requests that met both targets.", ["tier"])
        self._violations = Counter(
            "sglang_adapt:slo_violations_total", "Admitted requests that missed a target.", ["tier", "which"]
        )
        self._forecast = Histogram(
            "sglang_adapt:forecast_ratio",
            "Actual by predicted time of requests that were feasible.",
            ["tier", "which"],
            buckets=_RATIO,
        )

    def expect(self, tiers: Sequence[str]) -> None:
        """Make the series of tiers: one that is there from the start shows its first increase."""
        for tier in tiers:
            for outcome in Outcome:
                self.admission.labels(tier, outcome.value)
            for series in (self._ttft, self._tpot, self._queue, self._goodput):
                series.labels(tier)
            for which in ("ttft", "tpot"):
                self._violations.labels(tier, which)
                self._forecast.labels(tier, which)

    def refused(self, tier: str) -> None:
        count = self._refused.get(tier)
        if count is None:
            count = self._refused[tier] = self.admission.labels(tier, Outcome.REFUSED.value).inc
        count()

    def ended(self, report: RequestReport) -> None:
        tier, met = report.terms.tier, report.met
        self.admission.labels(tier, report.outcome).inc()
        if report.queue_ms is not None:
            self._queue.labels(tier).observe(report.queue_ms / 1000)
        if report.ttft_ms is not None:
            self._ttft.labels(tier).observe(report.ttft_ms / 1000)
        if report.tpot_ms is not None:
            self._tpot.labels(tier).observe(report.tpot_ms / 1000)
        if all(met):
            self._goodput.labels(tier).inc()
        for which, is_met in zip(("ttft", "tpot"), met, strict=True):
            if not is_met:
                self._violations.labels(tier, which).inc()
        if report.outcome == Outcome.FEASIBLE:
            if report.ttft_ms is not None and report.forecast_ttft_ms:
                self._forecast.labels(tier, "ttft").observe(report.ttft_ms / report.forecast_ttft_ms)
            if report.tpot_ms is not None and report.forecast_tpot_ms:
                self._forecast.labels(tier, "tpot").observe(report.tpot_ms / report.forecast_tpot_ms)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
