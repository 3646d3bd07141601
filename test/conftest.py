"""What every test shares. Tests that start servers have their fixtures in test/serving/conftest.py."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

from sglang_adapt.upstream.environment import STOCK_ENVIRONMENT

# As in the server's processes (upstream/preload.py): stock's messages are msgpack, and CUDA is left alone.
os.environ.update(STOCK_ENVIRONMENT)

# Models here are so small that threads of one product only wait for each other, most of all beside other processes.
os.environ["OMP_NUM_THREADS"] = "1"

# How long an example takes says more of what else runs on the machine than of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.device_count() == 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices; last results in benchmark/results/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`: what shares servers or engines stays together."""
    from two_processes import BySharing

    return BySharing(config, log)
