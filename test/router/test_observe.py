"""What engines take of a GPU is recorded only where nothing else can have changed it."""

from __future__ import annotations

import pytest

from sglang_adapt.core.layout import EngineSpec, candidate_engines
from sglang_adapt.core.overheads import Overhead, OverheadKey
from sglang_adapt.router.observe import EngineFacts, StartObserver, start_waves

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


def test_waves_are_tp_sizes_in_turn_or_all_at_once() -> None:
    candidates = candidate_engines([1, 2, 4], 4)
    assert start_waves(candidates, in_turn=False) == [candidates]
    waves = start_waves(candidates, in_turn=True)
    assert [[spec.name for spec in wave] for wave in waves] == [
        ["tp1@0", "tp1@1", "tp1@2", "tp1@3"],
        ["tp2@0-1", "tp2@2-3"],
        ["tp4@0-3"],
    ]
