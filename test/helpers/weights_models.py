"""Tiny random models on disk, one for each thing that can go wrong with the order of shared weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

FP8_BLOCK = 128
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
Fp8Kind = Literal["block", "tensor", "static", "channel"]
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    """A model to be written; `family` is the prefix of its transformers classes.

    FP8 is block-wise, with a scale a tensor (`static`: for activations too), or with a scale a channel.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    fp8: Fp8Kind | None = None


MODELS = {
    "llama": TinyModel("Llama", {"head_dim": 32}),
    # Tied embeddings, a vocabulary that is padded, fewer KV heads than ranks of the finest TP size.
    "llama_tied": TinyModel(
        "Llama", {"head_dim": 32, "vocab_size": 501, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    "llama_bias": TinyModel("Llama", {"head_dim": 32, "attention_bias": True}),
    "mistral": TinyModel("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": TinyModel("Qwen2"),
    "qwen2_tied": TinyModel("Qwen2", {"vocab_size": 1000, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    # Heads that are larger than hidden size over heads, and q/k norms.
    "qwen3": TinyModel("Qwen3", {"head_dim": 64}),
    # Shards of TP 2 end where the blocks of 128 end.
    "qwen3_fp8": TinyModel("Qwen3", {"head_dim": 64}, fp8="block"),
    "qwen2_fp8": TinyModel("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4}, fp8="block"),
    "llama_fp8_tensor": TinyModel("Llama", {"head_dim": 32, "num_key_value_heads": 2}, fp8="tensor"),
    "qwen2_fp8_tensor": TinyModel("Qwen2", fp8="tensor"),
    "qwen3_fp8_static": TinyModel("Qwen3", {"head_dim": 64}, fp8="static"),
    "llama_fp8_channel": TinyModel("Llama", {"head_dim": 32, "num_key_value_heads": 2}, fp8="channel"),
    "qwen3_fp8_channel": TinyModel("Qwen3", {"head_dim": 64}, fp8="channel"),
    "qwen3_moe": TinyModel(
        "Qwen3Moe",
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_one_kv_head": TinyModel("Qwen3", {"head_dim": 64, "num_key_value_heads": 1}),
}


def write_model(name: str, folder: Path) -> Path:
    """Write a model of MODELS in float32 to `folder`/`name` and return that path."""
    import transformers

    path = folder / name
    model = MODELS[name]
    config = getattr(transformers, f"{model.family}Config")(**_COMMON | model.changes)
    torch.manual_seed(0)
    network = getattr(transformers, f"{model.family}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, param in network.named_parameters():
            # Biases of 0 and norms of 1 would hide a wrong order.
            if key.endswith("bias"):
                param.normal_(0, 0.3)
            if "norm" in key:
                param.add_(torch.randn_like(param) * 0.2)
    network.save_pretrained(path)
    if model.fp8 is not None:
        _quantise(path, model.fp8)
    return path


def _quantise(path: Path, kind: Fp8Kind) -> None:
    """Turn a checkpoint into an FP8 one, with tensors named as in those that are published."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {}
    for number, (name, tensor) in enumerate(load_file(file).items()):
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        tensors[name], scale = _blocks(tensor) if kind == "block" else _rows(tensor, kind)
        tensors[f"{name}_scale_inv" if kind == "block" else f"{name}_scale"] = scale
        if kind == "static":
            # Different for each, so that the largest of a fused layer's is found out.
            tensors[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.01 + number / 1000)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = _COMPRESSED_TENSORS if kind == "channel" else _fp8_settings(kind)
    (path / "config.json").write_text(json.dumps(config))


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = tensor.shape
    blocks = tensor.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    return (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn), scale


def _rows(tensor: torch.Tensor, kind: Fp8Kind) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (tensor.abs().amax(dim=1, keepdim=True) if kind == "channel" else tensor.abs().amax()) / FP8_MAX
    return (tensor / scale).to(torch.float8_e4m3fn), scale


def _fp8_settings(kind: Fp8Kind) -> dict[str, Any]:
    settings = {"quant_method": "fp8", "activation_scheme": "static" if kind == "static" else "dynamic"}
    return settings | ({"weight_block_size": [FP8_BLOCK, FP8_BLOCK]} if kind == "block" else {})


_COMPRESSED_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
                "group_size": None,
                "block_structure": None,
            },
            "output_activations": None,
        }
    },
}
