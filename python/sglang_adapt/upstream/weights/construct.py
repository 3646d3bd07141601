"""Building a stock model whose parameters take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

_METHODS: tuple[Any, ...] = (
    unquant.UnquantizedLinearMethod,
    unquant.UnquantizedEmbeddingMethod,
    unquant.UnquantizedFusedMoEMethod,
    Fp8LinearMethod,
    CompressedTensorsLinearMethod,
)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let layers make their weights on the meta device; buffers, such as rotary caches, stay real.

    What a layer makes without its quantisation method, norms and biases, is real but small.
    """
    originals = [(method, method.create_weights) for method in _METHODS]
    for method, original in originals:
        method.create_weights = _on_meta(original)
    try:
        yield
    finally:
        for method, original in originals:
            method.create_weights = original


def _on_meta(create_weights: Any) -> Any:
    @wraps(create_weights)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            create_weights(*args, **kwargs)

    return wrapper


def build_model(model_config: ModelConfig, load_config: LoadConfig, device: torch.device) -> nn.Module:
    """A stock model of this process's rank (`get_parallel()`), its weights on the meta device.

    Does what the first half of stock's `DefaultModelLoader.load_model` does (model_loader/loader.py).
    """
    quant_config = loader._get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), device, parameters_on_meta():
        return loader._initialize_model(model_config, load_config, quant_config)
