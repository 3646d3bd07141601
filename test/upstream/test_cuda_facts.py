import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_adapt.upstream import cuda_facts

_IMPORTING = """
import torch
from sglang_adapt.upstream import cuda_facts

stock = (
    torch._C._get_accelerator, torch._C._accelerator_getAccelerator, torch.cuda.get_device_name, torch.cuda._lazy_init
)
torch.cuda.current_device = lambda: 1


# Keeps what it asks with, as Triton's driver does.
class Driver:
    def __init__(self):
        self.current_device = torch.cuda.current_device


cuda_facts.answer_from([{"name": "a GPU", "major": 9, "minor": 0}, {"name": "another", "major": 8, "minor": 6}])
assert torch.get_device_module() is torch.cuda
assert torch.accelerator.current_accelerator() == torch.device("cuda")
assert torch.cuda.get_device_name(1) == "another"
assert torch.cuda.get_device_capability("cuda:1") == (8, 6)
try:
    torch.cuda._lazy_init()
except cuda_facts.CudaInitialisedError:
    print("refused")
driver = Driver()
assert driver.current_device() == 0
cuda_facts.give_back_cuda()
cuda_facts.give_back_cuda()
assert driver.current_device() == torch.cuda.current_device() == 1
assert stock == (
    torch._C._get_accelerator, torch._C._accelerator_getAccelerator, torch.cuda.get_device_name, torch.cuda._lazy_init
)
"""


def test_questions_of_the_import_are_answered_and_given_back():
    done = subprocess.run([sys.executable, "-c", _IMPORTING], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("code, initialised", [(3, False), (0, True), (201, True)])
def test_initialised_cuda_is_told_by_the_driver(monkeypatch, code, initialised):
    driver = SimpleNamespace(cuCtxGetCurrent=lambda _: code)
    monkeypatch.setattr(cuda_facts.ctypes, "CDLL", lambda name: driver)
    if initialised:
        with pytest.raises(cuda_facts.CudaInitialisedError, match="--adapt-start-method spawn"):
            cuda_facts.assert_cuda_untouched()
    else:
        cuda_facts.assert_cuda_untouched()
