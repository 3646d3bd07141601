"""What every test shares. Tests that start servers have their fixtures in test/serving/conftest.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_adapt.upstream.environment import STOCK_ENVIRONMENT

# As in the server's processes (upstream/preload.py): stock's messages are msgpack, and CUDA is left alone.
os.environ.update(STOCK_ENVIRONMENT)

# Models here are so small that threads of one product only wait for each other, most of all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"

SERVING = Path(__file__).parent / "serving"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are none, and say what shares servers or engines, for `-n 2 --dist loadgroup`.

    One process then has the servers, the other one what starts engines by itself; the rest goes to whoever is idle.
    """
    for item in items:
        if SERVING in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("servers"))
        elif item.get_closest_marker("engine") or "context" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engines"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.device_count() == 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices; last results in benchmark/results/"))
