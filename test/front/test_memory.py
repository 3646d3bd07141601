"""A deployment's memory plan: Llama-3.1-8B shapes on H100s, and what the start does with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_adapt.core.config import WARMUP
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.overheads import PACKAGED, Overhead, OverheadKey, record_overhead
from sglang_adapt.demo import demo_model_path
from sglang_adapt.front.flags import SettingsError
from sglang_adapt.front.memory import Deployment, fewer_tp_sizes, plan_for, plans_for_fewer, read_all_overheads
from sglang_adapt.front.settings import _plan_memory, make_settings
from sglang_adapt.kv.sizing import KvShape, size_pool
from sglang_adapt.memory import free, peers
from sglang_adapt.memory.free import FreeMemory
from sglang_adapt.policy.memory_plan import MemoryPlan, plan_fault, plan_lines
from sglang_adapt.upstream import entry_points, front
from sglang_adapt.upstream.front import parse_server_args, pool_shape
from sglang_adapt.upstream.weights import sizes
from sglang_adapt.upstream.weights.sizes import ModelSizes

GB = 10**9
H100 = "NVIDIA H100 80GB HBM3"
SIZES = ModelSizes(
    "32x4096",
    store_bytes={1: 16 * GB, 2: 8 * GB, 4: 4 * GB},
    rank_bytes={1: 16 * GB, 2: 8 * GB},
    kv_bytes_per_token={1: 131072, 2: 65536},
)


def h100s(nowhere: Path, free_bytes: tuple[int, ...] = (85 * GB, 84 * GB)) -> Deployment:
    return Deployment(
        gpus=tuple(FreeMemory(H100, nbytes, 85 * GB) for nbytes in free_bytes),
        gpu_count=2,
        virtual=False,
        sizes=SIZES,
        graph_batch={1: 128, 2: 128},
        overheads=read_all_overheads(nowhere),
        share=0.85,
        page=16,
        kv_shape=KvShape(layers=32, kv_heads=8, head_dim=128, itemsize=2),
    )


def test_two_tp_sizes_share_one_copy_and_one_pool(tmp_path: Path) -> None:
    plan = plan_for(h100s(tmp_path / "none"), (1, 2), 80_000)
    assert plan_lines(plan) == [
        f"GPU 0 ({H100}): 85.00 GB free = weights 16.00 + keeper 0.50 + TP 1 engine 2.00 + TP 2 engine 4.00 + "
        "KV of idle engines 0.01 + KV 10.49 (80000 tokens) + 52.01 spare",
        f"GPU 1 ({H100}): 84.00 GB free = weights 16.00 + keeper 0.50 + TP 1 engine 2.00 + TP 2 engine 4.00 + "
        "KV of idle engines 0.01 + KV 10.49 (80000 tokens) + 51.01 spare",
    ]


def test_staged_copies_of_kv_have_buffers(tmp_path: Path) -> None:
    direct = h100s(tmp_path / "none")
    staged = replace(direct, kv_copy=CopyPath.STAGED)

    def more(one: Deployment, other: Deployment, tp_sizes: tuple[int, ...]) -> int:
        first, second = (plan_for(each, tp_sizes, 80_000).places[0].fixed_bytes for each in (one, other))
        return second - first

    # The keeper's and those of a rank of each TP size: two of 32 MiB each.
    assert more(direct, staged, (1, 2)) == 3 * 2 * 32 * 2**20
    assert more(direct, staged, (2,)) == 0
    # A block of 128 tokens in all planes is 16 MiB; one of 512 does not fit 32.
    assert more(replace(direct, page=512), replace(staged, page=512), (1, 2)) == 3 * 2 * 64 * 2**20
    virtual = [replace(each, virtual=True, gpus=(FreeMemory("", 64 * GB, 64 * GB),)) for each in (direct, staged)]
    # Two buffers of a keeper and two link buffers for each GPU, of a block: 2 MiB.
    assert more(*virtual, (1, 2)) == 2 * 2 * 2 * 2 * 2**20


def test_without_tp_1_a_gpu_has_a_part_of_the_weights(tmp_path: Path) -> None:
    four = replace(h100s(tmp_path / "none", (20 * GB,) * 4), gpu_count=4, graph_batch={2: 0, 4: 0})
    gpu, *_ = plan_lines(plan_for(four, (2, 4), 16))
    assert gpu.startswith(f"GPU 0 ({H100}): 20.00 GB free = weights (1 of 2 parts) 8.00 + keeper 0.50 + TP 2 engine")
    # Of virtual GPUs half have the one part and half the other.
    host = replace(four, virtual=True, gpus=(FreeMemory("", 64 * GB, 64 * GB),))
    assert "host memory: 64.00 GB free = weights 16.00 + 2 keepers " in plan_lines(plan_for(host, (2, 4), 16))[0]


@pytest.mark.parametrize(("tp_sizes", "tokens"), [((1, 2), 80_000), ((1, 2), 80_015), ((1, 2, 4), 1600), ((2, 4), 48)])
def test_kv_in_the_plan_is_the_region_that_the_keeper_makes(
    tmp_path: Path, tp_sizes: tuple[int, ...], tokens: int
) -> None:
    deployment = h100s(tmp_path / "none")
    deployment = replace(deployment, graph_batch=dict.fromkeys(tp_sizes, 128))
    (place, _), planned_tokens = (plan := plan_for(deployment, tp_sizes, tokens)).places, plan.tokens
    assert deployment.kv_shape is not None and planned_tokens is not None
    pool = size_pool(deployment.kv_shape, tp_sizes, deployment.page, tokens, WARMUP)
    idle = sum(charge.nbytes for charge in place.charges if charge.what == "KV of idle engines")
    assert idle + planned_tokens * place.kv_bytes_per_token == pool.geometry.region_bytes


def test_the_pool_is_sized_by_the_fullest_gpu(tmp_path: Path) -> None:
    plan = plan_for(h100s(tmp_path / "none"), (1, 2), None)
    idle = 4 * 16 * 131072
    assert plan.tokens == int(((84 - 22.5) * GB - idle) * 0.85) // 131072 // 16 * 16
    assert not plan.given and plan_fault(plan, {}) is None


def test_one_tp_size_has_its_own_weights_no_keeper_and_stocks_pool(tmp_path: Path) -> None:
    plan = plan_for(h100s(tmp_path / "none"), (2,), None)
    assert plan.tokens is None
    assert [charge.what for charge in plan.places[0].charges] == ["weights", "TP 2 engine"]
    assert plan.places[0].fixed_bytes == 12 * GB


def test_what_was_measured_here_counts_instead_of_the_packaged_figures(tmp_path: Path) -> None:
    file = tmp_path / "overheads.json"
    record_overhead(file, Overhead(OverheadKey(H100, "32x4096", 2, 128), 3 * GB, "test"))
    plan = plan_for(h100s(file), (1, 2), None)
    assert plan.places[0].fixed_bytes - 4 * 16 * 131072 == (16 + 3 + 2) * GB + GB // 2
    assert not plan.has_assumed and PACKAGED.exists()


def test_fewer_tp_sizes_are_tried_from_the_smallest_size_on() -> None:
    assert fewer_tp_sizes((1, 2, 4)) == [(2, 4), (4,)]
    assert fewer_tp_sizes((2,)) == []


def test_tp_sizes_that_can_have_no_pool_of_such_pages_are_not_tried(tmp_path: Path) -> None:
    deployment = replace(h100s(tmp_path / "none"), page=3, graph_batch=dict.fromkeys((1, 2, 4), 128))
    deployment = replace(deployment, sizes=replace(SIZES, rank_bytes={4: 4 * GB}, kv_bytes_per_token={4: 32768}))
    assert list(plans_for_fewer(deployment, (1, 2, 4))) == [(4,)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two H100s as the start sees them; what is free of each can be set."""
    found = [85 * GB, 85 * GB]

    class Gpu:
        def __init__(self, index: int) -> None:
            self.index = index

        def now(self) -> FreeMemory:
            return FreeMemory(H100, found[self.index], 85 * GB)

    monkeypatch.setattr(free, "gpu_memory", Gpu)
    monkeypatch.setattr(peers, "unreachable_pairs", lambda devices: [])
    return found


def planned(overheads: Path, *argv: str) -> MemoryPlan:
    rest = ["--model-path", str(demo_model_path()), *argv]
    server_args = {tp: parse_server_args([*rest, "--tp-size", str(tp)]) for tp in (1, 2)}
    plan = _plan_memory(server_args, 2, False, overheads, pool_shape(server_args[2]), 16)
    assert isinstance(plan, MemoryPlan)
    return plan


def test_without_max_total_tokens_gpus_get_a_pool_of_what_is_left(tmp_path: Path, two_gpus: list[int]) -> None:
    plan = planned(tmp_path / "none")
    assert plan.tokens is not None and plan.tokens > 1_000_000
    two_gpus[1] = 8 * GB
    smaller = planned(tmp_path / "none")
    assert smaller.tokens is not None and 0 < smaller.tokens < plan.tokens


def test_the_start_makes_the_pool_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_gpus: list[int]
) -> None:
    monkeypatch.setattr(entry_points, "has_cuda", lambda: True)
    monkeypatch.setattr(front, "gpu_count", lambda: 2)
    argv = ("--adapt-overheads-file", str(tmp_path / "none"), "--dtype", "float32")
    made = make_settings(argv, "/nowhere", "spawn")
    assert isinstance(made.memory, MemoryPlan) and made.memory.tokens is not None and made.pool is not None
    assert not made.memory.given and made.memory.tokens % 16 == 0
    # Far more than the model is made for.
    assert made.pool.geometry.blocks == 1 + made.memory.tokens // 16 + made.pool.standby_blocks
    assert made.pool.request_tokens == {1: 8191, 2: 8191}
    assert {tp: args.max_total_tokens for tp, args in made.server_args.items()} == {
        tp: made.pool.geometry.capacity_tokens(tp) for tp in (1, 2)
    }
    taken = made.memory.places[0].fixed_bytes + made.memory.tokens * made.memory.places[0].kv_bytes_per_token
    assert made.pool.geometry.region_bytes < taken < two_gpus[0]
    assert made.config.start_in_turn, "the packaged figures are for models of other shapes"
    again = make_settings([*argv, "--max-total-tokens", str(made.memory.tokens)], "/nowhere", "spawn")
    assert again.pool == made.pool


def test_gpus_that_do_not_reach_each_other_get_staged_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_gpus: list[int]
) -> None:
    monkeypatch.setattr(entry_points, "has_cuda", lambda: True)
    monkeypatch.setattr(front, "gpu_count", lambda: 4)
    asked: list[list[int]] = []

    def nobody(devices: list[int]) -> list[tuple[int, int]]:
        asked.append(devices)
        return [(devices[0], devices[1])]

    monkeypatch.setattr(peers, "unreachable_pairs", nobody)
    argv = ("--adapt-overheads-file", str(tmp_path / "none"), "--dtype", "float32", "--adapt-tp-sizes", "1,2")
    # Devices 1 and 3 are the deployment's GPUs 0 and 1.
    steps = ("--base-gpu-id", "1", "--gpu-id-step", "2")
    two_gpus += [85 * GB, 85 * GB]
    made = make_settings([*argv, *steps], "/nowhere", "spawn")
    assert asked == [[1, 3]]
    assert made.config.kv_copy is CopyPath.STAGED
    assert made.kv_copy.startswith("staged: ") and made.kv_copy.endswith("(no peer access between GPUs 1-3)")
    assert isinstance(made.memory, MemoryPlan)
    assert "buffers for KV" in [charge.what for charge in made.memory.places[0].charges]
    with pytest.raises(SettingsError, match="--adapt-kv-copy peer: no peer access between GPUs 1-3; give staged, or"):
        make_settings([*argv, *steps, "--adapt-kv-copy", "peer"], "/nowhere", "spawn")

    def unknown(devices: list[int]) -> list[tuple[int, int]]:
        raise peers.PeerQuestionError("the CUDA driver does not tell")

    monkeypatch.setattr(peers, "unreachable_pairs", unknown)
    with pytest.raises(SettingsError, match="the CUDA driver does not tell"):
        make_settings([*argv, *steps], "/nowhere", "spawn")
    # Nobody need be asked.
    forced = make_settings([*argv, *steps, "--adapt-kv-copy", "staged"], "/nowhere", "spawn")
    assert forced.config.kv_copy is CopyPath.STAGED


def test_what_cannot_fit_is_refused_before_anything_is_started(tmp_path: Path, two_gpus: list[int]) -> None:
    two_gpus[1] = 7 * GB
    with pytest.raises(SettingsError, match=r"GPU 1 \(NVIDIA H100 80GB HBM3\) has 7\.00 GB free, .* Lower .* to \d+$"):
        planned(tmp_path / "none", "--max-total-tokens", "10000000")
    two_gpus[0] = 6 * GB
    with pytest.raises(SettingsError, match=r"GPU 0 .* no room for KV, .*: give --adapt-tp-sizes 2, which leaves"):
        planned(tmp_path / "none")


def test_sizes_that_are_not_known_do_no_harm_unless_a_pool_must_be_sized(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_gpus: list[int]
) -> None:
    monkeypatch.setattr(sizes, "model_sizes", lambda args, tp_sizes: "nobody knows")
    parsed = {tp: parse_server_args(["--model-path", str(demo_model_path()), "--tp-size", str(tp)]) for tp in (1, 2)}
    with pytest.raises(SettingsError, match=r"--max-total-tokens is not given, and the KV pool .*: nobody knows"):
        _plan_memory(parsed, 2, False, tmp_path / "none", pool_shape(parsed[2]), 16)
    assert _plan_memory({2: parsed[2]}, 2, False, tmp_path / "none", None, 1) == "nobody knows"


def test_sizes_of_draft_models_and_other_models_are_not_known() -> None:
    parsed = parse_server_args(["--model-path", str(demo_model_path())])
    found = sizes.model_sizes(parsed, (1, 2))
    assert isinstance(found, ModelSizes) and found.shape == "3x256"
    lora = SimpleNamespace(speculative_algorithm=None, enable_lora=True, lora_paths=None)
    assert (
        sizes.model_sizes(lora, (1, 2)) == "the sizes of draft models and adapters are not known before they are loaded"
    )
    # 8 attention heads do not go into 3 shards.
    assert "not known before it is loaded: 8 attention heads" in sizes.model_sizes(parsed, (1, 3))


def test_virtual_gpus_are_held_against_the_hosts_memory() -> None:
    made = make_settings([], "/nowhere", "forkserver")
    assert isinstance(made.memory, MemoryPlan)
    assert [place.name for place in made.memory.places] == ["host memory"]
    assert "2 ranks of TP 1" in plan_lines(made.memory)[0]
    with pytest.raises(SettingsError, match=r"host memory has .* Lower --max-total-tokens to \d+$"):
        make_settings(["--max-total-tokens", "1000000000"], "/nowhere", "forkserver")


def test_an_unreadable_file_of_overheads_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "overheads.json"
    file.write_text("{")
    with pytest.raises(SettingsError, match=r"overheads\.json is not a file of overheads"):
        make_settings(["--adapt-overheads-file", str(file)], "/nowhere", "forkserver")
