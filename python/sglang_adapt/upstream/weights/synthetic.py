"""A checkpoint of random weights that are the same for every TP size, made tensor by tensor.

Stock's `--load-format dummy` gives each rank values by the size of its shards, so that TP sizes differ. Here the
tensors are those of the checkpoint, each drawn with a seed from its name, and stock's own `load_weights` cuts
them up. `SyntheticLoader` does that for a stock engine as well: give its class as `ServerArgs.load_format`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_adapt.upstream.weights.refusals import check_model

_STD = 0.02
_EMBEDDING_STD = 1.0
_HEAD_STD = 0.04
_NORM_STD = 0.1
_FP8_STD = 64.0
_INPUT_SCALE = 0.02


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint: values are drawn from a normal distribution, in the model's dtype or in `dtype`."""

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = _STD
    dtype: torch.dtype | None = None

    def draw(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor, in its own dtype or else in `dtype`; equal on every device of a kind."""
        generator = torch.Generator(device=device)
        generator.manual_seed(zlib.crc32(self.name.encode()))
        values = torch.empty(self.shape, dtype=dtype, device=device)
        return values.normal_(self.mean, self.std, generator=generator).to(self.dtype or dtype)


def checkpoint_tensors(config: Any) -> Iterator[CheckpointTensor]:
    """The tensors of a checkpoint of one of `refusals.ARCHITECTURES`, by its Hugging Face configuration."""
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    is_qwen2 = config.model_type == "qwen2"
    qkv_bias = is_qwen2 or getattr(config, "attention_bias", False)
    yield CheckpointTensor("model.embed_tokens.weight", (config.vocab_size, hidden), std=_EMBEDDING_STD)
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            yield CheckpointTensor(f"{attention}.{name}.weight", (size, hidden))
            if qkv_bias:
                yield CheckpointTensor(f"{attention}.{name}.bias", (size,))
        yield CheckpointTensor(f"{attention}.o_proj.weight", (hidden, q_size))
        if qkv_bias and not is_qwen2:
            yield CheckpointTensor(f"{attention}.o_proj.bias", (hidden,))
        if config.model_type in ("qwen3", "qwen3_moe"):
            yield _norm(f"{attention}.q_norm.weight", head_dim)
            yield _norm(f"{attention}.k_norm.weight", head_dim)
        yield from _mlp(config, mlp)
        yield _norm(f"model.layers.{layer}.input_layernorm.weight", hidden)
        yield _norm(f"model.layers.{layer}.post_attention_layernorm.weight", hidden)
    yield _norm("model.norm.weight", hidden)
    if not config.tie_word_embeddings:
        yield CheckpointTensor("lm_head.weight", (config.vocab_size, hidden), std=_HEAD_STD)


def _mlp(config: Any, prefix: str) -> Iterator[CheckpointTensor]:
    """A dense MLP, or the experts and the router of a sparse one (all layers of such a model are, in stock)."""
    hidden = config.hidden_size
    names, size = [prefix], config.intermediate_size
    if config.model_type == "qwen3_moe":
        names, size = (
            [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)],
            config.moe_intermediate_size,
        )
        yield CheckpointTensor(f"{prefix}.gate.weight", (config.num_experts, hidden))
    for name in names:
        yield CheckpointTensor(f"{name}.gate_proj.weight", (size, hidden))
        yield CheckpointTensor(f"{name}.up_proj.weight", (size, hidden))
        yield CheckpointTensor(f"{name}.down_proj.weight", (hidden, size))


def quantised_tensors(config: Any) -> Iterator[CheckpointTensor]:
    """The same in the checkpoint's own format: with the scales of its weights if it is quantised."""
    settings = getattr(config, "quantization_config", None) or {}
    for tensor in checkpoint_tensors(config):
        if settings and tensor.name.endswith("_proj.weight"):
            yield replace(tensor, std=_FP8_STD, dtype=torch.float8_e4m3fn)
            yield from _scales(tensor, settings)
        else:
            yield tensor


def _scales(tensor: CheckpointTensor, settings: Mapping[str, Any]) -> Iterator[CheckpointTensor]:
    """The scales of a linear layer's weight: for each block, for each row (compressed-tensors), or one."""
    scale = tensor.std / _FP8_STD
    name = f"{tensor.name}_scale"
    shape: tuple[int, ...]
    if settings.get("weight_block_size"):
        name = f"{tensor.name}_scale_inv"
        shape = tuple(-(-size // step) for size, step in zip(tensor.shape, settings["weight_block_size"], strict=True))
    elif settings["quant_method"] == "compressed-tensors":
        shape = (tensor.shape[0], 1)
    else:
        shape = ()
    yield CheckpointTensor(name, shape, mean=scale, std=scale / 10, dtype=torch.float32)
    if settings.get("activation_scheme") == "static":
        name = f"{tensor.name.removesuffix('.weight')}.input_scale"
        yield CheckpointTensor(name, (), mean=_INPUT_SCALE, std=_INPUT_SCALE / 10, dtype=torch.float32)


def _norm(name: str, size: int) -> CheckpointTensor:
    return CheckpointTensor(name, (size,), mean=1.0, std=_NORM_STD)


class SyntheticLoader(DefaultModelLoader):
    """Stock's default loader, reading a synthetic checkpoint instead of files."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(LoadConfig(load_format=LoadFormat.AUTO, download_dir=load_config.download_dir))

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def _get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        check_model(model_config, 1)
        device = next(model.parameters()).device
        for tensor in quantised_tensors(model_config.hf_config):
            yield tensor.name, tensor.draw(model_config.dtype, device)
