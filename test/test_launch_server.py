"""The first process, as far as it goes without an engine."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "sglang_adapt.launch_server", "--port", "41098"]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_sglang_is_being_loaded(sig: signal.Signals) -> None:
    """Ctrl-C goes to the whole foreground group, so also to what is importing."""
    # pytest's own folders are too deep for unix sockets.
    with tempfile.TemporaryDirectory() as folder:
        pipe = subprocess.PIPE
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(COMMAND, stderr=pipe, text=True, env=environment, start_new_session=True) as server:
            deadline = time.monotonic() + 120
            while not is_importing(server.pid):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # If the server is killed now, the next start finds all that it leaves.
            assert {path.name.split("-")[0] for path in Path(folder).iterdir()} == {"sglang_adapt"}
            os.killpg(server.pid, sig)
            _, text = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "Traceback" not in text
        assert not list(Path(folder).iterdir())


def test_a_taken_port_is_told_before_sglang_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == f"error: 127.0.0.1:{port} cannot be listened on (Address already in use); give another --port\n"
    )


def test_what_stock_refuses_is_one_line_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*COMMAND, "--no-such-flag"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "TMPDIR": folder},
        )
        left = {path.name for path in Path(folder).iterdir()}
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --no-such-flag is not a flag")
    assert "usage:" not in done.stderr and "Traceback" not in done.stderr
    # Caches of libraries, under the user's name, which the next start uses again.
    user = getpass.getuser()
    assert left <= {f"torchinductor_{user}", user}, left


def is_importing(pid: int) -> bool:
    """Has the server's first process started its forkserver?"""
    return any("forkserver" in " ".join(process.cmdline()) for process in psutil.Process(pid).children(recursive=True))


def test_a_temporary_folder_too_deep_for_sockets() -> None:
    with tempfile.TemporaryDirectory() as folder:
        deep = Path(folder, "d" * 90)
        deep.mkdir()
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=30, check=False, env={**os.environ, "TMPDIR": str(deep)}
        )
    assert done.returncode == 2
    assert "set TMPDIR to a shorter folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_process_imports_nothing_heavy() -> None:
    """It lives as long as the server, and everything else waits for it."""
    code = "import sys, sglang_adapt.launch_server; print(*{'torch', 'numpy', 'sglang', 'zmq'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == []
