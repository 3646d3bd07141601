"""What nvidia-smi says about memory and clocks."""

from __future__ import annotations

import subprocess

_TIMEOUT_S = 30


def _query(fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]


def memory_used_mib(device: str, gpus: int) -> list[int]:
    """MiB in use on each GPU; zeros on virtual GPUs."""
    if device == "cpu":
        return [0] * gpus
    return [int(row[0]) for row in _query("memory.used")][:gpus]


def clocks(device: str) -> list[str]:
    """SM clock in MHz and performance state of each GPU, e.g. "345 P0"."""
    if device == "cpu":
        return []
    return [" ".join(row) for row in _query("clocks.sm,pstate")]
