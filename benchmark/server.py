"""Start and stop a server under test: sglang_adapt or stock sglang, with the same flags."""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Protocol

from cpus import check_cpus, on_cpus


def our_flags(layout: str, sizes: Iterable[int], start_method: str | None, virtual: int) -> list[str]:
    """Flags of a server of ours for a benchmark: its first layout, its TP sizes, how it starts, and virtual GPUs
    (0: real ones). Its chunks have new tokens only."""
    return [
        *("--incremental-streaming-output", "--adapt-layout", layout),
        *("--adapt-tp-sizes", ",".join(map(str, sorted(set(sizes))))),
        *(["--adapt-start-method", start_method] if start_method else []),
        *(["--adapt-virtual-gpus", str(virtual)] if virtual else []),
    ]


class Launched(Protocol):
    """The first process of a server, as `subprocess.Popen` has it; it leads a session of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, signal: int, /) -> None: ...


@dataclass
class Server:
    """A server process; a context manager that waits until it serves, and ends it.

    Attributes:
        name: for messages and the log file.
        module: `sglang_adapt.launch_server` or `sglang.launch_server`.
        flags: its command line without host and port.
        log: where its output goes.
        environment: variables beside those of this process.
        cpus: cores of all its processes; None: those of this one.
    """

    name: str
    module: str
    flags: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 400.0
    cpus: frozenset[int] | None = None

    def __enter__(self) -> Server:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | self.environment
        flags = [*self.flags, "--host", "127.0.0.1", "--port", str(self.port)]
        # A benchmark that is told to end must not leave its server behind.
        signal.signal(signal.SIGTERM, exit_on_sigterm)
        started = time.perf_counter()
        with self.log.open("w") as log:
            log.write(shlex.join([sys.executable, "-m", self.module, *flags]) + "\n")
            log.flush()
            with on_cpus(self.cpus):
                self._process = self._launch(flags, log, env)
        try:
            self._wait(started)
            check_cpus(self.pid, self.cpus)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started
        print(f"{self.name}: serves after {self.start_s:.1f} s", flush=True)
        return self

    def _launch(self, flags: list[str], log: IO[str], env: dict[str, str]) -> Launched:
        command = [sys.executable, "-m", self.module, *flags]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)

    def _wait(self, started: float) -> None:
        while not self._answers("/health_generate"):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended while it started:\n{self.tail()}")
            if time.perf_counter() - started > self.start_timeout_s:
                raise TimeoutError(f"{self.name} does not serve after {self.start_timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole session of processes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            print(f"{self.name}: did not end within 30 s of SIGTERM", flush=True)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    @property
    def pid(self) -> int:
        """Process id of the first process, which leads a session of its own."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Wait for the server to end by itself; returns its exit code."""
        return self._process.wait(timeout_s)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def free_port() -> int:
    """A TCP port that is free now, and not one that the kernel gives to connections while the server starts."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, first - 1_000), first)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment() -> dict[str, object]:
    """Card, versions, date and command, for a result file."""
    import torch

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "cards": cards or [f"none ({platform.processor() or platform.machine()}, {os.cpu_count()} cores)"],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "sglang": _sglang_version()},
    }


def _sglang_version() -> str:
    from importlib.metadata import version

    return version("sglang")


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"written: {path}")
