"""Regions full of random KV, requests with random blocks, and what a copy between engines must leave
behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import CopyBatch, RequestCopy

DTYPE = torch.int16  # stands for any two-byte KV dtype: copies move bytes


@dataclass
class World:
    """GPUs with regions; blocks are handed out once, so that requests never share any.

    Attributes:
        regions: by GPU, `geometry.region_shape`, random.
        expected: what the regions must be after the copies that were asked for.
    """

    geometry: PoolGeometry
    gpus: int
    seed: int
    regions: dict[int, torch.Tensor] = field(init=False)
    expected: dict[int, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._torch_rng = torch.Generator().manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)
        self._ids = {gpu: rng.permutation(np.arange(1, self.geometry.blocks)) for gpu in range(self.gpus)}
        self.regions = {gpu: self._random(self.geometry.region_shape) for gpu in range(self.gpus)}
        self.expected = {gpu: region.clone() for gpu, region in self.regions.items()}

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, tuple(shape), dtype=DTYPE, generator=self._torch_rng)

    def take(self, gpus: Sequence[int], count: int) -> np.ndarray:
        """Blocks `[ranks, count]` that no one has yet."""
        taken = np.array([self._ids[gpu][:count] for gpu in gpus], dtype=np.int32).reshape(len(gpus), count)
        assert all(len(self._ids[gpu]) >= count for gpu in gpus), "the test's pool is too small"
        for gpu in gpus:
            self._ids[gpu] = self._ids[gpu][count:]
        return taken

    def request(
        self, rid: str, source: Sequence[int], dest: Sequence[int], first: int, end: int, spare: int = 0
    ) -> RequestCopy:
        """A request with random KV in the source's regions, and its copy noted in `expected`."""
        g = self.geometry
        blocks = []
        for gpus in (source, dest):
            size = g.tokens_per_block(len(gpus))
            blocks.append(self.take(gpus, (-(-end // size) - first // size if end > first else 0) + spare))
        kv = self._random((g.planes, end - first, g.kv_heads, g.head_dim))
        for rank, gpu in enumerate(source):
            self._write(self.regions[gpu], len(source), rank, blocks[0][rank], first, kv)
            self._write(self.expected[gpu], len(source), rank, blocks[0][rank], first, kv)
        for rank, gpu in enumerate(dest):
            self._write(self.expected[gpu], len(dest), rank, blocks[1][rank], first, kv)
        return RequestCopy(rid, end, blocks[0], blocks[1], first)

    def _write(
        self, region: torch.Tensor, tp: int, rank: int, blocks: np.ndarray, first: int, kv: torch.Tensor
    ) -> None:
        """Store one rank's heads token by token, as an engine's attention layer does."""
        g = self.geometry
        size = g.tokens_per_block(tp)
        view = region.view(g.planes, g.blocks * size, g.local_heads(tp), g.head_dim)
        heads = g.head_range(tp, rank)
        for index in range(kv.shape[1]):
            token = first + index
            slot = int(blocks[token // size - first // size]) * size + token % size
            view[:, slot] = kv[:, index, heads.start : heads.stop]

    def assert_as_expected(self) -> None:
        for gpu, region in self.regions.items():
            assert torch.equal(region, self.expected[gpu]), f"GPU {gpu}"


@st.composite
def geometries(draw: st.DrawFn, blocks: int = 200) -> PoolGeometry:
    """Small pools: 1 to 8 KV heads, pages of 1 to 3 tokens at TP 1, up to TP 8."""
    kv_heads, finest_tp = draw(
        st.sampled_from([(1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (6, 6), (6, 12), (8, 8)])
    )
    page_tokens = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([8, 24]))
    return PoolGeometry(
        layers=draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=2,
        finest_tp=finest_tp,
        block_bytes=page_tokens * kv_heads * head_dim * 2,
        blocks=blocks,
    )


@st.composite
def worlds_with_batches(draw: st.DrawFn, most_requests: int = 3) -> tuple[World, tuple[CopyBatch, ...]]:
    """A world and one to three batches between engines of any TP sizes on any GPUs, overlapping or not."""
    geometry = draw(geometries())
    sizes = geometry.tp_sizes()
    gpus = geometry.finest_tp + draw(st.integers(0, 2))
    world = World(geometry, gpus, draw(st.integers(0, 2**16)))
    batches = []
    for index in range(draw(st.integers(1, 3))):
        source, dest = (tuple(draw(st.permutations(range(gpus)))[: draw(st.sampled_from(sizes))]) for _ in range(2))
        requests = []
        for number in range(draw(st.integers(0, most_requests))):
            first = draw(st.sampled_from([0, 0, 0, 1, 5]))
            end = first + draw(st.integers(0, 9))
            requests.append(world.request(f"r{index}.{number}", source, dest, first, end, draw(st.integers(0, 1))))
        batches.append(CopyBatch(source, dest, tuple(requests)))
    return world, tuple(batches)
