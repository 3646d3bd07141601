"""What a switch of layout costs now: how long it pauses requests, learned from the switches that were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.copy_rates import COPY_BYTES_PER_S

_LEARN = 0.3
_MOST_WORSE = 4.0
"""One odd switch changes what is known by no more than this factor."""


@dataclass(frozen=True, slots=True)
class Running:
    """What an engine has.

    Attributes:
        requests: on it.
        kv_bytes: of their KV, over all its GPUs.
        longest_tokens: of the longest that not every engine holds; 0 if it has none.
        kv_share: part of the engine's KV that they take.
        most_weight: of the tiers that they are of, the largest weight.
    """

    requests: int = 0
    kv_bytes: float = 0.0
    longest_tokens: int = 0
    kv_share: float = 0.0
    most_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """How long a switch pauses the requests of the engines that leave.

    Attributes:
        fixed_ms: beside the copy.
        bytes_per_s: of KV copied, over all GPUs.
    """

    fixed_ms: float
    bytes_per_s: float

    def pause_ms(self, kv_bytes: float) -> float:
        return self.fixed_ms + 1e3 * kv_bytes / self.bytes_per_s

    def learned(self, pause_ms: float, kv_bytes: float) -> Price:
        """After a switch that copied `kv_bytes` in a pause of `pause_ms`; the larger part is corrected."""
        if pause_ms <= 0:
            return self
        copy_ms = 1e3 * kv_bytes / self.bytes_per_s
        ratio = min(_MOST_WORSE, max(1 / _MOST_WORSE, pause_ms / (self.fixed_ms + copy_ms)))
        step = ratio**_LEARN
        if copy_ms > self.fixed_ms:
            return replace(self, bytes_per_s=self.bytes_per_s / step)
        return replace(self, fixed_ms=self.fixed_ms * step)


GPU_PRICE = Price(fixed_ms=15.0, bytes_per_s=1.6e12)
"""Until it is learned. Measured on 2 H200: 13 to 23 ms with 16 or 64 requests and 1 to 13 GB of KV, most of which is
copied before the pause, by peer access (`bench_switch_migrate_2xH200.json`)."""


def first_gpu_price(path: CopyPath) -> Price:
    """GPU_PRICE, and where KV goes another way than it was measured by, as much slower as that is."""
    slower = COPY_BYTES_PER_S[CopyPath.PEER] / COPY_BYTES_PER_S[path]
    return replace(GPU_PRICE, bytes_per_s=GPU_PRICE.bytes_per_s / slower)


@dataclass(frozen=True, slots=True)
class Bill:
    """What one switch would cost.

    Attributes:
        requests: that it pauses.
        kv_bytes: that it copies.
        pause_ms: how long.
    """

    requests: int
    kv_bytes: float
    pause_ms: float


def bill(price: Price, before: Layout, after: Layout, running: Mapping[str, Running]) -> Bill:
    """For the engines that are in `before` only; if there are none, as where only roles change, nothing is paused."""
    staying = set(after.engines)
    leaving = [engine.name for engine in before.engines if engine not in staying]
    if not leaving:
        return Bill(0, 0.0, 0.0)
    moved = [running.get(name, Running()) for name in leaving]
    kv_bytes = sum(one.kv_bytes for one in moved)
    return Bill(sum(one.requests for one in moved), kv_bytes, price.pause_ms(kv_bytes))
