"""Making this process's stock scheduler run on shared weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_adapt.upstream.patch import PATCHES, Patch
from sglang_adapt.upstream.sequence.counting import CountGraphReplays
from sglang_adapt.upstream.sequence.group import CaptureOwnGroups
from sglang_adapt.weights import WeightsHandle

_handle: WeightsHandle | None = None
_sp_tokens: int | None = None
_base_tp = 1


class LoadFromStore(Patch):
    """Loads the model through `ViewLoader`; stock would read the checkpoint.

    A speculative draft model is another model and is loaded as stock does. Not done by setting
    `ServerArgs.load_format` to the loader's class, because stock reports its server arguments over sockets, which
    cannot carry a class.
    """

    target = "sglang.srt.model_executor.model_runner.load_model_with_memory_saver"
    kind = "before"

    @staticmethod
    def hook(*args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
        from sglang_adapt.upstream.weights.loader import BASE_TP_KEY, HANDLE_KEY, SP_TOKENS_KEY, ViewLoader

        if kwargs["is_draft_worker"]:
            return None
        extra = {HANDLE_KEY: _handle, SP_TOKENS_KEY: _sp_tokens, BASE_TP_KEY: _base_tp}
        load_config = dataclasses.replace(
            kwargs["load_config"], load_format=ViewLoader, model_loader_extra_config=extra
        )
        return args, {**kwargs, "load_config": load_config}


class KeepHeadCounts(Patch):
    """Leaves a model's head counts as they are on a CPU, as stock does on a GPU.

    Stock pads attention heads on a CPU if a TP size does not divide the KV heads; on a GPU it repeats KV heads.
    """

    target = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
    kind = "replace"

    @staticmethod
    def hook(model_config: Any, load_config: Any, tp_size: int) -> Any:
        return model_config


class _RefuseUpdate(Patch):
    kind = "replace"

    @staticmethod
    def hook(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        return False, (
            "the weights are shared by the engines of all TP sizes and by other processes, and are never written; "
            "to change them, start the server with the new checkpoint, or give --adapt-tp-sizes a single value"
        )


class RefuseUpdateFromDisk(_RefuseUpdate):
    """Refuses an online weight update: it would write stock order into the shared copy, under other engines."""

    target = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_disk"


class RefuseUpdateFromDistributed(_RefuseUpdate):
    """Refuses an online weight update; see `RefuseUpdateFromDisk`."""

    target = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_distributed"


class RefuseUpdateFromTensor(_RefuseUpdate):
    """Refuses an online weight update; see `RefuseUpdateFromDisk`."""

    target = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor"


class RefuseUpdateFromIpc(_RefuseUpdate):
    """Refuses an online weight update; see `RefuseUpdateFromDisk`."""

    target = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_ipc"


STORE_PATCHES: tuple[type[Patch], ...] = (
    LoadFromStore,
    KeepHeadCounts,
    RefuseUpdateFromDisk,
    RefuseUpdateFromDistributed,
    RefuseUpdateFromTensor,
    RefuseUpdateFromIpc,
)


def use_store(handle: WeightsHandle, sp_tokens: int | None = None, base_tp: int = 1) -> list[str]:
    """Make the scheduler that this process is about to build run on a store's weights.

    To be called after stock's plugins are loaded and before `Scheduler(...)`.

    Args:
        handle: the store on this rank's GPU.
        sp_tokens: tokens of a batch from which it runs sequence-parallel; None if none ever does.
        base_tp: TP size whose shards of the weights such a batch runs on; 1: on all of them.

    Returns:
        The names of the patches in place.

    Raises:
        PatchError: a patch could not be applied.
    """
    global _handle, _sp_tokens, _base_tp
    _handle, _sp_tokens, _base_tp = handle, sp_tokens, base_tp
    patches = STORE_PATCHES if sp_tokens is None else (*STORE_PATCHES, CountGraphReplays, CaptureOwnGroups)
    PATCHES.apply(*patches)
    return PATCHES.verify(*patches)
