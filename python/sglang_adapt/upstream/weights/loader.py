"""The model loader of an engine rank: parameters are views of the keeper's copy, nothing is read."""

from __future__ import annotations

import logging

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.quantization.unquant import get_bf16_gemm_backend
from sglang.srt.model_loader.loader import BaseModelLoader
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_adapt.upstream.sequence.base import Base
from sglang_adapt.upstream.sequence.group import groups_of
from sglang_adapt.upstream.sequence.install import run_sequences
from sglang_adapt.upstream.sequence.mode import SequenceMode, use_mode
from sglang_adapt.upstream.weights.bind import assert_owns_no_weights, bind_views
from sglang_adapt.upstream.weights.construct import build_model
from sglang_adapt.upstream.weights.refusals import UnshareableError, check_model
from sglang_adapt.weights import WeightsHandle, WeightStore

logger = logging.getLogger(__name__)

HANDLE_KEY = "weights"
"""Where the handle of the store is in `LoadConfig.model_loader_extra_config`."""
SP_TOKENS_KEY = "sp_tokens"
"""Where the threshold of sequence parallelism is in it, or None."""
BASE_TP_KEY = "base_tp"
"""Where the TP size is in it whose shards of the weights sequence-parallel batches run on."""


class ViewLoader(BaseModelLoader):
    """Loads a stock model by binding its parameters to views of a store that another process owns.

    Stock makes one if `LoadConfig.load_format` is this class (`get_model_loader` in model_loader/loader.py).
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        handle = load_config.model_loader_extra_config[HANDLE_KEY]
        if not isinstance(handle, WeightsHandle):
            raise TypeError(f"the loader's configuration holds {handle!r} instead of the handle of a store")
        self._handle = handle
        self._sp_tokens = load_config.model_loader_extra_config[SP_TOKENS_KEY]
        self._base_tp = load_config.model_loader_extra_config[BASE_TP_KEY]

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download: the keeper has the weights."""

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Build and bind the model of this process's rank.

        Raises:
            UnshareableError, ViewMismatchError: model and store do not fit.
            UnsliceableError: the model cannot run batches sequence-parallel, and is to.
            MemoryGoneError, SharedMemoryError: the store cannot be mapped.
        """
        rank, tp_size = get_parallel().tp_rank, get_parallel().tp_size
        check_model(model_config, self._handle.manifest.finest_tp)
        if get_bf16_gemm_backend().is_cutedsl():
            raise UnshareableError(
                "the cutedsl GEMM backend is not known to take strided weights; start with --bf16-gemm-backend torch"
            )
        store = WeightStore.open(self._handle)
        model = build_model(model_config, self.load_config, torch.device(device_config.device))
        report = bind_views(model, store, rank, tp_size)
        process_weights(model)
        if self._sp_tokens is not None and tp_size > self._base_tp:
            base = Base(rank, tp_size, self._base_tp)
            groups = groups_of(base, get_tp_group(), torch.device(device_config.device))
            mode = SequenceMode(base, groups, self._sp_tokens)
            layers = run_sequences(model, store, mode)
            use_mode(mode)
            logger.info("Batches of %d tokens and more run sequence-parallel, %s: %s", self._sp_tokens, base, layers)
        assert_owns_no_weights(model, store)
        logger.info("Weights are views of the shared copy (rank %d of %d): %s", rank, tp_size, report)
        return model.eval()


def process_weights(model: nn.Module) -> None:
    """What stock does after loading, for a model whose parameters are views."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
