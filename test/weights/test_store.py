"""The store's layout and its views, on tensors alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from sglang_adapt.weights import (
    ExpectedParam,
    Manifest,
    ParamEntry,
    ParamKind,
    Part,
    ShardSpec,
    ViewMismatchError,
    WeightStore,
    plan_layout,
)
from sglang_adapt.weights.manifest import ALIGNMENT

COLUMN, ROW, REPLICATED = ParamKind.COLUMN, ParamKind.ROW, ParamKind.REPLICATED
SHARDS = (
    ShardSpec("embed", COLUMN, 0, (10, 6), "float32"),
    ShardSpec("qkv", COLUMN, 0, (4, 6), "bfloat16"),
    ShardSpec("qkv.bias", COLUMN, 0, (4,), "bfloat16"),
    ShardSpec("down", ROW, 1, (6, 3), "float32"),
    ShardSpec("experts", ROW, 2, (2, 6, 3), "float32"),
    ShardSpec("norm", REPLICATED, None, (6,), "float32"),
)


@pytest.fixture
def store() -> Iterator[WeightStore]:
    """A TP-4 store filled shard by shard; every element's value tells its rank and position."""
    with WeightStore.create(plan_layout("Toy", 4, SHARDS), "cpu") as store:
        for shard in SHARDS:
            for rank in range(4):
                view = store.shard(shard.name, rank, 4)
                assert tuple(view.shape) == shard.shape
                view.copy_(_shard_values(shard, rank))
        yield store


def _shard_values(shard: ShardSpec, rank: int) -> torch.Tensor:
    base = 0 if shard.kind is REPLICATED else 100 * rank
    return (base + torch.arange(torch.Size(shard.shape).numel())).view(shard.shape).to(getattr(torch, shard.dtype))


def _expected(store: WeightStore, tp_size: int) -> list[ExpectedParam]:
    out = []
    for entry in store.manifest.entries:
        shape = list(entry.shape)
        if entry.dim is not None:
            shape[entry.dim] //= tp_size
        out.append(ExpectedParam(entry.name, entry.kind, tuple(shape), entry.torch_dtype))
    return out


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_view_is_the_ranks_shards_side_by_side_without_a_copy(store: WeightStore, tp_size: int) -> None:
    blocks = 4 // tp_size
    assert store.blocks_per_rank(tp_size) == blocks
    for rank in range(tp_size):
        views = store.views("Toy", _expected(store, tp_size), rank, tp_size)
        for shard in SHARDS:
            parts = [_shard_values(shard, rank * blocks + block) for block in range(blocks)]
            want = parts[0] if shard.dim is None else torch.cat(parts, shard.dim)
            assert torch.equal(views[shard.name], want), (shard.name, rank)
            assert store.region.holds(views[shard.name])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_ranks_of_a_size_cover_every_sharded_byte_once(store: WeightStore, tp_size: int) -> None:
    for shard in SHARDS:
        whole = store.full(shard.name)
        whole.zero_()
        for rank in range(tp_size):
            store.shard(shard.name, rank, tp_size).add_(1)
        assert whole.unique().tolist() == [tp_size if shard.kind is REPLICATED else 1]


def test_offsets_are_aligned_and_do_not_overlap() -> None:
    manifest = plan_layout("Toy", 2, SHARDS)
    end = 0
    for entry in manifest.entries:
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= manifest.nbytes < end + ALIGNMENT


def test_a_manifest_survives_json() -> None:
    manifest = plan_layout("Toy", 2, SHARDS)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_second_opening_sees_the_same_bytes(store: WeightStore) -> None:
    with WeightStore.open(store.handle) as other:
        assert torch.equal(other.full("qkv"), store.full("qkv"))
        assert not other.region.owned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"shape": (7, 6)},
            r"embed: rank 1 of 2 expects column \[7, 6\] float32, .* column \[20, 6\] float32",
        ),
        ({"dtype": torch.float16}, r"embed: .* expects column \[20, 6\] float16"),
        ({"kind": ROW}, r"embed: .* expects row \[20, 6\]"),
    ],
)
def test_a_mismatch_names_the_parameter(store: WeightStore, change: dict, message: str) -> None:
    expected = [dataclasses.replace(p, **change) if p.name == "embed" else p for p in _expected(store, 2)]
    with pytest.raises(ViewMismatchError, match=message):
        store.views("Toy", expected, 1, 2)


def test_a_parameter_that_one_side_lacks_is_named(store: WeightStore) -> None:
    expected = _expected(store, 2)
    with pytest.raises(ViewMismatchError, match="the store has 1 parameters that the model has not: embed"):
        store.views("Toy", expected[1:], 0, 2)
    extra = ExpectedParam("lm_head", COLUMN, (1, 1), torch.float32)
    with pytest.raises(ViewMismatchError, match="the model has 1 parameters that the store has not: lm_head"):
        store.views("Toy", [*expected, extra], 0, 2)


def test_another_model_of_the_same_shapes_is_refused(store: WeightStore) -> None:
    with pytest.raises(ViewMismatchError, match="the engine's model is a Joy, but the store holds a Toy"):
        store.views("Joy", _expected(store, 2), 0, 2)


@pytest.mark.parametrize("tp_size", [3, 8, 0])
def test_a_size_that_does_not_divide_the_finest_is_refused(store: WeightStore, tp_size: int) -> None:
    with pytest.raises(ViewMismatchError, match=f"laid out for TP 4; TP {tp_size} does not divide"):
        store.shard("qkv", 0, tp_size)


def test_a_rank_that_is_not_there_is_refused(store: WeightStore) -> None:
    with pytest.raises(ViewMismatchError, match="TP 2 has no rank 2"):
        store.shard("qkv", 2, 2)


def test_a_layout_needs_sound_parameters() -> None:
    with pytest.raises(ValueError, match="names the parameter norm twice"):
        plan_layout("Toy", 2, (SHARDS[-1], SHARDS[-1]))
    with pytest.raises(ValueError, match="no parameters"):
        plan_layout("Toy", 2, ())
    with pytest.raises(ValueError, match="at least 1"):
        plan_layout("Toy", 0, SHARDS)
    with pytest.raises(ValueError, match="w: a col parameter with joining dimension None"):
        ShardSpec("w", COLUMN, None, (2, 2), "float32")
    with pytest.raises(ValueError, match=r"w: dimension 2 of shape \(2, 2\)"):
        ShardSpec("w", ROW, 2, (2, 2), "float32")


def test_a_region_too_small_for_its_manifest_is_refused(store: WeightStore) -> None:
    large = dataclasses.replace(store.manifest, nbytes=store.region.nbytes + 1)
    with pytest.raises(ValueError, match="the region has"):
        WeightStore(large, store.region)


def test_an_entry_that_cannot_be_cut_is_named() -> None:
    entry = ParamEntry("w", COLUMN, 0, (6, 2), "float32", 0)
    with WeightStore.create(Manifest("Toy", 4, 64, (entry,)), "cpu") as store:
        with pytest.raises(ViewMismatchError, match=r"w: dimension 0 of .* cannot be cut into 4"):
            store.shard("w", 0, 4)


@pytest.mark.parametrize("of", [2, 4])
def test_a_part_has_what_its_ranks_read_and_nothing_else(store: WeightStore, of: int) -> None:
    for index in range(of):
        part = Part(index, of)
        with WeightStore.create(plan_layout("Toy", 4, SHARDS, part), "cpu") as half:
            assert half.manifest.nbytes < store.manifest.nbytes
            for shard in SHARDS:
                for rank in part.ranks(4):
                    half.shard(shard.name, rank, 4).copy_(_shard_values(shard, rank))
            for tp_size in (tp for tp in (2, 4) if tp >= of):
                for rank in range(tp_size):
                    if rank in part.ranks(tp_size):
                        views = half.views("Toy", _expected(store, tp_size), rank, tp_size)
                        assert all(torch.equal(view, store.shard(name, rank, tp_size)) for name, view in views.items())
                        continue
                    with pytest.raises(
                        ViewMismatchError, match=f"rank {rank} of TP {tp_size} reads other weights than"
                    ):
                        half.shard("down", rank, tp_size)
            with pytest.raises(ViewMismatchError, match=f"part {index + 1} of {of} of the weights"):
                half.shard("down", 0, 1)
            assert Manifest.from_json(half.manifest.to_json()) == half.manifest


def test_parts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="of 2 parts of the weights none has the index 2"):
        Part(2, 2)
    with pytest.raises(ValueError, match="4 shards of Toy are no 3 equal parts"):
        plan_layout("Toy", 4, SHARDS, Part(0, 3))
