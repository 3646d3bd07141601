"""Which GPUs reach the memory of which, asked without initialising CUDA in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_ASK = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    if code := getattr(cuda, name)(*args):
        sys.exit(f"{name} failed with error {code}")
call("cuInit", 0)
can = ctypes.c_int()
found = []
devices = json.loads(sys.argv[1])
for one in devices:
    for other in devices:
        if one != other:
            a, b = ctypes.c_int(), ctypes.c_int()
            call("cuDeviceGet", ctypes.byref(a), one)
            call("cuDeviceGet", ctypes.byref(b), other)
            call("cuDeviceCanAccessPeer", ctypes.byref(can), a, b)
            if not can.value:
                found.append([one, other])
print(json.dumps(found))
"""
_ASK_TIMEOUT_S = 60


class PeerQuestionError(RuntimeError):
    """The driver does not tell which GPUs reach each other; the text has its reason."""


def unreachable_pairs(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of CUDA devices, by their index here, of which the first has no peer access to the second.

    A child process asks the driver (`cuDeviceCanAccessPeer`), since this one may be forked later.

    Raises:
        PeerQuestionError: it could not.
    """
    if len(devices) < 2:
        return []
    command = [sys.executable, "-I", "-c", _ASK, json.dumps(list(devices))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PeerQuestionError(f"the CUDA driver has not told in {_ASK_TIMEOUT_S} s which GPUs reach others") from None
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise PeerQuestionError(f"the CUDA driver does not tell which GPUs reach others: {reason}")
    return [(one, other) for one, other in json.loads(done.stdout)]
