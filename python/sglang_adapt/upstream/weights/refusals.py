"""What cannot run on shared weights, each with its reason and the way out; checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Stock model classes whose parameters and fused outputs are known here."""

BLOCK_FP8_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Those of them for which stock loads the scales of block-wise FP8 checkpoints (not Llama's: models/llama.py)."""

ROW_FP8_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Those of them whose FP8 weights with a scale a tensor or a row (output channel) can be shared."""

WAY_OUT = (
    "Give --adapt-tp-sizes a single value: with one TP size nothing is shared and it is served as stock sglang does"
)

_SETTINGS: tuple[tuple[str, Callable[[ServerArgs], bool], str], ...] = (
    (
        "LoRA (--enable-lora, --lora-paths)",
        lambda args: bool(args.enable_lora or args.lora_paths),
        "its adapters expect q, k, v and gate, up in natural order at the layers' outputs",
    ),
    (
        "pipeline parallelism (--pp-size)",
        lambda args: args.pp_size > 1,
        "a stage holds some layers only, and the copy holds all",
    ),
    (
        "expert parallelism (--ep-size)",
        lambda args: args.ep_size > 1,
        "its ranks hold whole experts instead of parts of each",
    ),
    (
        "an expert all-to-all (--moe-a2a-backend)",
        lambda args: args.moe_a2a_backend != "none",
        "its ranks hold whole experts instead of parts of each",
    ),
    (
        "data-parallel attention (--enable-dp-attention, --enable-dp-lm-head)",
        lambda args: bool(args.enable_dp_attention or args.enable_dp_lm_head),
        "its layers are sharded over other groups than the engine's ranks",
    ),
    (
        "torchao quantisation (--torchao-config)",
        lambda args: bool(args.torchao_config),
        "it replaces the weights by its own",
    ),
    (
        "ModelOpt quantisation (--modelopt-quant)",
        lambda args: bool(args.modelopt_quant),
        "it replaces the weights by its own",
    ),
    (
        "offloading of weights (--cpu-offload-gb, --offload-group-size)",
        lambda args: args.cpu_offload_gb > 0 or args.offload_group_size > 0,
        "it moves the weights out of the shared copy",
    ),
    (
        "the memory saver (--enable-memory-saver, --enable-weights-cpu-backup)",
        lambda args: bool(args.enable_memory_saver or args.enable_weights_cpu_backup),
        "it releases weights that the other engines go on using",
    ),
    (
        "stock's weight cache (--weight-cache-mode)",
        lambda args: args.weight_cache_mode != "off",
        "it is another owner of the weights, for one TP size",
    ),
)


class UnshareableError(ValueError):
    """A model or a setting cannot run on one shared copy of the weights; says why and what to do instead."""


def check_shareable(server_args: ServerArgs, model_config: ModelConfig, tp_sizes: Sequence[int]) -> None:
    """Check that engines of all `tp_sizes` can share one copy of this model's weights.

    Raises:
        UnshareableError: the first thing that forbids it, why, and the way out.
    """
    for what, is_set, why in _SETTINGS:
        if is_set(server_args):
            raise UnshareableError(f"{what} cannot be used on shared weights: {why}. {WAY_OUT}")
    check_model(model_config, max(tp_sizes))
    settings = getattr(model_config.hf_config, "quantization_config", None)
    if settings and not settings.get("weight_block_size") and server_args.device == "cpu":
        raise UnshareableError(
            "FP8 weights with a scale a tensor or a channel run on GPUs only, and this machine has none. Use a "
            "checkpoint that is not quantised"
        )
    if server_args.enable_torch_compile and getattr(model_config.hf_config, "num_experts", None):
        raise UnshareableError(
            f"--enable-torch-compile runs the experts of batches of one in code of its own, which reads gate and up in "
            f"stock order. Leave it out. {WAY_OUT}"
        )


def check_model(model_config: ModelConfig, finest_tp: int) -> None:
    """Check architecture, quantisation and sizes of a model for a store laid out for `finest_tp`.

    Raises:
        UnshareableError: as `check_shareable`.
    """
    names = list(model_config.hf_config.architectures or ())
    if not any(name in ARCHITECTURES for name in names):
        raise UnshareableError(
            f"the model is a {', '.join(names) or 'model of no named architecture'}; weights can be shared "
            f"between TP sizes for {', '.join(ARCHITECTURES)}. {WAY_OUT}"
        )
    config = model_config.hf_config
    if model_config.quantization is not None:
        _check_quantisation(config, model_config.quantization)
    heads, kv_heads = config.num_attention_heads, model_config.get_total_num_kv_heads()
    if heads % finest_tp:
        raise UnshareableError(
            f"{heads} attention heads cannot be shared out to {finest_tp} ranks; lower the largest TP size"
        )
    if kv_heads % finest_tp and finest_tp % kv_heads:
        raise UnshareableError(
            f"{kv_heads} KV heads can be neither shared out to nor repeated on {finest_tp} ranks; lower the "
            f"largest TP size"
        )
    for size in (config.intermediate_size, getattr(config, "moe_intermediate_size", None)):
        if size is not None and size % finest_tp:
            raise UnshareableError(
                f"an intermediate size of {size} cannot be shared out to {finest_tp} ranks; lower the largest TP size"
            )
    if (getattr(config, "quantization_config", None) or {}).get("weight_block_size"):
        _check_block_borders(config, kv_heads, finest_tp)


def _check_quantisation(config: Any, method: str) -> None:
    """Refuse every quantisation but FP8 of dense layers, block-wise, with a scale a tensor, or with one a row."""
    settings = getattr(config, "quantization_config", None) or {}
    kind, why = _fp8_kind(settings, method)
    if kind is None:
        raise UnshareableError(
            f"the weights are quantised ({method}), and {why}. Use a checkpoint that is not quantised, or one in FP8: "
            f"block-wise (with weight_block_size in its configuration), with a scale a tensor, or in "
            f"compressed-tensors with a scale a channel. {WAY_OUT}"
        )
    known = BLOCK_FP8_ARCHITECTURES if kind == "block-wise" else ROW_FP8_ARCHITECTURES
    if not any(name in known for name in config.architectures):
        raise UnshareableError(
            f"{kind} FP8 weights can be shared for {', '.join(known)}, not for "
            f"{', '.join(config.architectures)}; use a checkpoint that is not quantised. {WAY_OUT}"
        )


def _fp8_kind(settings: Mapping[str, Any], method: str) -> tuple[str | None, str]:
    """What kind of FP8 a checkpoint's configuration tells of, or None and why it cannot be shared."""
    if method == "fp8":
        if not settings:
            return None, "stock quantises them itself while it loads them, for each TP size anew"
        if settings.get("weight_block_size"):
            return "block-wise", ""
        return "per-tensor", ""
    if method != "compressed-tensors":
        return None, "what a rank has of them differs between TP sizes"
    for group in (settings.get("config_groups") or {None: {}}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            return None, "what a rank has of them differs between TP sizes"
        if weights.get("strategy") == "tensor":
            return None, "stock requantises fused layers to their largest scale after loading, in the shared copy"
        if weights.get("strategy") != "channel" or not inputs.get("dynamic") or not weights.get("symmetric", True):
            return None, "only symmetric scales a channel with dynamic activations are known to be shareable"
    return "per-channel", ""


def _check_block_borders(config: Any, kv_heads: int, finest_tp: int) -> None:
    """Check that shards of block-wise FP8 weights end where blocks end."""
    block = max(config.quantization_config["weight_block_size"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for what, size in (
        ("query heads", config.num_attention_heads // finest_tp * head_dim),
        ("KV heads", max(1, kv_heads // finest_tp) * head_dim),
        ("an intermediate size", config.intermediate_size // finest_tp),
    ):
        if size % block:
            raise UnshareableError(
                f"a shard of {what} has {size} rows at TP {finest_tp}, which is no multiple of the FP8 blocks of "
                f"{block}; lower the largest TP size"
            )
