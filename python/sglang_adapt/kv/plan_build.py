"""Building copy plans: pure arithmetic from layouts, block lists and lengths, vectorised over requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from sglang_adapt.kv.geometry import DUMMY_BLOCK, QUANTUM, PoolGeometry
from sglang_adapt.kv.plan import CopyBatch, IntArray, PlanError, Route, SourcePlan

_MIX_LEVELS = 1 << 15  # the range of int16, for which numpy sorts by radix


def build_plans(
    geometry: PoolGeometry, batches: Iterable[CopyBatch], to_gpu: int | None = None
) -> tuple[SourcePlan, ...]:
    """Plan the copy of all batches together: one plan for each GPU that has something to send, by GPU.

    Batches are interleaved, so that a GPU's writes spread over its destinations at every moment of the copy.

    Args:
        geometry: the pool's.
        batches: what moves.
        to_gpu: plan only what this GPU gets; None for all.

    Raises:
        PlanError: too few blocks for a request's tokens, a block id that no request can have, a rank missing
            from a block list, a token range that is empty the wrong way round, or a GPU twice in an engine.
        GeometryError: a TP size that the pool cannot serve.
    """
    batches = tuple(batch for batch in batches if batch.requests)
    rids = tuple(request.rid for batch in batches for request in batch.requests)
    shapes = _unit_shapes(geometry, batches)
    pieces: dict[int, list[_Piece]] = {}
    first_request = 0
    for batch in batches:
        flat = _FlatBatch.of(geometry, batch, first_request)
        first_request += len(batch.requests)
        cuts: dict[int, _Cut] = {}
        for rank, gpu in enumerate(batch.source):
            mine = _ways_from(geometry, batch.source, batch.dest, rank, to_gpu)
            if not mine:
                continue
            tokens, heads = shapes[gpu]
            if tokens not in cuts:
                cuts[tokens] = _Cut.of(geometry, batch, flat, tokens)
            if len(cuts[tokens].tokens):
                pieces.setdefault(gpu, []).append(_piece(geometry, batch, flat, cuts[tokens], mine, heads))
    return tuple(_join(geometry, gpu, shapes[gpu], rids, pieces[gpu]) for gpu in sorted(pieces))


@dataclass(frozen=True, slots=True)
class _Way:
    """Heads `heads` of `dest_rank` come from `source_rank`."""

    source_rank: int
    dest_rank: int
    heads: range


@dataclass(frozen=True, slots=True, eq=False)
class _FlatBatch:
    """A batch's requests as arrays: one entry a request, block lists joined along their second axis."""

    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    source_blocks: IntArray
    dest_blocks: IntArray
    source_start: npt.NDArray[np.int64]
    dest_start: npt.NDArray[np.int64]
    first_request: int

    @classmethod
    def of(cls, geometry: PoolGeometry, batch: CopyBatch, first_request: int) -> _FlatBatch:
        requests = batch.requests
        first = np.array([request.first_token for request in requests], dtype=np.int64)
        end = np.array([request.end_token for request in requests], dtype=np.int64)
        bad = np.flatnonzero((first < 0) | (first > end))
        if len(bad):
            worst = requests[bad[0]]
            raise PlanError(f"request {worst.rid}: tokens {worst.first_token} to {worst.end_token} are no range")
        source, source_start = _join_blocks(geometry, batch, "source", first, end)
        dest, dest_start = _join_blocks(geometry, batch, "dest", first, end)
        return cls(first, end, source, dest, source_start, dest_start, first_request)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A batch cut into units of tokens: one entry a unit, the heads still together.

    Attributes:
        tokens: rows of each unit.
        request: index of the request within the batch.
        source: int64 `[ranks, units]`, offset of the unit's first token in that rank's plane; `dest`
            likewise.
        place: 0 to 32767, how far along the batch the unit is.
    """

    tokens: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    dest: npt.NDArray[np.int64]
    place: npt.NDArray[np.int16]

    @classmethod
    def of(cls, geometry: PoolGeometry, batch: CopyBatch, flat: _FlatBatch, unit_tokens: int) -> _Cut:
        first_unit = flat.first // unit_tokens
        counts = np.where(flat.end > flat.first, -(-flat.end // unit_tokens) - first_unit, 0)
        total = int(counts.sum())
        request = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        start = (np.arange(total) + (first_unit - starts)[request]) * unit_tokens
        first, end = flat.first[request], flat.end[request]
        low = np.maximum(start, first)
        tokens = np.minimum(start + unit_tokens, end) - low

        def offsets(tp: int, blocks: IntArray, block_start: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            size = geometry.tokens_per_block(tp)
            column = low // size - first // size + block_start[request]
            within = low % size * (geometry.token_bytes(tp) // QUANTUM)
            return blocks[:, column].astype(np.int64) * (geometry.block_bytes // QUANTUM) + within

        return cls(
            tokens,
            request + flat.first_request,
            offsets(len(batch.source), flat.source_blocks, flat.source_start),
            offsets(len(batch.dest), flat.dest_blocks, flat.dest_start),
            (np.arange(total) * _MIX_LEVELS // max(total, 1)).astype(np.int16),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What one batch adds to one source GPU's plan; `route` counts within `routes`."""

    routes: tuple[Route, ...]
    source: npt.NDArray[np.int64]
    dest: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    route: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    place: npt.NDArray[np.int16]


def _unit_shapes(geometry: PoolGeometry, batches: Sequence[CopyBatch]) -> dict[int, tuple[int, int]]:
    """(tokens, heads) of the units of each source GPU: the largest that fit every pair of TP sizes it
    serves."""
    shapes: dict[int, tuple[int, int]] = {}
    for batch in batches:
        for name, gpus in (("source", batch.source), ("destination", batch.dest)):
            if len(set(gpus)) != len(gpus):
                raise PlanError(f"the {name} engine names a GPU twice: {gpus}")
        source, dest = len(batch.source), len(batch.dest)
        tokens = gcd(geometry.tokens_per_block(source), geometry.tokens_per_block(dest))
        heads = gcd(geometry.local_heads(source), geometry.local_heads(dest))
        for gpu in batch.source:
            old_tokens, old_heads = shapes.get(gpu, (0, 0))
            shapes[gpu] = (gcd(tokens, old_tokens), gcd(heads, old_heads))
    return shapes


@lru_cache(maxsize=1024)
def _ways_from(
    geometry: PoolGeometry, source: tuple[int, ...], dest: tuple[int, ...], rank: int, to_gpu: int | None
) -> tuple[_Way, ...]:
    """The ways from one source rank, to one GPU if it is given. Engines are few, and the same ones copy again."""
    ways = _ways(geometry, source, dest)
    return tuple(way for way in ways if way.source_rank == rank and to_gpu in (None, dest[way.dest_rank]))


def _ways(geometry: PoolGeometry, source: tuple[int, ...], dest: tuple[int, ...]) -> list[_Way]:
    """Which source rank gives which heads to each destination rank: one on the same GPU if it has them; else
    the replicas of a head share the destinations."""
    source_tp, dest_tp = len(source), len(dest)
    replicas = geometry.replicas(source_tp)
    local = geometry.local_heads(source_tp)
    step = gcd(local, geometry.local_heads(dest_tp))
    taken: dict[int, int] = {}
    ways = []
    for dest_rank, gpu in enumerate(dest):
        needed = geometry.head_range(dest_tp, dest_rank)
        for head in range(needed.start, needed.stop, step):
            first_holder = head // local * replicas
            holders = range(first_holder, first_holder + replicas)
            near = [rank for rank in holders if source[rank] == gpu]
            if near:
                source_rank = near[0]
            else:
                source_rank = holders[taken.get(head, 0) % replicas]
                taken[head] = taken.get(head, 0) + 1
            ways.append(_Way(source_rank, dest_rank, range(head, head + step)))
    return ways


def _join_blocks(
    geometry: PoolGeometry,
    batch: CopyBatch,
    end_name: str,
    first: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """The block lists of one end side by side `[ranks, all blocks]`, and where each request's begin."""
    source = end_name == "source"
    tp = len(batch.source if source else batch.dest)
    lists = [request.source_blocks if source else request.dest_blocks for request in batch.requests]
    size = geometry.tokens_per_block(tp)
    needed = np.where(end > first, -(-end // size) - first // size, 0)
    counts = needed.tolist()
    for request, blocks, need in zip(batch.requests, lists, counts, strict=True):
        if blocks.ndim != 2 or blocks.shape[0] != tp:
            raise PlanError(
                f"request {request.rid}: {end_name} blocks have shape {blocks.shape}; TP {tp} needs one row a rank"
            )
        if blocks.shape[1] < need:
            raise PlanError(
                f"request {request.rid}: tokens {request.first_token} to {request.end_token} need {need} "
                f"{end_name} blocks at TP {tp}, but {blocks.shape[1]} are given"
            )
    joined = np.concatenate([blocks[:, :need] for blocks, need in zip(lists, counts, strict=True)], axis=1)
    starts = np.cumsum(needed) - needed
    if joined.size and (joined.min() <= DUMMY_BLOCK or joined.max() >= geometry.blocks):
        rank, column = np.argwhere((joined <= DUMMY_BLOCK) | (joined >= geometry.blocks))[0]
        owner = batch.requests[int(np.searchsorted(starts + needed, column, side="right"))]
        raise PlanError(
            f"request {owner.rid}: {end_name} block {joined[rank, column]} of rank {rank} does not exist; "
            f"requests have blocks 1 to {geometry.blocks - 1}"
        )
    return joined, starts


def _piece(
    geometry: PoolGeometry,
    batch: CopyBatch,
    flat: _FlatBatch,
    cut: _Cut,
    ways: Sequence[_Way],
    unit_heads: int,
) -> _Piece:
    """The units of one batch on one source rank, a unit's routes side by side."""
    routes, source_heads, dest_heads = _routes(geometry, len(batch.source), batch.dest, tuple(ways), unit_heads)
    count = len(routes)
    dest_ranks = [route.dest_rank for route in routes]
    source = cut.source[ways[0].source_rank][:, None] + source_heads
    dest = cut.dest[dest_ranks].T + dest_heads
    if count == 1:
        index = np.zeros(len(cut.tokens), dtype=np.int64)
        return _Piece(routes, source[:, 0], dest[:, 0], cut.tokens, index, cut.request, cut.place)
    return _Piece(
        routes,
        source.ravel(),
        dest.ravel(),
        np.repeat(cut.tokens, count),
        np.tile(np.arange(count), len(cut.tokens)),
        np.repeat(cut.request, count),
        np.repeat(cut.place, count),
    )


@lru_cache(maxsize=1024)
def _routes(
    geometry: PoolGeometry, source_tp: int, dest: tuple[int, ...], ways: tuple[_Way, ...], unit_heads: int
) -> tuple[tuple[Route, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The routes of some ways, and where their heads begin within a token at either end, in quanta."""
    dest_tp = len(dest)
    head_quanta = geometry.head_bytes // QUANTUM
    routes, source_heads, dest_heads = [], [], []
    for way in ways:
        source_first = geometry.head_range(source_tp, way.source_rank).start
        dest_first = geometry.head_range(dest_tp, way.dest_rank).start
        for head in range(way.heads.start, way.heads.stop, unit_heads):
            source_heads.append((head - source_first) * head_quanta)
            dest_heads.append((head - dest_first) * head_quanta)
            routes.append(
                Route(
                    way.source_rank,
                    way.dest_rank,
                    dest[way.dest_rank],
                    head,
                    geometry.token_bytes(source_tp) // QUANTUM,
                    geometry.token_bytes(dest_tp) // QUANTUM,
                )
            )
    return tuple(routes), np.array(source_heads), np.array(dest_heads)


def _join(
    geometry: PoolGeometry, gpu: int, shape: tuple[int, int], rids: tuple[str, ...], pieces: Sequence[_Piece]
) -> SourcePlan:
    """One source GPU's plan from what each batch adds to it, the batches interleaved."""
    if len(pieces) == 1:
        (one,) = pieces
        columns = [one.source, one.dest, one.tokens, one.request, one.route]
    else:
        first_route = np.cumsum([0] + [len(piece.routes) for piece in pieces])
        columns = [
            np.concatenate([getattr(piece, name) for piece in pieces])
            for name in ("source", "dest", "tokens", "request")
        ]
        columns.append(np.concatenate([piece.route + base for piece, base in zip(pieces, first_route, strict=False)]))
        order = np.argsort(np.concatenate([piece.place for piece in pieces]), kind="stable")
        columns = [column[order] for column in columns]
    source, dest, tokens, request, route = (column.astype(np.int32) for column in columns)
    tokens_a_unit, heads = shape
    return SourcePlan(
        gpu,
        tokens_a_unit,
        heads,
        heads * geometry.head_bytes // QUANTUM,
        tuple(route for piece in pieces for route in piece.routes),
        rids,
        source,
        dest,
        tokens,
        route,
        request,
    )
