"""The private folder of a run, and the end of every descendant."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_adapt.core import process
from sglang_adapt.core.process import sweep_run_dirs


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(process.tempfile, "tempdir", folder)
        yield Path(folder)


_HOLDER = """
import time
from sglang_adapt.core.process import make_run_dir
run_dir = make_run_dir()
print(run_dir.path, flush=True)
time.sleep(60)
"""


def test_run_dir_is_private_and_those_of_killed_runs_are_swept(short_tmp: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_tmp)}
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    )
    try:
        killed_dir, alive_dir = (Path(run.stdout.readline().strip()) for run in (killed, alive) if run.stdout)
        killed.kill()
        killed.wait()
        stranger = short_tmp / "sglang_adapt-no-lock"
        stranger.mkdir()
        mine = process.make_run_dir()
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
        assert not killed_dir.exists()
        assert alive_dir.exists()
        assert stranger.exists()
        mine.remove()
        assert not mine.path.exists()
    finally:
        alive.kill()
        alive.wait()


def test_run_dir_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match="TMPDIR"):
        process.make_run_dir()
    assert list(deep.iterdir()) == []


_ORPHAN = """
import subprocess, sys
from sglang_adapt.core.process import adopt_orphans, end_descendants
adopt_orphans()
sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
script = f"import subprocess, sys; print(subprocess.Popen({sleeper}).pid, flush=True)"
child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
grandchild = int(child.stdout.readline())
child.wait()
import os
os.kill(grandchild, 0)
assert end_descendants(10)
try:
    os.kill(grandchild, 0)
except ProcessLookupError:
    print("gone")
"""


def test_orphans_are_adopted_and_ended() -> None:
    done = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "gone", done.stderr


_TRACKED = """
import multiprocessing, os, pathlib, signal
from sglang_adapt.core.process import adopt_orphans, end_descendants

def hold(ready):
    lock = multiprocessing.get_context("spawn").Lock()
    ready.set()
    signal.pause()

if __name__ == "__main__":
    adopt_orphans()
    # Others make some as well.
    multiprocessing.current_process()._config["semprefix"] = f"/mp{os.getpid()}"
    ours = f"sem.mp{os.getpid()}-*"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    context.Process(target=hold, args=(ready,)).start()
    assert ready.wait(30)
    assert list(pathlib.Path("/dev/shm").glob(ours))
    assert end_descendants(10)
    print(list(pathlib.Path("/dev/shm").glob(ours)))
"""


def test_semaphores_of_killed_processes_are_removed(tmp_path: Path) -> None:
    script = tmp_path / "tracked.py"
    script.write_text(_TRACKED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_sweep_leaves_alone_what_is_not_a_dead_run_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "sglang_adapt-gone"
    gone.symlink_to(tmp_path / "removed-meanwhile")
    new = tmp_path / "sglang_adapt-new"
    new.mkdir()
    other = tmp_path / "sglang_adapt-other"
    other.mkdir()
    (other / "lock").touch()
    opened: list[Path] = []
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(Path, "is_file", lambda path: opened.append(path))
    assert sweep_run_dirs(tmp_path) == []
    assert opened == []
    monkeypatch.undo()
    assert sweep_run_dirs(tmp_path) == [other]
    assert new.is_dir()
