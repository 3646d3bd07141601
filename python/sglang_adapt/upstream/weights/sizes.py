"""How large a model's weights and KV are, from its configuration alone.

`StoreFiller.layout` says the same by building the model, which needs process groups and a process of its own; the
start is to know before it starts anything. That both agree to the byte is tested for every known model class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.vocab_parallel_embedding import pad_vocab_size
from sglang.srt.server_args import ServerArgs

from sglang_adapt.upstream.kv_shape import kv_item_bytes
from sglang_adapt.upstream.weights.params import BLOCK_SCALE
from sglang_adapt.upstream.weights.refusals import UnshareableError, check_model
from sglang_adapt.upstream.weights.synthetic import CheckpointTensor, quantised_tensors
from sglang_adapt.weights.manifest import ALIGNMENT

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_ROWS_SHARED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS_SHARED = ("o_proj", "down_proj")
_KV_SCALES = ("llama", "mistral", "qwen2")
"""Model types whose attention layers have two scales of the KV cache, of 4 bytes each, if they are quantised."""


@dataclass(frozen=True)
class ModelSizes:
    """What a model takes of a GPU.

    Attributes:
        shape: class of its shapes, `<layers>x<hidden size>`.
        store_bytes: of the one copy of the weights, laid out for the largest TP size, by the number of parts that it is
            cut into, of which each GPU has one.
        rank_bytes: of a rank's weights by TP size, where nothing is shared.
        kv_bytes_per_token: of a rank's KV by TP size.
    """

    shape: str
    store_bytes: dict[int, int]
    rank_bytes: dict[int, int]
    kv_bytes_per_token: dict[int, int]


def model_sizes(server_args: ServerArgs, tp_sizes: Sequence[int]) -> ModelSizes | str:
    """The sizes of a model, or why they are not known before it is loaded.

    Args:
        server_args: stock's, of any of the engines: the TP size in them is not looked at.
        tp_sizes: TP sizes to tell the sizes for.
    """
    if server_args.speculative_algorithm is not None or server_args.enable_lora or server_args.lora_paths:
        return "the sizes of draft models and adapters are not known before they are loaded"
    model_config = ModelConfig.from_server_args(server_args)
    try:
        check_model(model_config, max(tp_sizes))
    except UnshareableError as error:
        return f"the sizes of this model are not known before it is loaded: {error}"
    if server_args.quantization is not None and not getattr(model_config.hf_config, "quantization_config", None):
        return "the weights are quantised while they are loaded, and their size is not known before"
    kv_itemsize = kv_item_bytes(server_args.kv_cache_dtype, model_config)
    if kv_itemsize is None:
        return f"the size of KV in {server_args.kv_cache_dtype} is not known"
    config = model_config.hf_config
    heads = model_config.get_total_num_kv_heads()
    return ModelSizes(
        shape=f"{config.num_hidden_layers}x{config.hidden_size}",
        store_bytes={parts: store_bytes(config, model_config.dtype, max(tp_sizes), parts) for parts in {1, *tp_sizes}},
        rank_bytes={tp: sum(shard for shard, _ in _shards(config, model_config.dtype, tp)) for tp in tp_sizes},
        kv_bytes_per_token={
            tp: config.num_hidden_layers * 2 * max(1, heads // tp) * model_config.head_dim * kv_itemsize
            for tp in tp_sizes
        },
    )


def weight_itemsize(server_args: ServerArgs) -> int:
    """Bytes of a weight, quantised or not."""
    model_config = ModelConfig.from_server_args(server_args)
    settings = getattr(model_config.hf_config, "quantization_config", None) or {}
    return 1 if settings.get("quant_method") in ("fp8", "compressed-tensors") else int(model_config.dtype.itemsize)


def decode_graph_batch(server_args: ServerArgs) -> int:
    """The largest batch of which stock captures a decode graph with these arguments; 0 if it captures none."""
    decode = server_args.cuda_graph_config.decode
    if server_args.device == "cpu" or decode.backend == "disabled":
        return 0
    return int(decode.max_bs)


def store_bytes(config: Any, dtype: torch.dtype, finest_tp: int, parts: int = 1) -> int:
    """Bytes of a store laid out for `finest_tp` that has one of `parts`, as `weights.plan_layout` lays it out."""
    total = 0
    for shard, is_sharded in _shards(config, dtype, finest_tp):
        nbytes = shard * finest_tp // parts if is_sharded else shard
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return total


def _shards(config: Any, dtype: torch.dtype, tp: int) -> Iterator[tuple[int, bool]]:
    """Bytes of each parameter of one rank of `tp`, and whether other ranks have other parts of it."""
    sizes: dict[str, int] = defaultdict(int)
    sharded: dict[str, bool] = {}
    for tensor in quantised_tensors(config):
        name, shape, is_sharded = _shard(config, tensor, tp)
        sizes[name] += prod(shape) * (tensor.dtype or dtype).itemsize
        sharded[name] = is_sharded
    settings = getattr(config, "quantization_config", None) or {}
    if settings.get("quant_method") == "fp8" and config.model_type in _KV_SCALES:
        for name in ("k_scale", "v_scale"):
            for layer in range(config.num_hidden_layers):
                sizes[f"{layer}.{name}"], sharded[f"{layer}.{name}"] = 4, False
    return ((sizes[name], sharded[name]) for name in sizes)


def _shard(config: Any, tensor: CheckpointTensor, tp: int) -> tuple[str, tuple[int, ...], bool]:
    """The parameter that a checkpoint's tensor goes into, and the shape of what a rank has of it."""
    *path, layer, attribute = tensor.name.split(".")
    if "experts" in path:
        # All experts of a layer are two parameters.
        path = path[: path.index("experts") + 1]
    name = ".".join((*path, _FUSED.get(layer, layer), attribute))
    shape = list(tensor.shape)
    if not shape:
        # A scale for the whole tensor; fused layers have one for each of theirs.
        return name, (1,), False
    if layer in ("embed_tokens", "lm_head"):
        shape[0] = pad_vocab_size(shape[0])
    if layer in ("k_proj", "v_proj"):
        shape[0] //= min(tp, config.num_key_value_heads)
        return name, tuple(shape), True
    if layer in _ROWS_SHARED:
        shape[0] //= tp
        return name, tuple(shape), True
    if layer in _COLUMNS_SHARED and attribute in ("weight", BLOCK_SCALE):
        shape[1] //= tp
        return name, tuple(shape), True
    return name, tuple(shape), False
