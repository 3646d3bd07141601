"""What the tests of filling and binding do in a process that has loaded sglang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from weights_engines import server_args_of

from sglang_adapt.weights import Manifest, WeightsHandle, WeightStore


def filler_of(model: Path, finest_tp: int, **changes: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    from sglang_adapt.upstream.weights.fill import StoreFiller

    return StoreFiller(ServerArgs(**server_args_of(model, **changes)), finest_tp, 0)


def layout_of(model: Path, finest_tp: int) -> Manifest:
    return filler_of(model, finest_tp).layout()


def contents(model: Path, finest_tp: int, load_format: str) -> dict[str, np.ndarray]:
    """Fill a store and return its parameters by name (as arrays: tensors would need this process to live on)."""
    filler = filler_of(model, finest_tp, load_format=load_format)
    with WeightStore.create(filler.layout(), "cpu") as store:
        filler.fill(store)
        return {entry.name: store.full(entry.name).clone().numpy() for entry in store.manifest.entries}


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
