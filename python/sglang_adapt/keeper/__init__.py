"""The process that owns a GPU's shared memory: one copy of the weights, and whatever regions are asked for.

Use, from the process that supervises the engines (any process that may start children):

    keeper = start_keeper(context, KeeperConfig(server_args, finest_tp=4, gpu_ids=(0,)))
    keeper.wait_ready(on_progress=lambda progress: ..., timeout_s=600)
    keeper.weights                # WeightsHandle, goes into each rank's start arguments
    keeper.region("kv", gpu_id=0) # RegionHandle of a region named in the configuration
    keeper.staged(gpu_id=0)       # StagedHandle, with a StagedSpec: where the KV of a GPU is asked for
    keeper.process.sentinel       # readable when the keeper has ended: its engines have lost their memory
    keeper.stop()

- `context` is a forkserver context whose server has loaded sglang and has not initialised CUDA, or a spawn
  context. Everything is passed by pickling; the keeper inherits nothing but the loaded modules.
- On GPUs there is one keeper for each GPU. On virtual GPUs one keeper may have all GPUs of the host (`gpu_ids`):
  the weights are then one copy for all of them, and each gets its own regions.
- Handles are good for any number of processes and as long as the keeper lives, so that an engine which is started
  again gets the same handle, and no weight is read again. In the engine's process:
  `upstream.weights.attach.use_store(handle)` before the scheduler is built.
- In an event loop, watch `keeper.connection` and `keeper.process.sentinel`, and call `keeper.receive()` instead of
  `wait_ready`.
- The keeper ends when the process that started it ends, however that happens. It ignores SIGTERM and Ctrl-C.

Out of scope: restarting keepers and engines, which is for whoever supervises them.
"""

from sglang_adapt.keeper.config import KeeperConfig, RegionSpec, StagedSpec
from sglang_adapt.keeper.handle import KeeperError, KeeperHandle, start_keeper
from sglang_adapt.keeper.messages import Progress, Ready

__all__ = [
    "KeeperConfig",
    "KeeperError",
    "KeeperHandle",
    "Progress",
    "Ready",
    "RegionSpec",
    "StagedSpec",
    "start_keeper",
]
