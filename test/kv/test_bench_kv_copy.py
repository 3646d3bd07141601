"""The benchmark of copies: its check finds what is wrong, its rows add up, and it runs end to end on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_bench.cases import Case, full_scale, tiny_scale
from kv_bench.content import count_wrong, fill, residents
from kv_bench.report import Measured, limits, rows
from sglang_adapt.kv.copiers import CpuCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.plan_build import build_plans

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_case_fits_and_moves_what_each_gpu_holds(gpus: int) -> None:
    scale = full_scale(gpus)
    for source_tp, dest_tp in scale.directions:
        for page in scale.page_tokens:
            geometry, size = scale.geometry(page), scale.bytes_per_gpu[-1]
            for plan in build_plans(geometry, Case(source_tp, dest_tp, page, size).batches(scale)):
                moved = geometry.planes * sum(plan.plane_bytes_to().values())
                assert 0.99 * size < moved <= size


def test_the_check_counts_missing_wrong_and_stray_words() -> None:
    scale = tiny_scale(2)
    case = Case(1, 2, 4, 20_000)
    geometry, batches = scale.geometry(4), case.batches(scale)
    regions = {gpu: torch.zeros(geometry.region_shape, dtype=torch.int16) for gpu in (0, 1)}
    for gpu, region in regions.items():
        fill(region, geometry, residents(geometry, batches, gpu, "source", CPU))
    held = [item for end in ("source", "dest") for item in residents(geometry, batches, 0, end, CPU)]
    assert count_wrong(regions[0], geometry, held) > 0, "nothing has been copied yet"
    for plan in build_plans(geometry, batches):
        DirectExecutor.on(geometry, plan.gpu, regions, CpuCopier()).start(plan).wait()
    assert count_wrong(regions[0], geometry, held) == 0
    words = regions[0].view(-1).view(torch.int64)
    zero, full = int((words == 0).nonzero()[-1]), int(words.nonzero()[-1])
    words[zero] = 5
    assert count_wrong(regions[0], geometry, held) == 1
    words[full] += 2
    assert count_wrong(regions[0], geometry, held) == 2


def test_rows_take_the_slowest_gpu_and_the_busiest_link() -> None:
    case = Case(1, 2, 16, 1_000_000_000)
    measured = [
        Measured(0, "limit", "all", {"bytes": 2_000_000_000, "ms": 5.0}),
        Measured(1, "limit", "all", {"bytes": 2_000_000_000, "ms": 4.0}),
        Measured(0, "copy", case, {"ms": 2.0, "out": 500_000_000, "in": 600_000_000, "wrong": 0}),
        Measured(1, "copy", case, {"ms": 3.0, "out": 600_000_000, "in": 500_000_000, "wrong": 2}),
    ]
    assert limits(measured) == {"all": 400.0}
    (row,) = rows(measured)
    assert (row.ms, row.link_gb, row.gbps, row.of_limit, row.wrong) == (3.0, 0.6, 200.0, 0.5, 2)


def test_it_runs_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "sgl-kernel-ext" / "python")])
    command = [sys.executable, str(ROOT / "benchmark" / "bench_kv_copy.py"), "--device", "cpu", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["errors"] == []
    whats = {row["what"] for row in document["rows"]}
    assert whats == {"copy", "pull", "big_copy", "staged", "staged_host"}
    copies = [row for row in document["rows"] if row["what"] == "copy"]
    assert {row["direction"] for row in copies} == {"1->2", "2->1"}
    assert all(row["wrong"] == 0 for row in document["rows"])
