"""What a benchmark finds of a server that has ended: it must see what is there, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import leftovers

TIDY = """
import os, signal, sys
file = open(os.path.join(sys.argv[1], "lock"), "w")
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
os.remove(file.name)
os.rmdir(sys.argv[1])
"""
UNTIDY = """
import os, signal, subprocess, sys
file = open(os.path.join(sys.argv[1], "lock"), "w")
open(sys.argv[2], "w").close()
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(3)
"""


class FakeServer:
    """A process that leads a session, as far as `leftovers.end` needs a server."""

    def __init__(self, code: str, *args: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        command = [sys.executable, "-c", code, *args]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, where other processes come and go."""
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sglang_adapt-"))
    yield path
    if path.exists():
        (path / "lock").unlink(missing_ok=True)
        path.rmdir()


def test_nothing_is_left_of_a_tidy_server(folder: Path, shared_memory: Path) -> None:
    before = leftovers.shared_memory()
    assert leftovers.end(FakeServer(TIDY, str(folder)), before) == []  # type: ignore[arg-type]


def test_everything_that_is_left_is_named(folder: Path, shared_memory: Path) -> None:
    before = leftovers.shared_memory()
    shared = shared_memory / "left"
    server = FakeServer(UNTIDY, str(folder), str(shared))
    try:
        left = leftovers.end(server, before)  # type: ignore[arg-type]
    finally:
        os.kill(int(server.said), signal.SIGKILL)
    assert "exit code 3" in left
    assert f"process {server.said}: sleep 60 " in left
    assert f"folder {folder}" in left
    assert "/dev/shm/left" in left


def test_shared_memory_that_somebody_holds_is_not_left(folder: Path, shared_memory: Path) -> None:
    before = leftovers.shared_memory()
    shared = shared_memory / "held"
    with shared.open("w"):
        assert leftovers.end(FakeServer(TIDY, str(folder)), before) == []  # type: ignore[arg-type]
