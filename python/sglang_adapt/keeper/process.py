"""The keeper's process: load once, export, stay until the parent goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait

import setproctitle
import torch

from sglang_adapt.core.process import die_with_parent, ignore_stop_signals
from sglang_adapt.keeper.config import KeeperConfig, RegionSpec, StagedSpec
from sglang_adapt.keeper.messages import Failed, KeeperMessage, Progress, Ready, encode
from sglang_adapt.kv.staged_server import StagedServer
from sglang_adapt.memory import Region, RegionHandle, SharedMemoryError, allocate
from sglang_adapt.upstream.cuda_facts import give_back_cuda
from sglang_adapt.weights import WeightStore

_PROGRESS_STEPS = 100


def keeper_main(config: KeeperConfig, pipe: Connection) -> None:
    """Own what `config` says until the process that started this one ends or closes the pipe.

    Raises:
        Exception: whatever kept it from loading or allocating; told over the pipe first.
    """
    started = time.monotonic()
    # The parent is the forkserver, which ends when the process that started it does.
    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()
    os.environ.update(config.environment)
    give_back_cuda()
    setproctitle.setproctitle(f"sglang_adapt::{config.name}")
    try:
        regions = _allocate(config)
        store = None if config.finest_tp is None else _load(config, config.finest_tp, pipe)
        senders = {} if config.staged is None else _senders(config, config.staged, regions)
    except Exception as error:
        _tell(pipe, Failed(f"{type(error).__name__}: {error}"))
        raise
    handles: dict[str, dict[int, RegionHandle]] = {
        name: {gpu: region.handle for gpu, region in by_gpu.items()} for name, by_gpu in regions.items()
    }
    weights = None if store is None else store.handle
    staged = {gpu: sender.handle for gpu, sender in senders.items()}
    _tell(pipe, Ready(weights, handles, time.monotonic() - started, staged))
    _wait_for_the_end(pipe)


def _allocate(config: KeeperConfig) -> dict[str, dict[int, Region]]:
    return {spec.name: {gpu: _region(config, spec, gpu) for gpu in config.gpu_ids} for spec in config.regions}


def _region(config: KeeperConfig, spec: RegionSpec, gpu: int) -> Region:
    try:
        return allocate(spec.nbytes, "cpu" if spec.on_host else _device(config, gpu))
    except SharedMemoryError as error:
        way_out = f"; give a smaller {spec.sized_by}" if spec.sized_by else ""
        raise SharedMemoryError(f"the region {spec.name!r}: {error}{way_out}") from error


def _senders(config: KeeperConfig, spec: StagedSpec, regions: dict[str, dict[int, Region]]) -> dict[int, StagedServer]:
    """What sends the KV of each GPU."""
    if config.server_args.device == "cpu":
        # The cores are the engines'.
        torch.set_num_threads(1)
    return {
        gpu: StagedServer(
            f"GPU {gpu}",
            spec.geometry,
            regions[spec.kv][gpu],
            regions[spec.link][gpu],
            f"{spec.folder}/kv{gpu}.{os.getpid()}",
        )
        for gpu in config.gpu_ids
    }


def _device(config: KeeperConfig, gpu: int) -> torch.device:
    return torch.device("cpu") if config.server_args.device == "cpu" else torch.device("cuda", gpu)


def _load(config: KeeperConfig, finest_tp: int, pipe: Connection) -> WeightStore:
    from sglang_adapt.upstream.weights.fill import StoreFiller, prepare_to_fill

    prepare_to_fill(config.server_args, config.name)
    gpu = config.gpu_ids[0]
    filler = StoreFiller(config.server_args, finest_tp, gpu, config.part)
    store = WeightStore.create(filler.layout(), _device(config, gpu))
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        step = done * _PROGRESS_STEPS // total
        if step > told:
            told = step
            _tell(pipe, Progress(done, total))

    tell(0, store.manifest.nbytes)
    filler.fill(store, tell)
    return store


def _tell(pipe: Connection, message: KeeperMessage) -> None:
    pipe.send_bytes(encode(message))


def _wait_for_the_end(pipe: Connection) -> None:
    """Return when the parent has closed its end of the pipe, or is gone."""
    parent = multiprocessing.parent_process()
    wait([pipe] if parent is None else [pipe, parent.sentinel])
