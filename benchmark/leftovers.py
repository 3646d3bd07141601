"""Ending a server, and what it leaves behind: processes, shared memory, folders."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from server import Server

_SHARED_MEMORY = Path("/dev/shm")
_RUN_FOLDERS = "sglang_adapt-*"
_PATIENCE_S = 2.0
"""For processes that have been killed to be gone."""


def shared_memory() -> set[str]:
    """Names in /dev/shm now."""
    return {entry.name for entry in _SHARED_MEMORY.iterdir()}


def end(server: Server, shared_before: set[str], timeout_s: float = 60.0) -> list[str]:
    """Tell a server to end, wait for it, and name what is left of it.

    Args:
        server: started and running.
        shared_before: names that were in /dev/shm before it; new ones that no living process holds count as left.
        timeout_s: for its first process to end.

    Returns:
        One line for each thing; empty if nothing is left.
    """
    folders = folders_of(server.pid)
    os.kill(server.pid, signal.SIGTERM)
    left = []
    try:
        code = server.wait(timeout_s)
        if code:
            left.append(f"exit code {code}")
    except subprocess.TimeoutExpired:
        left.append(f"its first process {timeout_s:.0f} s after SIGTERM")
    deadline = time.monotonic() + _PATIENCE_S
    while (processes := _session(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left += [f"process {pid}: {_command(pid)}" for pid in processes]
    left += [f"folder {folder}" for folder in folders if folder.exists()]
    new = shared_memory() - shared_before
    if new:
        held = _held_shared_memory([int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()])
        left += [f"/dev/shm/{name}" for name in sorted(new) if name not in held]
    return left


def _session(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid = int(entry.name)
                if os.getsid(pid) == leader and _state(pid) != "Z":
                    found.append(pid)
            except OSError:
                continue
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    except OSError:
        return "ended just now"


def folders_of(leader: int) -> set[Path]:
    """Folders of the server: those of its own name, among temporary files, in which its processes have files open.

    Raises:
        RuntimeError: there is none, so that nothing could be said about it.
    """
    pattern = f"{tempfile.gettempdir()}/{_RUN_FOLDERS}"
    found = {path.parent for pid in _session(leader) for path in _open_files(pid) if path.parent.match(pattern)}
    if not found:
        raise RuntimeError(f"no process of the server has a file open in a folder {pattern}")
    return found


def _open_files(pid: int) -> set[Path]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = entry.readlink()
            if target.is_absolute():
                found.add(target)
    except OSError:
        return found
    return found


def shared_memory_of(leader: int) -> set[Path]:
    """Files in /dev/shm that processes of a session have open or mapped."""
    return {_SHARED_MEMORY / name for name in _held_shared_memory(_session(leader))}


def _held_shared_memory(pids: list[int]) -> set[str]:
    """Names in /dev/shm that one of these processes has open or mapped."""
    held = set()
    for pid in pids:
        paths = _open_files(pid)
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            maps = ""
        paths |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}
        held |= {path.name for path in paths if path.parent == _SHARED_MEMORY}
    return held
