"""Servers of ours that need not load sglang: first process and forkserver are forked from the tests' forkserver.

That is 11 s of CPU less for each. From there on all is as the command has it. What is about the command, its first
process or the end of a server is tested on servers that it starts (`benchmark/server.py`).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from socket import AF_UNIX, socket
from typing import IO, Any

from weights_engines import forkserver as preloaded

from server import Launched, Server


@dataclass
class ForkedServer(Server):
    """A `Server` of `sglang_adapt.launch_server` that need not load sglang."""

    def _launch(self, flags: list[str], log: IO[str], env: dict[str, str]) -> Launched:
        return _Forked(flags, log.name, env)


def run_to_its_end(flags: list[str], log: Path, timeout_s: float) -> int:
    """Run a server that ends by itself; returns its exit code. Its output goes to the log."""
    return _Forked(flags, str(log), dict(os.environ)).wait(timeout_s)


class _Forked:
    """A process as `subprocess.Popen` has it."""

    def __init__(self, *args: Any) -> None:
        self._process = preloaded().Process(target=_first_process, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        # Tests that are told to end wait for no server; Python would.
        atexit.register(self._process.kill)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("sglang_adapt.launch_server", timeout)
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _first_process(flags: list[str], log: str, env: dict[str, str]) -> None:
    """What `python -m sglang_adapt.launch_server` would be: alone in its session, with nothing of the tests' left."""
    import setproctitle

    os.setsid()
    with Path(log).open("ab", buffering=0) as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    setproctitle.setproctitle(" ".join(["python -m sglang_adapt.launch_server", *flags]))
    _fork_a_forkserver()

    from sglang_adapt import launch_server

    sys.modules["__main__"] = launch_server
    sys.exit(launch_server.main(flags))


def _fork_a_forkserver() -> None:
    """In place of `multiprocessing.forkserver.ensure_running`, which would find one to be running from now on."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for inherited in (server._forkserver_alive_fd, tracker._fd):
        os.close(inherited)
    tracker._fd = tracker._pid = None
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    with socket(AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, alive_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_end)
            try:
                _serve_forks(listener.fileno(), alive)
            finally:
                os._exit(1)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_end, pid


def _serve_forks(listener: int, alive: int) -> None:
    """The forkserver as it is when it has loaded `upstream/preload.py`."""
    import setproctitle

    from sglang_adapt.core.process import die_with_parent

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    setproctitle.setproctitle("sglang_adapt::forkserver")
    try:
        forkserver.main(listener, alive, [])
    except SystemExit:
        os._exit(0)
