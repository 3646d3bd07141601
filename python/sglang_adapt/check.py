"""`python -m sglang_adapt.check`: is this machine and this installation what the server needs?

Prints what it checks, one line each, and exits with 1 on any fault.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import sglang_adapt
from sglang_adapt.core.copy_path import AUTO, CopyPath, path_text
from sglang_adapt.floors import floor_faults
from sglang_adapt.upstream.environment import STOCK_ENVIRONMENT


class CheckError(RuntimeError):
    """A check failed; the text says why and what to do."""


def check_versions() -> str:
    """sglang and torch are the supported releases."""
    from sglang_adapt.upstream.version import check_versions as gate

    return ", ".join(f"{package} {found}" for package, found in gate().items())


def check_floors() -> str:
    """No room imports from its own floor or above, and only upstream touches sglang."""
    faults = floor_faults(Path(sglang_adapt.__file__).parent)
    if faults:
        raise CheckError("; ".join(map(str, faults)))
    return "every import goes to a lower floor"


def check_patches() -> str:
    """Every patch applies to the installed sglang and is in place afterwards."""
    from sglang_adapt.upstream.front import FRONT_PATCHES
    from sglang_adapt.upstream.rank import RANK_PATCHES, prepare_process

    return ", ".join(prepare_process(*FRONT_PATCHES, *RANK_PATCHES))


def check_wire() -> str:
    """sglang's messages are laid out as the router reads them."""
    from sglang_adapt.upstream.wire import assert_wire_format

    assert_wire_format()
    return "sglang's messages are laid out as the router reads them"


def check_devices() -> str:
    """The CUDA devices, or that there are none and virtual GPUs are used."""
    import torch

    if torch.cuda.device_count() == 0:
        return "no CUDA device: virtual GPUs"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def check_peer_access() -> str:
    """How KV gets from GPU to GPU: by peer access if every GPU reaches every other's memory, else staged."""
    import torch

    from sglang_adapt.memory.peers import unreachable_pairs

    count = torch.cuda.device_count()
    if count < 2:
        return "not needed: fewer than two CUDA devices"
    missing = unreachable_pairs(range(count))
    if missing:
        return path_text(CopyPath.STAGED, AUTO, missing)
    return f"all {count} GPUs reach one another"


def check_shared_memory() -> str:
    """An anonymous shared-memory file can be made and mapped."""
    fd = os.memfd_create("sglang_adapt-check")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[0] = 1
    finally:
        os.close(fd)
    return "anonymous shared memory can be made and mapped"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("versions", check_versions),
    ("floors", check_floors),
    ("patches", check_patches),
    ("messages", check_wire),
    ("devices", check_devices),
    ("peer access", check_peer_access),
    ("shared memory", check_shared_memory),
)


def main() -> int:
    """Run all checks; returns 1 if any failed."""
    # Processes of the server speak msgpack with one another; so does this check of the format.
    os.environ.update(STOCK_ENVIRONMENT)
    failed = 0
    for name, check in CHECKS:
        try:
            result = check()
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its finding
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}")
        else:
            print(f"ok   {name}: {result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
