"""What sglang asks of the GPUs while it is imported, answered without initialising CUDA.

A process that has initialised CUDA cannot be forked, but importing sglang asks torch for compute capabilities, device
properties and the kind of accelerator (`torch.get_device_module()`), which initialises it. The forkserver therefore has
a child process ask, answers from what the child found, and refuses anything that would initialise CUDA. A forked rank
takes the answers away again before it uses its GPU. What has kept such a function meanwhile is asking torch itself from
then on: Triton's driver, made in an import, would else take the first GPU's stream for all GPUs for ever.
"""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_ASK = """
import json, torch
devices = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    devices.append({k: v if isinstance(v, (int, float, str, bool)) else str(v)
                    for k in dir(p) if not k.startswith("_") and not callable(v := getattr(p, k))})
print(json.dumps(devices))
"""
_ASK_TIMEOUT_S = 120
_REPLACED = ("get_device_properties", "get_device_capability", "get_device_name", "current_device", "_lazy_init")
_ACCELERATOR = ("_get_accelerator", "_accelerator_getAccelerator")
_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED of the driver API."""

_stock: list[tuple[Any, str, Any]] = []
"""What has been replaced, while questions are answered here."""


class CudaInitialisedError(RuntimeError):
    """Something would initialise, or has initialised, CUDA in a process that others are forked from."""


def ask_devices() -> list[dict[str, Any]]:
    """The properties of every visible CUDA device, found by a child process.

    Raises:
        CudaInitialisedError: the child failed; its output says why.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise CudaInitialisedError(f"the CUDA devices could not be asked for their properties:\n{done.stderr}")
    devices: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return devices


def answer_from(devices: list[dict[str, Any]]) -> None:
    """Answer torch.cuda's questions about devices from `devices`, and refuse to initialise CUDA."""
    import torch

    properties = [SimpleNamespace(**device) for device in devices]

    def index(device: Any = None) -> int:
        if device is None:
            return 0
        if isinstance(device, int):
            return device
        return torch.device(device).index or 0

    def get_device_properties(device: Any = None) -> Any:
        return properties[index(device)]

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        found = properties[index(device)]
        return found.major, found.minor

    def get_device_name(device: Any = None) -> str:
        name: str = properties[index(device)].name
        return name

    def current_device() -> int:
        return 0

    def _lazy_init() -> None:
        raise CudaInitialisedError("CUDA must not be initialised here: engines are forked from this process")

    def accelerator(_check: Any = None) -> torch.device:
        return torch.device("cuda")

    ours = locals()
    replace = [(torch.cuda, name, ours[name]) for name in _REPLACED]
    replace += [(torch._C, name, accelerator) for name in _ACCELERATOR]
    for module, name, function in replace:
        stock = getattr(module, name)
        _stock.append((module, name, stock))
        setattr(module, name, _while_answering(function, stock))


def _while_answering(answer: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """The answer until CUDA is given back, stock's function then."""

    @functools.wraps(stock)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return (answer if _stock else stock)(*args, **kwargs)

    return asked


def give_back_cuda() -> None:
    """Undo `answer_from` in this process, which is about to use its GPU. Nothing to do where it was not called."""
    while _stock:
        setattr(*_stock.pop())


def assert_cuda_untouched(library: str = "libcuda.so.1") -> None:
    """Raise if this process has initialised CUDA (opening its devices is no sign: asking NVML does that too).

    Raises:
        CudaInitialisedError: it has, so its forked children could not use CUDA.
        OSError: there is no CUDA driver.
    """
    context = ctypes.c_void_p()
    if ctypes.CDLL(library).cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALISED:
        raise CudaInitialisedError(
            "importing sglang has initialised CUDA in the forkserver, so engines cannot be forked from it; start with "
            "--adapt-start-method spawn"
        )
