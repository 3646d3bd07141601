"""A progress bar leaves nothing behind when its process is killed."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from weights_engines import forkserver, in_child

pytestmark = pytest.mark.engine


def semaphores_of_a_bar() -> list[str]:
    """Names in /dev/shm that this process has while it shows a bar; a child that is prepared as all others are."""
    from tqdm import tqdm

    multiprocessing.set_start_method("spawn", force=True)  # as stock does
    for _ in tqdm(range(2), disable=False):
        found = [file.name for file in Path("/dev/shm").iterdir() if f"-{os.getpid()}-" in file.name]
    return found


def test_a_bar_makes_no_semaphore_that_outlives_its_process() -> None:
    assert in_child(forkserver(), semaphores_of_a_bar) == []
