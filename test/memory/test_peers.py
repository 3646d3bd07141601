"""Which GPUs reach which: asked of a driver made for the test, and of the real one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sglang_adapt.memory.peers import PeerQuestionError, unreachable_pairs

DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 100; return index > 2 ? 101 : 0; }
/* GPU 2 is reached by nobody, and reaches all. */
int cuDeviceCanAccessPeer(int *can, int one, int other) { *can = other != 102; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("driver")
def test_pairs_are_told_by_the_indices_that_were_asked_about() -> None:
    assert unreachable_pairs([0, 1]) == []
    assert unreachable_pairs(range(3)) == [(0, 2), (1, 2)]
    assert unreachable_pairs([2, 1]) == [(1, 2)]


@pytest.mark.usefixtures("driver")
def test_what_the_driver_refuses_is_no_answer() -> None:
    with pytest.raises(PeerQuestionError, match="others: cuDeviceGet failed with error 101"):
        unreachable_pairs([0, 3])


def test_one_gpu_has_nobody_to_reach() -> None:
    assert unreachable_pairs([7]) == []


@pytest.mark.gpu
def test_the_real_driver_says_what_torch_says() -> None:
    count = torch.cuda.device_count()
    said = unreachable_pairs(range(count))
    assert said == [
        (one, other)
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
