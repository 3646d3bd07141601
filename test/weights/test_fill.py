"""Filling a store with stock's loaders, and binding stock models to it, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest
import weights_children as children
from weights_engines import in_child
from weights_models import MODELS

from sglang_adapt.keeper import KeeperHandle
from sglang_adapt.weights import WHOLE, Part

Model = Callable[[str], Path]
Keeper = Callable[..., KeeperHandle]


def test_a_sharded_checkpoint_gives_the_same_store(context: ForkServerContext, model: Model, tmp_path: Path) -> None:
    path = model("qwen2_tied")
    in_child(context, children.write_sharded, path, 4, tmp_path / "sharded")
    whole = in_child(context, children.contents, path, 4, "auto")
    sharded = in_child(context, children.contents, tmp_path / "sharded", 4, "sharded_state")
    assert whole.keys() == sharded.keys()
    for name, tensor in whole.items():
        assert np.array_equal(tensor, sharded[name]), name
        assert tensor.any(), f"{name} was never written"


def test_dummy_weights_do_not_depend_on_the_finest_size(context: ForkServerContext, model: Model) -> None:
    four, two = (in_child(context, children.contents, model("llama"), size, "dummy") for size in (4, 2))
    for name, tensor in four.items():
        if "qkv_proj" in name or "gate_up_proj" in name:
            # Another order of the same rows.
            assert np.array_equal(np.sort(tensor, axis=0), np.sort(two[name], axis=0)), name
            assert not np.array_equal(tensor, two[name]), name
        else:
            assert np.array_equal(tensor, two[name]), name


def test_kv_heads_are_repeated_for_each_shard_that_needs_them(context: ForkServerContext, model: Model) -> None:
    manifest = in_child(context, children.layout_of, model("llama_tied"), 4)
    entries = manifest.by_name
    # 8 query heads and 2 KV heads of 32: each of 4 shards has 2 query heads, a key head and a value head.
    assert entries["model.layers.0.self_attn.qkv_proj.weight"].shape == (4 * (2 + 1 + 1) * 32, 256)
    # 501 tokens are padded to 512.
    assert entries["model.embed_tokens.weight"].shape == (512, 256)
    assert "lm_head.weight" not in entries


def test_progress_rises_to_the_size_of_the_store(context: ForkServerContext, model: Model) -> None:
    told = in_child(context, children.progress_of, model("llama"), 2)
    done = [bytes_ for bytes_, _ in told]
    total = told[0][1]
    assert {size for _, size in told} == {total}
    assert done == sorted(done) and done[-1] == total
    assert 0 < done[0] < total / 4, "it is told tensor by tensor"


@pytest.mark.parametrize(
    ("tp_size", "fused", "activations"), [(1, 2, 2), (2, 2, 2), (4, 0, 0)], ids=["tp1", "tp2", "tp4"]
)
def test_an_engine_of_the_finest_size_needs_nothing_but_views(
    context: ForkServerContext, model: Model, keeper: Keeper, tp_size: int, fused: int, activations: int
) -> None:
    handle = keeper("llama_tied", 4).weights
    facts = in_child(context, children.bind, model("llama_tied"), handle, tp_size, tp_size, {})
    report = facts["report"]
    assert (report.fused_qkv, report.split_qkv, report.activations) == (fused, 0, activations)
    assert facts["loaders"] and facts["tied"]
    assert facts["strides"]["model.layers.0.mlp.down_proj.weight"] == (512, 1), "columns of the whole matrix"
    assert facts["strides"]["model.layers.0.mlp.gate_up_proj.weight"] == (256, 1)


@pytest.mark.parametrize(
    ("name", "tp_size", "built_for", "changes", "message"),
    [
        ("llama", 1, 1, {}, r"the model has 1 parameters that the store has not: lm_head\.weight"),
        ("qwen2_tied", 1, 1, {}, r"the model has 2 parameters .*layers\.0\.self_attn\.qkv_proj\.bias"),
        ("llama_tied", 1, 1, {"dtype": "bfloat16"}, r"model\.embed_tokens\.weight: rank 0 of 1 expects .*bfloat16"),
        ("llama_tied", 1, 2, {}, r"model\.embed_tokens\.weight is sharded over 2 ranks in an engine of 1"),
        ("llama_tied", 8, 8, {}, r"laid out for TP 4; TP 8 does not divide"),
        (
            "llama_tied",
            1,
            1,
            {"json_model_override_args": '{"num_key_value_heads": 4}'},
            r"model is a .* 8 query and 4 KV heads of 32, .* the store holds a .* 8 query and 2 KV heads of 32",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_parameter(
    context: ForkServerContext,
    model: Model,
    keeper: Keeper,
    name: str,
    tp_size: int,
    built_for: int,
    changes: dict,
    message: str,
) -> None:
    handle = keeper("llama_tied", 4).weights
    with pytest.raises(RuntimeError, match=message):
        in_child(context, children.bind, model(name), handle, tp_size, built_for, changes)


@pytest.mark.parametrize(
    ("name", "finest_tp"),
    [
        ("qwen3", 2),
        *((name, 2) for name in MODELS if MODELS[name].fp8),
        # KV heads that the store repeats, and more than two blocks.
        ("llama_fp8_tensor", 4),
        ("llama_fp8_channel", 4),
    ],
)
def test_shards_and_steps_of_layers_are_those_of_stock(
    context: ForkServerContext, model: Model, name: str, finest_tp: int
) -> None:
    found = in_child(context, children.compare_with_stock, model(name), finest_tp)
    assert not found["differing"]
    # Two layers of at least six parameters on two ranks, and at least a step each.
    assert found["compared"] > 2 * (2 * 6 + 1)


@pytest.mark.parametrize(
    ("name", "finest_tp", "load_format"),
    [
        ("llama_tied", 4, "dummy"),
        ("llama_fp8_tensor", 4, "auto"),
        *(
            pytest.param(name, 4, "auto", marks=pytest.mark.full)
            for name in ("qwen2", "qwen3_moe", "llama_fp8_channel")
        ),
        pytest.param("qwen3_fp8", 2, "auto", marks=pytest.mark.full),
    ],
)
def test_a_part_is_what_all_weights_have_there(
    context: ForkServerContext, model: Model, name: str, finest_tp: int, load_format: str
) -> None:
    fp8 = MODELS[name].fp8 is not None
    arguments = (model(name), finest_tp, load_format)
    whole = in_child(context, children.contents, *arguments, WHOLE, fp8)
    part = in_child(context, children.contents, *arguments, Part(1, 2), fp8)
    assert part.keys() == whole.keys()
    halved = 0
    for key, half in part.items():
        all_of_it = whole[key]
        for dim, (size, full) in enumerate(zip(half.shape, all_of_it.shape, strict=True)):
            if size != full:
                all_of_it, halved = np.split(all_of_it, 2, dim)[1], halved + 1
        np.testing.assert_array_equal(half, all_of_it, key)
    assert halved >= 1 + 2 * 4, "the embedding, and four matrices of each of two layers"


def test_a_tensor_that_the_checkpoint_lacks_is_named(context: ForkServerContext, model: Model, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nothing was loaded for model\.layers\.0\.mlp\.down_proj\.weight"):
        in_child(context, children.fill_without, model("llama"), ".down_proj.weight", tmp_path / "part")


def test_fp8_of_other_kinds_and_off_block_borders_is_refused(context: ForkServerContext, model: Model) -> None:
    with pytest.raises(RuntimeError, match=r"a shard of KV heads has 64 rows at TP 4, .* blocks of 128"):
        in_child(context, children.layout_of, model("qwen3_fp8"), 4)
    with pytest.raises(RuntimeError, match=r"quantised \(fp8\), and stock quantises them itself"):
        in_child(context, children.layout_of_online_fp8, model("qwen3"))


@pytest.mark.parametrize("suffix", [".down_proj.weight_scale", ".k_proj.input_scale"])
def test_a_scale_that_the_checkpoint_lacks_is_named(
    context: ForkServerContext, model: Model, tmp_path: Path, suffix: str
) -> None:
    parameter = suffix.replace("k_proj", "qkv_proj")
    with pytest.raises(RuntimeError, match=rf"nothing was loaded for model\.layers\.0\.[a-z_]+{parameter}"):
        in_child(context, children.fill_without, model("qwen3_fp8_static"), suffix, tmp_path / "part")


def test_fp8_that_stock_would_requantise_is_refused(context: ForkServerContext, model: Model) -> None:
    with pytest.raises(
        RuntimeError, match=r"layers\.0\..*stock sglang changes FP8 weights .*--adapt-tp-sizes a single"
    ):
        in_child(context, children.fill_in_bfloat16, model("llama_fp8_tensor"))


def test_a_weight_outside_the_store_is_found(context: ForkServerContext, model: Model, keeper: Keeper) -> None:
    handle = keeper("llama_tied", 4).weights
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight \(1024 bytes on cpu\) is not a view"):
        in_child(context, children.bind_then_replace_a_weight, model("llama_tied"), handle)
