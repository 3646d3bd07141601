"""What engines take of a GPU is recorded only where nothing else can have changed it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.layout import EngineSpec, candidate_engines
from sglang_adapt.core.overheads import Overhead, OverheadKey
from sglang_adapt.front.settings import make_settings
from sglang_adapt.memory import free
from sglang_adapt.memory.free import FreeMemory
from sglang_adapt.router.observe import EngineFacts, StartObserver, make_observer, start_waves
from sglang_adapt.upstream.weights.sizes import ModelSizes, model_sizes

FACTS = {tp: EngineFacts("32x4096", 128, weights_bytes=0, kv_bytes_per_token=100 // tp) for tp in (1, 2)}
TP1_0, TP1_1, TP2 = candidate_engines([1, 2], 2)


class World:
    """Two GPUs whose free memory the test sets."""

    def __init__(self, facts: dict[int, EngineFacts] = FACTS) -> None:
        self.free = {0: 10_000, 1: 10_000}
        self.recorded: list[Overhead] = []
        self.observer = StartObserver(lambda gpu: self.free[gpu], "H100", facts, self.recorded.append)

    def take(self, spec: EngineSpec, nbytes: int) -> None:
        for gpu in spec.gpus:
            self.free[gpu] -= nbytes


def test_an_engine_alone_is_measured_without_its_kv() -> None:
    world = World()
    world.observer.starting(TP1_0)
    world.take(TP1_0, 10 * 100 + 250)
    found = world.observer.warm(TP1_0, kv_tokens=10)
    assert found is not None
    assert (found.key, found.nbytes) == (OverheadKey("H100", "32x4096", 1, 128), 250)
    assert world.recorded == [found]


def test_weights_of_its_own_are_not_an_overhead() -> None:
    world = World({1: EngineFacts("32x4096", 128, weights_bytes=2000, kv_bytes_per_token=100)})
    world.observer.starting(TP1_0)
    world.take(TP1_0, 2000 + 1000 + 250)
    world.observer.warm(TP1_0, kv_tokens=10)
    assert [overhead.nbytes for overhead in world.recorded] == [250]


def test_the_gpu_with_the_most_counts_and_other_gpus_do_not_disturb() -> None:
    world = World()
    world.observer.starting(TP1_0)
    world.observer.starting(TP1_1)
    world.take(TP1_0, 1000 + 250)
    world.take(TP1_1, 1000 + 300)
    world.observer.warm(TP1_0, 10)
    world.observer.warm(TP1_1, 10)
    world.observer.starting(TP2)
    world.take(TP2, 500 + 400)
    world.take(TP1_1, 77)
    world.observer.warm(TP2, 10)
    assert [overhead.nbytes for overhead in world.recorded] == [250, 300, 477]


@pytest.mark.parametrize("first_is_warm_before", [True, False])
def test_two_starts_on_one_gpu_measure_neither(first_is_warm_before: bool) -> None:
    world = World()
    order = [TP1_0, TP2] if first_is_warm_before else [TP2, TP1_0]
    world.observer.starting(TP1_0)
    world.observer.starting(TP2)
    for spec in order:
        world.take(spec, 2000)
        assert world.observer.warm(spec, 1) is None
    # Once they are warm a restart is measured again.
    world.observer.lost(TP1_0)
    world.free[0] += 2000
    world.observer.starting(TP1_0)
    world.take(TP1_0, 100 + 250)
    assert world.observer.warm(TP1_0, 1) is not None


def test_an_engine_that_ends_beside_a_start_spoils_it() -> None:
    world = World()
    world.observer.starting(TP1_0)
    world.take(TP1_0, 350)
    world.observer.warm(TP1_0, 1)
    world.observer.starting(TP2)
    world.observer.lost(TP1_0)
    world.take(TP2, 450)
    assert world.observer.warm(TP2, 1) is None
    assert len(world.recorded) == 1


def test_what_cannot_be_is_not_recorded() -> None:
    world = World()
    world.observer.starting(TP1_0)
    world.take(TP1_0, 50)
    assert world.observer.warm(TP1_0, 10) is None and not world.recorded


@pytest.mark.parametrize(("share_weights", "kv_bytes"), [(True, 0), (False, 2 * 3 * 8 * 32 * 4)])
def test_kv_in_the_pool_of_a_gpu_is_not_the_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share_weights: bool, kv_bytes: int
) -> None:
    left = [50 * 10**9, 40 * 10**9]
    gpu = SimpleNamespace(now=lambda: FreeMemory("H100", left[0], 80 * 10**9))
    monkeypatch.setattr(free, "gpu_memory", lambda index: gpu)
    made = make_settings(["--adapt-virtual-gpus", "1", "--adapt-tp-sizes", "1"], "/nowhere", "forkserver")
    config = replace(
        made.config, virtual=False, share_weights=share_weights, overheads_file=str(tmp_path / "overheads.json")
    )
    observer = make_observer(config, made.server_args)
    assert observer is not None
    observer.starting(TP1_0)
    left.pop(0)
    found = observer.warm(TP1_0, kv_tokens=1000)
    own_weights = 0 if share_weights else model_weights(made.server_args[1])
    assert found is not None and found.nbytes == 10 * 10**9 - 1000 * kv_bytes - own_weights


def model_weights(server_args: Any) -> int:
    sizes = model_sizes(server_args, (1,))
    assert isinstance(sizes, ModelSizes)
    return sizes.rank_bytes[1]


def test_waves_are_tp_sizes_in_turn_or_all_at_once() -> None:
    candidates = candidate_engines([1, 2, 4], 4)
    assert start_waves(candidates, in_turn=False) == [candidates]
    waves = start_waves(candidates, in_turn=True)
    assert [[spec.name for spec in wave] for wave in waves] == [
        ["tp1@0", "tp1@1", "tp1@2", "tp1@3"],
        ["tp2@0-1", "tp2@2-3"],
        ["tp4@0-3"],
    ]
