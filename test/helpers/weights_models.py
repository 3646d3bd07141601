"""Tiny random models on disk, one for each thing that can go wrong with the order of shared weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FP8_BLOCK = 128
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
    """A model to be written; `family` is the prefix of its transformers classes."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    block_fp8: bool = False


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
    "qwen3_fp8": TinyModel("Qwen3", {"head_dim": 64}, block_fp8=True),
    "qwen2_fp8": TinyModel("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4}, block_fp8=True),
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
    if model.block_fp8:
        _quantise(path)
    return path


def _quantise(path: Path) -> None:
    """Turn a checkpoint into a block-wise FP8 one, as those of Qwen3 are."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    (path / "config.json").write_text(json.dumps(config))
