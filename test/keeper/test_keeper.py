"""A keeper loads once, exports, tells how far it is, and ends with its parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from weights_engines import forkserver, server_args_of

from sglang_adapt.keeper import KeeperConfig, KeeperError, KeeperHandle, Progress, RegionSpec, StagedSpec, start_keeper
from sglang_adapt.kv.copiers import copiers_of
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import NOW
from sglang_adapt.kv.plan import CopyBatch, RequestCopy
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged_client import StagedClient
from sglang_adapt.memory import MemoryGoneError, attach
from sglang_adapt.weights import WeightStore

LIMIT_S = 120
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return forkserver()


@pytest.fixture(scope="module")
def server_args(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stock's arguments of a model that has a configuration only: its weights are dummies."""
    from sglang.srt.server_args import ServerArgs

    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return ServerArgs(**server_args_of(path, load_format="dummy"))


@pytest.fixture
def start(context: ForkServerContext) -> Iterator[Any]:
    keepers: list[KeeperHandle] = []

    def start_one(*args: Any, **kwargs: Any) -> KeeperHandle:
        keepers.append(start_keeper(context, KeeperConfig(*args, **kwargs)))
        return keepers[-1]

    yield start_one
    for keeper in keepers:
        keeper.stop()


def test_it_loads_and_tells_how_far_it_is(start: Any, server_args: Any) -> None:
    keeper = start(server_args, 2, (0, 1), regions=(RegionSpec("kv", 4096),))
    with pytest.raises(KeeperError, match="keeper_gpu0-1 is not ready yet"):
        _ = keeper.weights
    told: list[Progress] = []
    ready = keeper.wait_ready(told.append, LIMIT_S)
    assert told[0].done_bytes == 0 and told[-1].fraction == 1
    assert [p.done_bytes for p in told] == sorted({p.done_bytes for p in told})
    with WeightStore.open(keeper.weights) as store:
        assert store.manifest.nbytes == told[0].total_bytes == store.region.nbytes
        assert bool(store.full("model.layers.1.mlp.down_proj.weight").any())
    assert 0 < ready.seconds < LIMIT_S


def test_each_gpu_has_its_own_regions_and_all_share_the_weights(start: Any, server_args: Any) -> None:
    keeper = start(server_args, None, (0, 1), regions=(RegionSpec("kv", 4096), RegionSpec("staging", 64)))
    keeper.wait_ready(timeout_s=LIMIT_S)
    with attach(keeper.region("kv", 0), "write") as first, attach(keeper.region("kv", 1)) as second:
        first.tensor.fill_(1)
        assert not bool(second.tensor.any())
    with attach(keeper.region("staging", 1)) as staging:
        assert staging.nbytes == 64
    with pytest.raises(KeeperError, match="without weights"):
        _ = keeper.weights
    with pytest.raises(KeeperError, match=r"no region 'kv' on GPU 2; it has kv, staging on GPUs 0, 1"):
        keeper.region("kv", 2)


GEOMETRY = PoolGeometry(layers=1, kv_heads=1, head_dim=8, itemsize=2, finest_tp=1, block_bytes=64, blocks=5)


def test_it_sends_the_kv_of_each_gpu_to_whoever_asks(start: Any, server_args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        regions = (RegionSpec("kv", GEOMETRY.region_bytes), RegionSpec("link", 2 * 128, on_host=True))
        staged = StagedSpec(GEOMETRY, "kv", "link", folder)
        keeper = start(server_args, None, (0, 1), regions=regions, staged=staged)
        keeper.wait_ready(timeout_s=LIMIT_S)
        with attach(keeper.region("kv", 1), "write") as there:
            there.tensor.copy_(torch.arange(GEOMETRY.region_bytes) % 251)
            sent = there.tensor.view(2, 5, 64)[:, 2:4].clone()
        here = torch.zeros(GEOMETRY.region_shape, dtype=torch.int16)
        client = StagedClient(GEOMETRY, 0, here, copiers_of(here.device))
        client.open(1, keeper.staged(1))
        blocks = [np.array([ids], dtype=np.int32) for ids in ([2, 3], [4, 1])]
        copy = CopyBatch((1,), (0,), (RequestCopy("a", 8, blocks[0], blocks[1]),))
        delivery = client.begin(build_plans(GEOMETRY, [copy]), NOW, ahead=False)
        delivery.wait()
        assert delivery.fault is None
        assert torch.equal(here.view(torch.uint8).view(2, 5, 64)[:, [4, 1]], sent)
        with pytest.raises(KeeperError, match="keeper_gpu0-1 does not send KV of GPU 2"):
            keeper.staged(2)


def test_what_it_cannot_load_is_told(start: Any, server_args: Any) -> None:
    keeper = start(server_args, 3, (0,))
    with pytest.raises(KeeperError, match="keeper_gpu0 could not start: UnshareableError: 4 attention heads"):
        keeper.wait_ready(timeout_s=LIMIT_S)


def test_an_end_without_a_word_is_told(start: Any, server_args: Any) -> None:
    keeper = start(server_args, 2, (0,))
    keeper.process.kill()
    with pytest.raises(KeeperError, match="ended before it was ready, with signal 9"):
        keeper.wait_ready(timeout_s=LIMIT_S)


def test_waiting_is_bounded(start: Any, server_args: Any) -> None:
    keeper = start(server_args, 2, (0,))
    os.kill(keeper.process.pid, signal.SIGSTOP)
    with pytest.raises(KeeperError, match=r"was not ready within 0\.2 s"):
        keeper.wait_ready(timeout_s=0.2)
    os.kill(keeper.process.pid, signal.SIGKILL)


def test_a_killed_keeper_is_noticed_and_its_memory_is_gone(start: Any, server_args: Any) -> None:
    keeper = start(server_args, 2, (0,))
    keeper.wait_ready(timeout_s=LIMIT_S)
    handle = keeper.weights
    keeper.process.kill()
    keeper.process.join()
    with pytest.raises(KeeperError, match="has ended with signal 9, and its memory is gone"):
        _ = keeper.weights
    with pytest.raises(MemoryGoneError):
        WeightStore.open(handle)


def test_stop_ends_it(start: Any, server_args: Any) -> None:
    keeper = start(server_args, None, (0,), regions=(RegionSpec("kv", 64),))
    keeper.wait_ready(timeout_s=LIMIT_S)
    keeper.stop()
    assert keeper.process.exitcode == 0


def _parent(pipe: Connection) -> None:
    """Starts a keeper from a forkserver of its own, tells its process id, waits to be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    config = KeeperConfig(SimpleNamespace(device="cpu"), None, (0,), (RegionSpec("kv", 64),))
    keeper = start_keeper(context, config)
    keeper.wait_ready(timeout_s=LIMIT_S)
    pipe.send((keeper.process.pid, keeper.region("kv", 0)))
    signal.pause()


def test_it_ends_when_its_parent_is_killed_and_leaves_nothing(context: ForkServerContext) -> None:
    ours, theirs = context.Pipe()
    parent = context.Process(target=_parent, args=(theirs,))
    parent.start()
    theirs.close()
    assert ours.poll(LIMIT_S)
    pid, handle = ours.recv()
    keeper = psutil.Process(pid)
    attach(handle).close()
    # Its memory has no name that could stay.
    assert not [one.path for one in keeper.memory_maps() if one.path.startswith("/dev/shm/")]
    parent.kill()
    keeper.wait(20)
    parent.join()
    with pytest.raises(MemoryGoneError):
        attach(handle)


def test_unsound_configurations_are_refused() -> None:
    gpu = SimpleNamespace(device="cuda")
    with pytest.raises(ValueError, match="owns the memory of one GPU; 2 were given"):
        KeeperConfig(gpu, 2, (0, 1))
    with pytest.raises(ValueError, match="names of a keeper's regions must differ: kv, kv"):
        KeeperConfig(gpu, 2, (0,), (RegionSpec("kv", 1), RegionSpec("kv", 2)))
