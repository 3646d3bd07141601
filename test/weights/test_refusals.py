"""What cannot share weights is refused with the reason and the way out, before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.upstream.weights.refusals import UnshareableError, check_shareable

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "enable_lora": False,
    "lora_paths": None,
    "pp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
    "torchao_config": "",
    "modelopt_quant": None,
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "enable_memory_saver": False,
    "enable_weights_cpu_backup": False,
    "weight_cache_mode": "off",
    "moe_a2a_backend": "none",
    "enable_torch_compile": False,
}


MANY_HEADS = {"num_attention_heads": 128}


def model(architecture: str = "LlamaForCausalLM", quantization: str | None = None, **config: Any) -> SimpleNamespace:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336} | config
    hf_config = SimpleNamespace(architectures=[architecture], **sizes)
    return SimpleNamespace(
        hf_config=hf_config,
        quantization=quantization,
        get_total_num_kv_heads=lambda: hf_config.num_key_value_heads,
    )


def check(model_config: SimpleNamespace, tp_sizes: tuple[int, ...] = (1, 2, 4), **settings: Any) -> None:
    check_shareable(SimpleNamespace(**(SETTINGS | settings)), model_config, tp_sizes)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"],
)
def test_known_models_pass(architecture: str) -> None:
    check(model(architecture))
    check(model(architecture, num_key_value_heads=2), (1, 8))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["a"]}, "--lora-paths"),
        ({"pp_size": 2}, "--pp-size"),
        ({"ep_size": 2}, "--ep-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_dp_lm_head": True}, "--enable-dp-lm-head"),
        ({"torchao_config": "int4wo-128"}, "--torchao-config"),
        ({"modelopt_quant": "fp8"}, "--modelopt-quant"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_weights_cpu_backup": True}, "--enable-weights-cpu-backup"),
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
    ],
)
def test_settings_are_refused_by_their_flags_and_with_the_way_out(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(
        UnshareableError, match=f"{names}.* cannot be used on shared weights: .*--adapt-tp-sizes a single"
    ):
        check(model(), **settings)


def test_unknown_models_and_quantised_ones_are_refused() -> None:
    with pytest.raises(UnshareableError, match=r"a DeepseekV3ForCausalLM; .* for LlamaForCausalLM, .*--adapt-tp-sizes"):
        check(model("DeepseekV3ForCausalLM"))
    with pytest.raises(UnshareableError, match=r"quantised \(awq\).*--adapt-tp-sizes"):
        check(model(quantization="awq"))


@pytest.mark.parametrize(
    ("config", "tp_sizes", "message"),
    [
        ({"num_attention_heads": 30}, (1, 4), "30 attention heads cannot be shared out to 4 ranks"),
        ({"num_key_value_heads": 6}, (1, 4), "6 KV heads can be neither shared out to nor repeated on 4 ranks"),
        ({"intermediate_size": 14338}, (1, 4), "an intermediate size of 14338 cannot be shared out to 4 ranks"),
        ({"moe_intermediate_size": 770}, (1, 4), "an intermediate size of 770 cannot be shared out to 4 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_named(config: dict[str, int], tp_sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnshareableError, match=f"{message}; lower the largest TP size"):
        check(model(**config), tp_sizes)


def test_block_fp8_is_shared_for_the_models_whose_scales_stock_loads() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600}
    check(model("Qwen3ForCausalLM", "fp8", quantization_config=settings, **sizes), (1, 2, 4, 8))
    with pytest.raises(UnshareableError, match=r"block-wise FP8 .* not for LlamaForCausalLM"):
        check(model("LlamaForCausalLM", "fp8", quantization_config=settings, **sizes))
    with pytest.raises(UnshareableError, match="an intermediate size has 200 rows at TP 128"):
        check(model("Qwen3ForCausalLM", "fp8", quantization_config=settings, **sizes | MANY_HEADS), (1, 128))


def compressed(**weights: Any) -> dict[str, Any]:
    """A compressed-tensors configuration; FP8 with a scale a channel but for what is given."""
    inputs = {"dynamic": weights.pop("dynamic_inputs", True)}
    found = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True} | weights
    group = {"weights": found, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
        ("compressed-tensors", compressed()),
    ],
    ids=["tensor", "static", "channel"],
)
def test_fp8_with_a_scale_a_tensor_or_a_channel_is_shared(
    architecture: str, method: str, settings: dict[str, Any]
) -> None:
    # No blocks, so that shards may end anywhere.
    check(model(architecture, method, quantization_config=settings, intermediate_size=1000), (1, 2, 4))


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("fp8", None, "stock quantises them itself while it loads them"),
        ("compressed-tensors", compressed(strategy="tensor"), "stock requantises fused layers to their largest scale"),
        ("compressed-tensors", compressed(strategy="block"), "only symmetric scales a channel"),
        ("compressed-tensors", compressed(symmetric=False), "only symmetric scales a channel"),
        ("compressed-tensors", compressed(dynamic_inputs=False), "only symmetric scales a channel"),
        ("compressed-tensors", compressed(type="int"), "what a rank has of them differs"),
        ("compressed-tensors", compressed(num_bits=4), "what a rank has of them differs"),
        ("compressed-tensors", {"quant_method": "compressed-tensors"}, "what a rank has of them differs"),
        ("gptq", {"quant_method": "gptq"}, "what a rank has of them differs"),
    ],
)
def test_other_quantisation_is_refused_with_its_reason(method: str, settings: dict[str, Any] | None, why: str) -> None:
    config = {} if settings is None else {"quantization_config": settings}
    with pytest.raises(UnshareableError, match=rf"quantised \({method}\), and {why}.*--adapt-tp-sizes a single"):
        check(model(quantization=method, **config))


def test_experts_in_fp8_are_refused() -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(UnshareableError, match=r"per-tensor FP8 .* not for Qwen3MoeForCausalLM.*--adapt-tp-sizes"):
        check(model("Qwen3MoeForCausalLM", "fp8", quantization_config=settings))


def test_fp8_that_runs_on_gpus_only_is_refused_on_virtual_ones() -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(UnshareableError, match="run on GPUs only, and this machine has none"):
        check(model(quantization="fp8", quantization_config=settings), device="cpu")


def test_compiled_experts_are_refused() -> None:
    check(model(), enable_torch_compile=True)
    with pytest.raises(UnshareableError, match=r"--enable-torch-compile .* stock order. .*--adapt-tp-sizes"):
        check(model("Qwen3MoeForCausalLM", num_experts=8), enable_torch_compile=True)


def test_every_setting_that_is_looked_at_is_one_of_stocks() -> None:
    from sglang.srt.server_args import ServerArgs

    assert SETTINGS.keys() <= ServerArgs.__dataclass_fields__.keys()
