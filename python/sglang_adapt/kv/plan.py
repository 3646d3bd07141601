"""What a copy of KV between engines moves, as data; `plan_build` makes plans, `copy` and `staged` carry them
out.

A plan says for one source GPU which pieces of its region go where. A piece, called a unit, is a few tokens of
a few heads: small enough to lie within one block on both sides, so it is a strided rectangle of `tokens` rows
of `row_bytes` at either end. All planes (K and V of every layer) move alike, so a plan describes one plane.
Every byte that a destination rank stores is read once, from the nearest rank that has it. The aggregation
over layers and requests is that of Nitsum, 3.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_adapt.kv.geometry import QUANTUM

IntArray = npt.NDArray[np.int32]


class PlanError(ValueError):
    """A copy that cannot be planned; the text names the request and the block or length at fault."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestCopy:
    """One request's KV to copy: tokens `first_token` to `end_token - 1`.

    Attributes:
        rid: the request's id, for error texts.
        end_token: one past the last token with KV.
        source_blocks: int32 `[source TP size, n]`, each rank's blocks in token order, from the block that
            holds `first_token` on. Blocks past the last token are ignored.
        dest_blocks: the same for the destination, in its own block size.
        first_token: where the copy starts; more than 0 where the destination has the prefix already.
    """

    rid: str
    end_token: int
    source_blocks: IntArray
    dest_blocks: IntArray
    first_token: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Requests that move from one engine to another.

    Attributes:
        source: the GPU of each rank of the source engine; its length is the TP size.
        dest: the same for the destination engine.
        requests: what moves.
    """

    source: tuple[int, ...]
    dest: tuple[int, ...]
    requests: tuple[RequestCopy, ...]


def batches_to(dest: tuple[int, ...], copies: Iterable[tuple[Sequence[int], RequestCopy]]) -> list[CopyBatch]:
    """The copies to the engine on GPUs `dest`, each given with the GPUs of its source engine, a batch a source."""
    batches: dict[tuple[int, ...], list[RequestCopy]] = {}
    for source, copy in copies:
        batches.setdefault(tuple(source), []).append(copy)
    return [CopyBatch(source, dest, tuple(requests)) for source, requests in batches.items()]


@dataclass(frozen=True, slots=True)
class Route:
    """The part of the heads that one source rank gives to one destination rank.

    Attributes:
        source_rank, dest_rank: ranks within their engines.
        dest_gpu: where the bytes go.
        first_head: the first of the model's KV heads that this route carries.
        source_stride, dest_stride: quanta (16 bytes) between two tokens of a block at either end.
    """

    source_rank: int
    dest_rank: int
    dest_gpu: int
    first_head: int
    source_stride: int
    dest_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class SourcePlan:
    """All that one source GPU sends, for every plane alike. Offsets count quanta (16 bytes) within a plane.

    Attributes:
        gpu: the source GPU.
        unit_tokens: the most tokens of a unit.
        unit_heads: heads of every unit.
        row_quanta: quanta of a unit's row: its heads of one token.
        routes: where units go; units refer to it by index.
        rids: the requests; units refer to it by index.
        source: int32 `[units]`, offset of a unit's first row in the source GPU's plane.
        dest: int32 `[units]`, the same in the plane of the route's destination GPU.
        tokens: int32 `[units]`, rows of the unit, at most `unit_tokens`.
        route: int32 `[units]`, index into `routes`.
        request: int32 `[units]`, index into `rids`.
    """

    gpu: int
    unit_tokens: int
    unit_heads: int
    row_quanta: int
    routes: tuple[Route, ...]
    rids: tuple[str, ...]
    source: IntArray
    dest: IntArray
    tokens: IntArray
    route: IntArray
    request: IntArray

    @property
    def units(self) -> int:
        return len(self.source)

    @property
    def row_bytes(self) -> int:
        return self.row_quanta * QUANTUM

    @property
    def dest_gpus(self) -> tuple[int, ...]:
        """The GPUs that the plan's units go to, ascending."""
        return tuple(sorted({self.routes[index].dest_gpu for index in np.unique(self.route)}))

    def plane_bytes_to(self) -> dict[int, int]:
        """Bytes that go to each destination GPU, per plane; times the planes it is the whole copy."""
        rows = np.bincount(self.route, weights=self.tokens, minlength=len(self.routes))
        total = dict.fromkeys(self.dest_gpus, 0)
        for route, count in zip(self.routes, rows, strict=True):
            if count:
                total[route.dest_gpu] += int(count) * self.row_bytes
        return total

    def select(self, units: npt.NDArray[Any]) -> SourcePlan:
        """The plan of some of the units, given as a mask or as indices; routes and requests keep their
        indices."""
        return SourcePlan(
            self.gpu,
            self.unit_tokens,
            self.unit_heads,
            self.row_quanta,
            self.routes,
            self.rids,
            self.source[units],
            self.dest[units],
            self.tokens[units],
            self.route[units],
            self.request[units],
        )

    def to_gpu(self, gpu: int) -> SourcePlan:
        """The part of the plan that goes to one GPU."""
        return self.select(self.goes_to(gpu))

    def goes_to(self, gpu: int) -> npt.NDArray[np.bool_]:
        """Which units go to a GPU."""
        there = np.array([route.dest_gpu == gpu for route in self.routes], dtype=bool)
        return there[self.route]
