"""The shapes of a model's KV from its configuration, and what of stock cannot keep its KV in a shared pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_adapt.kv.sizing import KvShape

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

_ITEMSIZES = {"bf16": 2, "bfloat16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
"""Bytes of an element by `--kv-cache-dtype`; those that are not here store scales beside the elements."""

_WAY_OUT = (
    "Give --adapt-tp-sizes a single value: with one TP size there is no pool and it is served as stock sglang does"
)

_RECURRENT = ("mamba_d_state", "mamba_num_heads", "linear_num_key_heads", "linear_attn_config")
"""Settings of models with recurrent layers."""

_SETTINGS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "speculative decoding (--speculative-algorithm)",
        lambda args: args.speculative_algorithm is not None,
        "its draft model has KV of its own",
    ),
    (
        "a hierarchical or external KV cache (--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv)",
        lambda args: bool(args.enable_hierarchical_cache or args.enable_lmcache or args.enable_flexkv),
        "what it holds of an engine's KV does not go with a change of layout",
    ),
    (
        "sparse attention of blocks (--enable-hisparse)",
        lambda args: bool(args.enable_hisparse),
        "it keeps KV of another shape",
    ),
    (
        "--prefill-only-disable-kv-cache",
        lambda args: bool(args.prefill_only_disable_kv_cache),
        "it has no KV to pool",
    ),
    (
        "decode context parallelism (--dcp-size)",
        lambda args: args.dcp_size > 1,
        "its ranks store tokens in turn instead of heads",
    ),
)


class UnpoolableError(ValueError):
    """A model or a setting whose KV cannot lie in a pool of several TP sizes; says why and what to do instead."""


def kv_shape(server_args: Any, model_config: ModelConfig) -> KvShape:
    """The KV of a model as stock's plain pool (`MHATokenToKVPool`) would store it.

    Raises:
        UnpoolableError: stock would build another kind of pool, or a second one.
    """
    for what, is_set, why in _SETTINGS:
        if is_set(server_args):
            raise UnpoolableError(f"{what} cannot be used with several TP sizes: {why}. {_WAY_OUT}")
    _check_model(model_config)
    return KvShape(
        layers=model_config.num_attention_layers,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
        itemsize=_itemsize(server_args.kv_cache_dtype, model_config),
    )


def _check_model(config: ModelConfig) -> None:
    from sglang.srt.configs.model_config import AttentionArch

    text = config.hf_text_config
    kind = None
    if config.attention_arch is not AttentionArch.MHA:
        kind = f"stores compressed KV ({config.attention_arch.name}), the same on every rank"
    elif config.is_hybrid_swa:
        kind = "has layers with a sliding window, whose KV stock keeps in a pool of their own"
    elif any(getattr(text, name, None) for name in _RECURRENT):
        kind = "has layers with a recurrent state (Mamba, linear attention) beside KV"
    elif config.is_encoder_decoder:
        kind = "keeps the encoder's KV beside the decoder's"
    elif config.v_head_dim != config.head_dim:
        kind = f"has K heads of {config.head_dim} and V heads of {config.v_head_dim} elements"
    if kind is not None:
        name = ", ".join(config.hf_config.architectures or ("the model",))
        raise UnpoolableError(f"{name} {kind}: it cannot be pooled for several TP sizes. {_WAY_OUT}")


def kv_item_bytes(kv_cache_dtype: str, config: ModelConfig) -> int | None:
    """Bytes of an element of KV; None for types that have scales or are packed. See stock's kv_cache_dtype.py."""
    if kv_cache_dtype != "auto":
        return _ITEMSIZES.get(kv_cache_dtype)
    settings = getattr(config.hf_config, "quantization_config", None) or {}
    return None if settings.get("kv_cache_scheme") else config.dtype.itemsize


def _itemsize(dtype: str, config: ModelConfig) -> int:
    itemsize = kv_item_bytes(dtype, config)
    if itemsize is None and dtype == "auto":
        raise UnpoolableError(
            "the model's configuration has its KV quantised (kv_cache_scheme), which the pool does not know; give a "
            f"--kv-cache-dtype, one of {', '.join(_ITEMSIZES)}. {_WAY_OUT}"
        )
    if itemsize is None:
        raise UnpoolableError(
            f"--kv-cache-dtype {dtype} stores scales beside the elements, which the pool has no room for; use auto, "
            f"{', '.join(_ITEMSIZES)}. {_WAY_OUT}"
        )
    return itemsize
