"""What of a model decides its KV, and which models and settings cannot be pooled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch

from sglang_adapt.kv.sizing import KvShape
from sglang_adapt.upstream.kv_shape import UnpoolableError, kv_shape


def args(**changes: Any) -> SimpleNamespace:
    values = {
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_hisparse": False,
        "prefill_only_disable_kv_cache": False,
        "dcp_size": 1,
        "kv_cache_dtype": "auto",
    }
    return SimpleNamespace(**values | changes)


def model(text: dict[str, Any] | None = None, **changes: Any) -> Any:
    values = {
        "attention_arch": AttentionArch.MHA,
        "is_hybrid_swa": False,
        "is_encoder_decoder": False,
        "hf_text_config": SimpleNamespace(**text or {}),
        "hf_config": SimpleNamespace(architectures=["SomeForCausalLM"]),
        "num_attention_layers": 32,
        "get_total_num_kv_heads": lambda: 8,
        "head_dim": 128,
        "v_head_dim": 128,
        "dtype": torch.bfloat16,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(("dtype", "itemsize"), [("auto", 2), ("bf16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)])
def test_a_plain_model(dtype: str, itemsize: int) -> None:
    assert kv_shape(args(kv_cache_dtype=dtype), model()) == KvShape(32, 8, 128, itemsize)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (model(attention_arch=AttentionArch.MLA), "stores compressed KV"),
        (model(is_hybrid_swa=True), "has layers with a sliding window"),
        (model({"linear_num_key_heads": 16}), "has layers with a recurrent state"),
        (model({"mamba_num_heads": 16}), "has layers with a recurrent state"),
        (model(is_encoder_decoder=True), "keeps the encoder's KV"),
        (model(v_head_dim=64), "has K heads of 128 and V heads of 64 elements"),
    ],
)
def test_models_that_cannot_be_pooled(config: Any, text: str) -> None:
    with pytest.raises(UnpoolableError, match=f"SomeForCausalLM {text}.* Give --adapt-tp-sizes a single value"):
        kv_shape(args(), config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm.*its draft model has KV of its own"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"prefill_only_disable_kv_cache": True}, "--prefill-only-disable-kv-cache"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"kv_cache_dtype": "mxfp8"}, "--kv-cache-dtype mxfp8 stores scales"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 stores scales"),
    ],
)
def test_settings_that_cannot_be_pooled(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnpoolableError, match=f"{text}.* Give --adapt-tp-sizes a single value"):
        kv_shape(args(**change), model())
