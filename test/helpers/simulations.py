"""Small deployments for the simulator: times on straight lines."""

from __future__ import annotations

from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import Price
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.load import Arrival, merged, of_tier, poisson

TIERS = SloConfig(
    (Tier("strict", 400.0, 30.0, when_infeasible=WhenInfeasible.REJECT), Tier("loose", 2000.0, 80.0)), "loose"
)


class Line:
    """A batch of prompts takes `batch` ms and `token` for each token, a step `step` and `request` for each request."""

    def __init__(self, batch: float, token: float, step: float, request: float) -> None:
        self._batch, self._token, self._step, self._request = batch, token, step, request

    latency_ms = 0.0

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return self._batch + self._token * tokens if tokens > 0 else 0.0

    def decode_ms(self, batch: float, context: float) -> float:
        return self._step + self._request * batch if batch > 0 else 0.0


def hardware(kv_tokens: int = 20_000, requests: int = 64) -> Hardware:
    """TP 1 and 2; TP 2 is quicker alone and carries less than twice as much."""
    return Hardware(
        times={1: Line(12.0, 0.06, 6.0, 0.6), 2: Line(9.0, 0.04, 4.0, 0.45)},
        bounds={tp: Bounds(1, 2048, requests) for tp in (1, 2)},
        kv_tokens={1: kv_tokens, 2: 2 * kv_tokens},
        token_bytes=1024,
        price=Price(60.0, 3e11),
        source="lines",
    )


def both_tiers(rate: float, seconds: float, seed: int = 1) -> list[Arrival]:
    """Half of the rate for each tier."""
    halves = [poisson(rate / 2, seconds, 128, 48, seed + n) for n in (0, 1)]
    return merged([of_tier(half, tier) for half, tier in zip(halves, ("strict", "loose"), strict=True)])
