"""Small helpers around processes: die with the parent, the private folder of a run."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import IO, Any

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RUN_DIR_PREFIX = "sglang_adapt-"
_MAX_SOCKET_PATH = 107
_LONGEST_SOCKET_NAME = 30
_LOCK = "lock"
_TRACKER_GRACE_S = 3.0


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `sig` when its parent ends, however that happens (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def exit_text(code: int | None) -> str:
    """How a process has ended, in words, by multiprocessing's exit code."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def ignore_stop_signals() -> None:
    """Let SIGTERM and SIGINT be: they are for the first process and the front, which let the others finish first. A
    terminal, `timeout` and service managers send them to all processes of a server."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, signal.SIG_IGN)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can be lost (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(timeout_s: float) -> bool:
    """Kill every descendant of this process and reap it; returns False if one is left after `timeout_s`.

    Resource trackers (multiprocessing's and joblib's) come last and are not killed at first: they end by themselves
    when all others have, and remove the named semaphores that killed processes could not.

    To be used after `adopt_orphans`, when this process waits for none of its children otherwise.
    """
    deadline = time.monotonic() + timeout_s
    trackers_until = time.monotonic() + min(_TRACKER_GRACE_S, timeout_s / 2)
    while time.monotonic() < deadline:
        others = 0
        for child in psutil.Process().children(recursive=True):
            try:
                if _is_tracker(child) and time.monotonic() < trackers_until:
                    continue
                others += 1
                child.kill()
            except psutil.NoSuchProcess:
                continue
        if not others:
            # This process's own end of its tracker's pipe; the tracker ends when the last one is closed.
            _close_tracker()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.01)
    return False


def _is_tracker(process: psutil.Process) -> bool:
    return "resource_tracker" in " ".join(process.cmdline())


def _close_tracker() -> None:
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}) failed: {os.strerror(error)}")


def process_context(start_method: str) -> ForkServerContext | SpawnContext:
    """The multiprocessing context in which this process starts its children.

    Args:
        start_method: `forkserver`: from the forkserver that this process was forked from itself; or `spawn`.
    """
    if start_method == "forkserver":
        share_forkserver()
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


def share_forkserver() -> None:
    """Let this process, forked from a forkserver, start its own children from that same forkserver.

    The standard library hands a forked child the server's address for this purpose, but its `ensure_running` then
    starts another server, because it tells a running one by a process id that only the first process has.

    Raises:
        RuntimeError: this process has no forkserver's address: it was not forked from one.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_address is None or server._forkserver_alive_fd is None:
        raise RuntimeError(f"process {os.getpid()} was not started from a forkserver")
    server.ensure_running = _already_running


def _already_running() -> None:
    return None


def keep_sockets_in(folder: Path) -> None:
    """Let multiprocessing put its sockets, also the forkserver's, in this folder; children of this process do so too.

    Its own folder is removed at a regular exit only, and nobody would find it after a kill.
    """
    process: Any = multiprocessing.current_process()
    process._config["tempdir"] = str(folder)


@dataclass(frozen=True)
class RunDir:
    """A run's private folder (mode 0700). Its lock is held as long as this process lives, whatever becomes of it."""

    path: Path
    lock: IO[bytes]

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def make_run_dir() -> RunDir:
    """Make this run's private folder in the temporary folder, and remove those of runs that were killed.

    Raises:
        OSError: the temporary folder's path is too long for a unix socket; names TMPDIR as the way out.
    """
    base = Path(tempfile.gettempdir())
    sweep_run_dirs(base)
    path = Path(tempfile.mkdtemp(prefix=_RUN_DIR_PREFIX, dir=base))
    if len(str(path)) + _LONGEST_SOCKET_NAME > _MAX_SOCKET_PATH:
        path.rmdir()
        raise OSError(f"{base} is too long a path for unix sockets; set TMPDIR to a shorter folder")
    lock = (path / "new-lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its own name only once it is held, so that no sweep can take it for a dead run's.
    (path / "new-lock").rename(path / _LOCK)
    return RunDir(path, lock)


def sweep_run_dirs(base: Path) -> list[Path]:
    """Remove the folders of runs whose lock nobody holds any more, and return them."""
    removed = []
    for path in base.glob(f"{_RUN_DIR_PREFIX}*"):
        try:
            # Another user's first: its files may not even be asked for.
            if path.stat().st_uid != os.getuid():
                continue
            lock = (path / _LOCK).open("rb")
        except (FileNotFoundError, NotADirectoryError):
            # Being made, or removed by another server that starts now.
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
