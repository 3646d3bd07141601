"""Filling a store: stock's own loaders write each shard of the finest TP size into its views.

For every rank of the finest TP size the model is built without memory, bound to that rank's views, and handed
to the stock loader of the load format, which reads the checkpoint into it. So there are no checkpoint names to
know, and no second copy of anything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader, get_model_loader
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs
from torch import nn

from sglang_adapt.upstream.rank import configure_logging, prepare_process
from sglang_adapt.upstream.weights.bind import assert_owns_no_weights, bind_views
from sglang_adapt.upstream.weights.construct import build_model
from sglang_adapt.upstream.weights.params import describe_model, model_params, shard_spec
from sglang_adapt.upstream.weights.refusals import check_model
from sglang_adapt.upstream.weights.synthetic import SyntheticLoader
from sglang_adapt.weights import WHOLE, Manifest, Part, WeightStore, plan_layout

_MODEL_LOADER = "sglang.srt.model_loader.loader"


ProgressCallback = Callable[[int, int], None]
"""Called with the bytes loaded so far, as bytes of the store, and the size of the store."""


def prepare_to_fill(server_args: ServerArgs, log_name: str) -> None:
    """Prepare a process that is to fill stores: plugins, version gate, patches, logging.

    Raises:
        PatchError, UnsupportedVersionError: this process is not what it should be.
    """
    prepare_process()
    configure_logging(server_args, log_name)
    if server_args.device == "cpu":
        torch.set_num_threads(1)


class StoreFiller:
    """Builds and fills the store of one model in this process, which runs no engine.

    Args:
        server_args: stock's, of any of the engines: the TP size in them is not looked at.
        finest_tp: the TP size T that the store is laid out for.
        gpu_id: index of the GPU, or of a virtual GPU, that the store is for.
        part: of the weights that it is to have.

    Raises:
        UnshareableError: the model cannot be shared.
    """

    def __init__(self, server_args: ServerArgs, finest_tp: int, gpu_id: int, part: Part = WHOLE) -> None:
        self._finest_tp = finest_tp
        self._part = part
        self._gpu_id = gpu_id
        self._device = torch.device(server_args.device)
        publish(server_args, role="weight_cache_daemon")
        self._model_config = ModelConfig.from_server_args(server_args)
        check_model(self._model_config, finest_tp)
        if self._device.type == "cuda":
            torch.cuda.set_device(gpu_id)
        _join_a_world_of_one(server_args, self._model_config, gpu_id)
        self._load_config = LoadConfig(
            load_format=server_args.load_format,
            download_dir=server_args.download_dir,
            model_loader_extra_config=server_args.model_loader_extra_config,
        )

    @property
    def _is_dummy(self) -> bool:
        return self._load_config.load_format == LoadFormat.DUMMY

    def layout(self) -> Manifest:
        """What the store will hold; takes no memory."""
        with _as_rank(0, self._finest_tp):
            model = build_model(self._model_config, self._load_config, self._device)
        params = model_params(model, self._finest_tp)
        name = describe_model(self._model_config.hf_config, type(model).__name__)
        return plan_layout(name, self._finest_tp, (shard_spec(param) for param in params), self._part)

    def fill(self, store: WeightStore, progress: ProgressCallback | None = None) -> None:
        """Load all weights of its part into a store of this layout.

        Args:
            store: empty; its manifest as `layout` gave it.
            progress: called every few tensors.

        Raises:
            RuntimeError: a loader put weights elsewhere than into the store, or left some out; names the parameter.
            Exception: whatever stock's loader raises.
        """
        ranks = self._part.ranks(self._finest_tp)
        for done, rank in enumerate(ranks):
            with _as_rank(rank, self._finest_tp), self._bound_to(store, rank):
                loader = self._make_loader()
                if progress is not None and isinstance(loader, DefaultModelLoader):
                    _report_reading(loader, store.manifest.nbytes, (done, len(ranks), self._part.of), progress)
                model = loader.load_model(
                    model_config=self._model_config,
                    device_config=DeviceConfig(self._device.type, self._gpu_id),
                )
            assert_owns_no_weights(model, store)
            if progress is not None:
                total = store.manifest.nbytes
                progress(total * (done + 1) // len(ranks), total)
        assert_all_written(store)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._gpu_id)
            torch.cuda.empty_cache()

    def _make_loader(self) -> BaseModelLoader:
        if self._is_dummy:
            return SyntheticLoader(self._load_config)
        return get_model_loader(self._load_config, self._model_config)

    @contextmanager
    def _bound_to(self, store: WeightStore, rank: int) -> Iterator[None]:
        """Hand stock's loaders a model whose parameters are views where they make one themselves."""

        def initialize_model(model_config: ModelConfig, load_config: LoadConfig, *args: Any) -> nn.Module:
            bind_views(model, store, rank, self._finest_tp, filling=True)
            return model

        model = build_model(self._model_config, self._load_config, self._device)
        with patch(f"{_MODEL_LOADER}._initialize_model", initialize_model):
            yield


def assert_all_written(store: WeightStore) -> None:
    """Raise RuntimeError if a matrix of a filled store is all zeros, or a scale of one is.

    Stock passes over names in a checkpoint that it does not know, and parameters that no name was found for.
    """
    for entry in store.manifest.entries:
        whole = store.full(entry.name)
        is_scale = entry.name.endswith((".weight_scale", ".input_scale"))
        empty = (len(entry.shape) > 1 and not whole.view(torch.uint8).any()) or (is_scale and not whole.all())
        if empty:
            raise RuntimeError(
                f"nothing was loaded for {entry.name}: the checkpoint has no tensor for it under a name that stock's "
                f"loader of this model knows"
            )


def _report_reading(
    loader: DefaultModelLoader, total: int, passes: tuple[int, int, int], progress: ProgressCallback
) -> None:
    """Let a stock loader tell how much it has read.

    Args:
        loader: of one pass.
        total: bytes of the store.
        passes: number of this one, how many there are, and how many stores like this the weights take.
        progress: is told.
    """
    number, count, parts = passes
    read_all = loader._get_all_weights

    def reading(model_config: ModelConfig, model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        done = 0
        for name, tensor in read_all(model_config, model):
            yield name, tensor
            done += tensor.numel() * tensor.element_size()
            # Each pass reads the whole checkpoint, which is about as large as the parts of the store together.
            progress((total * number + min(done // parts, total)) // count, total)

    loader._get_all_weights = reading


@contextmanager
def _as_rank(rank: int, tp_size: int) -> Iterator[None]:
    """Let stock's layers believe that this process is rank `rank` of `tp_size`."""
    with get_parallel().override(
        tp_size=tp_size,
        tp_rank=rank,
        attn_tp_size=tp_size,
        attn_tp_rank=rank,
        moe_tp_size=tp_size,
        moe_tp_rank=rank,
    ):
        yield


def _join_a_world_of_one(server_args: ServerArgs, model_config: ModelConfig, gpu_id: int) -> None:
    """Make the process groups that stock's models ask for, without a port and without NCCL."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend="gloo", store=store, rank=0, world_size=1)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=gpu_id, distributed_init_method="initialized above", backend="gloo"
    )
    initialize_model_parallel(tensor_model_parallel_size=1)
    initialize_dp_attention(server_args, model_config)
    initialize_moe_config(server_args)
    initialize_bf16_gemm_config(server_args)
    initialize_fp8_gemm_config(server_args)
