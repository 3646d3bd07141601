"""What the tests of filling and binding do in a process that has loaded sglang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from weights_engines import server_args_of

from sglang_adapt.weights import WHOLE, Manifest, Part, WeightsHandle, WeightStore


def filler_of(model: Path, finest_tp: int, part: Part = WHOLE, **changes: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    from sglang_adapt.upstream.weights.fill import StoreFiller

    return StoreFiller(ServerArgs(**server_args_of(model, **changes)), finest_tp, 0, part)


def layout_of(model: Path, finest_tp: int) -> Manifest:
    return filler_of(model, finest_tp).layout()


def sizes_by_layout_and_configuration(model: Path, finest_tp: int) -> list[tuple[int, int]]:
    """Bytes of the store by building the model and by its configuration alone: of all weights, and of a shard."""
    from sglang.srt.server_args import ServerArgs

    from sglang_adapt.upstream.weights.sizes import model_sizes

    allow_float32_with_fp8()
    sizes = model_sizes(ServerArgs(**server_args_of(model)), (1, finest_tp))
    assert not isinstance(sizes, str), sizes
    filler, found = filler_of(model, finest_tp), []
    for part in (WHOLE, Part(finest_tp - 1, finest_tp)):
        filler._part = part
        found.append((filler.layout().nbytes, sizes.store_bytes[part.of]))
    return found


def layout_of_online_fp8(model: Path) -> Manifest:
    """The layout of a model that stock would quantise while loading it."""
    return filler_of(model, 2, quantization="fp8", dtype="bfloat16").layout()


def fill_in_bfloat16(model: Path) -> None:
    """Fill a store as on a machine without GPUs."""
    filler = filler_of(model, 2, dtype="bfloat16")
    with WeightStore.create(filler.layout(), "cpu") as store:
        filler.fill(store)


def fill_without(model: Path, suffix: str, folder: Path) -> None:
    """Fill a store from a checkpoint from which the tensors with a suffix are missing."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(suffix)}
    save_file(kept, file, metadata={"format": "pt"})
    allow_float32_with_fp8()
    contents(folder, 2, "auto")


def contents(
    model: Path, finest_tp: int, load_format: str, part: Part = WHOLE, fp8: bool = False
) -> dict[str, np.ndarray]:
    """Fill a store and return its parameters by name (as arrays: tensors would need this process to live on).

    FP8 weights are returned as their bytes.
    """
    if fp8:
        allow_float32_with_fp8()
    filler = filler_of(model, finest_tp, part, load_format=load_format)
    with WeightStore.create(filler.layout(), "cpu") as store:
        filler.fill(store)
        found = {entry.name: store.full(entry.name).clone() for entry in store.manifest.entries}
        return {
            name: (one.view(torch.uint8) if one.dtype.itemsize == 1 else one).numpy() for name, one in found.items()
        }


def progress_of(model: Path, finest_tp: int) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    filler = filler_of(model, finest_tp)
    with WeightStore.create(filler.layout(), "cpu") as store:
        filler.fill(store, lambda done, total: told.append((done, total)))
    return told


def write_sharded(model: Path, finest_tp: int, folder: Path) -> None:
    """Write the checkpoint that `--load-format sharded_state` reads, by stock's own code."""
    import shutil

    from sglang.srt.model_loader.loader import ShardedStateLoader

    from sglang_adapt.upstream.weights.bind import bind_views
    from sglang_adapt.upstream.weights.construct import build_model
    from sglang_adapt.upstream.weights.fill import _as_rank

    filler = filler_of(model, finest_tp)
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    with WeightStore.create(filler.layout(), "cpu") as store:
        filler.fill(store)
        for rank in range(finest_tp):
            with _as_rank(rank, finest_tp):
                network = build_model(filler._model_config, filler._load_config, torch.device("cpu"))
                bind_views(network, store, rank, finest_tp)
                for param in network.parameters():
                    param.data = param.data.clone(memory_format=torch.contiguous_format)
                ShardedStateLoader.save_model(network, str(folder))


def bind(model: Path, handle: WeightsHandle, tp_size: int, built_for: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Bind rank 0 of `tp_size` of a model, built for `built_for` ranks; returns facts of what came of it."""
    from sglang_adapt.upstream.weights.bind import assert_owns_no_weights, bind_views
    from sglang_adapt.upstream.weights.construct import build_model
    from sglang_adapt.upstream.weights.fill import _as_rank

    filler = filler_of(model, built_for, **changes)
    with _as_rank(0, built_for), WeightStore.open(handle) as store:
        network = build_model(filler._model_config, filler._load_config, torch.device("cpu"))
        report = bind_views(network, store, 0, tp_size)
        assert_owns_no_weights(network, store)
        params = dict(network.named_parameters())
        return {
            "report": report,
            "loaders": all(hasattr(p, "weight_loader") for n, p in params.items() if "proj" in n),
            "tied": network.lm_head.weight is network.model.embed_tokens.weight,
            "strides": {name: param.stride() for name, param in params.items()},
        }


def bind_then_replace_a_weight(model: Path, handle: WeightsHandle) -> None:
    from sglang_adapt.upstream.weights.bind import assert_owns_no_weights, bind_views
    from sglang_adapt.upstream.weights.construct import build_model

    filler = filler_of(model, 1)
    with WeightStore.open(handle) as store:
        network = build_model(filler._model_config, filler._load_config, torch.device("cpu"))
        bind_views(network, store, 0, 1)
        norm = network.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
        assert_owns_no_weights(network, store)


def block_fp8_linear(
    input: Any, weight: Any, block_size: list[int], weight_scale: Any, input_scale: Any = None, bias: Any = None
) -> torch.Tensor:
    """Stock's Triton kernel for block-wise FP8 in plain PyTorch, without quantising the input: for a CPU."""
    scale = weight_scale.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    return torch.nn.functional.linear(input, weight.to(input.dtype) * scale, bias)


def row_fp8_linear(
    input: Any, weight: Any, weight_scale: Any, input_scale: Any = None, bias: Any = None, **settings: Any
) -> torch.Tensor:
    """Stock's FP8 product with a scale a row in plain PyTorch, quantising the input only by a given scale.

    `weight` is [columns, rows], `weight_scale` [rows, 1].
    """
    if input_scale is not None:
        assert input_scale.numel() == 1
        limit = torch.finfo(torch.float8_e4m3fn).max
        quantised = (input / input_scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
        input = quantised.to(input.dtype) * input_scale
    assert weight_scale.shape == (weight.shape[1], 1)
    return torch.nn.functional.linear(input, weight.t().to(input.dtype) * weight_scale, bias)


def allow_float32_with_fp8() -> None:
    """Let stock run FP8 in float32 on a CPU as it does on a GPU, so that results can be equal to the last bit."""
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8

    fp8_utils.triton_w8a8_block_fp8_linear = block_fp8_linear
    for module in (fp8_utils, fp8, compressed_tensors_w8a8_fp8):
        module.apply_fp8_linear = row_fp8_linear
    fp8.cutlass_fp8_supported = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    for config in (fp8.Fp8Config, compressed_tensors.CompressedTensorsConfig):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])


def compare_with_stock(model: Path, finest_tp: int) -> dict[str, Any]:
    """Fill a store, bind models to it and compare them with models that stock has loaded itself.

    Returns names of parameters, and of steps of layers, that differ; and how many were compared.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_adapt.upstream.weights.bind import assert_owns_no_weights, bind_views
    from sglang_adapt.upstream.weights.construct import build_model
    from sglang_adapt.upstream.weights.fill import _as_rank
    from sglang_adapt.upstream.weights.loader import process_weights
    from sglang_adapt.upstream.weights.row_fp8 import TensorFp8OnViews

    allow_float32_with_fp8()
    filler = filler_of(model, finest_tp)
    config, load_config, cpu = filler._model_config, filler._load_config, torch.device("cpu")
    differing: list[str] = []
    compared = 0

    def compare(what: str, ours: torch.Tensor, stock: torch.Tensor) -> None:
        nonlocal compared
        compared += 1
        if ours.shape != stock.shape or not torch.equal(ours, stock):
            differing.append(what)

    def pair(rank: int, tp_size: int, store: WeightStore) -> tuple[Any, Any]:
        with _as_rank(rank, tp_size):
            loader = DefaultModelLoader(load_config)
            stock = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
            ours = build_model(config, load_config, cpu)
            bind_views(ours, store, rank, tp_size)
            process_weights(ours)
            assert_owns_no_weights(ours, store)
        return ours, stock

    def as_stock(model: Any, name: str, param: torch.Tensor) -> torch.Tensor:
        """A parameter as stock has it after loading: FP8 with a scale a tensor is kept unchanged by ours."""
        path, _, attribute = name.rpartition(".")
        method = getattr(model.get_submodule(path), "quant_method", None)
        if not isinstance(method, TensorFp8OnViews) or attribute == "bias":
            return param
        return {"weight": param.t(), "weight_scale": method._row_scales, "input_scale": method._input_scale}[attribute]

    with WeightStore.create(filler.layout(), "cpu") as owned, torch.no_grad():
        filler.fill(owned)
        with WeightStore.open(owned.handle) as store:
            for rank in range(finest_tp):
                ours, stock = pair(rank, finest_tp, store)
                theirs = dict(stock.named_parameters())
                for name, param in ours.named_parameters():
                    compare(f"rank {rank} {name}", as_stock(ours, name, param).float(), theirs[name].float())
            ours, stock = pair(0, 1, store)
            hidden = torch.randn(7, config.hf_config.hidden_size, generator=torch.Generator().manual_seed(0))
            with _as_rank(0, 1):
                for index, (a, b) in enumerate(zip(ours.model.layers, stock.model.layers, strict=True)):
                    if hasattr(b.self_attn, "forward_prepare_native"):
                        x = a.self_attn.forward_prepare_native(torch.arange(7), hidden)
                        y = b.self_attn.forward_prepare_native(torch.arange(7), hidden)
                        for part, mine, theirs_ in zip("qkv", x, y, strict=True):
                            compare(f"layer {index} {part}", mine, theirs_)
                    compare(f"layer {index} mlp", a.mlp(hidden), b.mlp(hidden))
    return {"differing": differing, "compared": compared}
