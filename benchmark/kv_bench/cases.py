"""What is copied: Llama-3.1-8B shapes, scattered blocks, requests of about a thousand tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import CopyBatch, RequestCopy


@dataclass(frozen=True)
class Scale:
    """Shapes and sizes of a run: `full` for GPUs, `tiny` to try the benchmark out on a CPU.

    Attributes:
        gpus: how many.
        layers, kv_heads, head_dim: the model's.
        page_tokens: page sizes at TP 1, in tokens.
        bytes_per_gpu: KV that each GPU holds before the copy.
        requests: requests of each source engine.
        region_bytes: memory for KV on each GPU.
        limit_bytes: size of the plain peer copies.
        staging_bytes: one staging buffer.
        reps: timed repetitions.
    """

    gpus: int
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: tuple[int, ...]
    bytes_per_gpu: tuple[int, ...]
    requests: int
    region_bytes: int
    limit_bytes: int
    staging_bytes: int
    reps: int

    @property
    def directions(self) -> tuple[tuple[int, int], ...]:
        """(source TP, destination TP) to measure on this many GPUs."""
        pairs = ((1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2))
        return tuple(pair for pair in pairs if max(pair) <= self.gpus)

    def geometry(self, page_tokens: int) -> PoolGeometry:
        return PoolGeometry.from_pool_bytes(
            self.region_bytes,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            itemsize=2,
            finest_tp=self.gpus,
            page_tokens=page_tokens,
        )


def full_scale(gpus: int) -> Scale:
    """Region and buffers take 25 GB of each GPU."""
    return Scale(
        gpus=gpus,
        layers=32,
        kv_heads=8,
        head_dim=128,
        page_tokens=(16, 32, 64, 128),
        bytes_per_gpu=(250_000_000, 500_000_000, 1_000_000_000, 2_500_000_000, 5_000_000_000),
        requests=32,
        region_bytes=12_600_000_000,
        limit_bytes=2 << 30,
        staging_bytes=64 << 20,
        reps=7,
    )


def tiny_scale(gpus: int) -> Scale:
    return Scale(
        gpus=gpus,
        layers=2,
        kv_heads=8,
        head_dim=16,
        page_tokens=(4, 8),
        bytes_per_gpu=(20_000, 60_000),
        requests=4,
        region_bytes=400_000,
        limit_bytes=1 << 16,
        staging_bytes=1 << 14,
        reps=2,
    )


@dataclass(frozen=True)
class Case:
    """One copy of all requests of a node: every GPU holds `bytes_per_gpu` of KV at TP `source_tp`."""

    source_tp: int
    dest_tp: int
    page_tokens: int
    bytes_per_gpu: int

    @property
    def direction(self) -> str:
        return f"{self.source_tp}->{self.dest_tp}"

    def batches(self, scale: Scale) -> tuple[CopyBatch, ...]:
        """The same in every process: requests of odd lengths in blocks scattered at random over the pool."""
        geometry = scale.geometry(self.page_tokens)
        free = {
            gpu: np.random.default_rng(gpu).permutation(np.arange(1, geometry.blocks, dtype=np.int32))
            for gpu in range(scale.gpus)
        }

        def take(gpus: range, count: int) -> np.ndarray:
            if any(len(free[gpu]) < count for gpu in gpus):
                raise RuntimeError(f"{self} does not fit into {scale.region_bytes} bytes of KV a GPU")
            rows = np.stack([free[gpu][:count] for gpu in gpus])
            for gpu in gpus:
                free[gpu] = free[gpu][count:]
            return rows

        requests: dict[tuple[range, range], list[RequestCopy]] = {}
        tokens = self.bytes_per_gpu // (geometry.planes * geometry.token_bytes(self.source_tp) * scale.requests)
        for first in range(0, scale.gpus, self.source_tp):
            source = range(first, first + self.source_tp)
            for index in range(scale.requests):
                dest = self._dest_of(first, index)
                requests.setdefault((source, dest), []).append(
                    RequestCopy(
                        f"{first}.{index}",
                        tokens,
                        take(source, geometry.blocks_for(tokens, self.source_tp)),
                        take(dest, geometry.blocks_for(tokens, self.dest_tp)),
                    )
                )
        return tuple(CopyBatch(tuple(a), tuple(b), tuple(moved)) for (a, b), moved in requests.items())

    def _dest_of(self, first: int, index: int) -> range:
        """The destination engine of a request: the one around its source, or one of those within, in turn."""
        if self.dest_tp >= self.source_tp:
            start = first // self.dest_tp * self.dest_tp
        else:
            start = first + index % (self.source_tp // self.dest_tp) * self.dest_tp
        return range(start, start + self.dest_tp)
