import subprocess
import sys

_WATCHED = """
import re, threading, time
from sglang_adapt.core.held_interpreter import end_if_held
ended = end_if_held(0.6)
{work}
print("done", flush=True)
"""
_HELD = "re.search('(.*)*(.*)*z!', 'some words that do not end ' * 20)"
_BUSY = """
until = time.monotonic() + 2.0
while time.monotonic() < until:
    pass
"""
_UNWATCHED = """
ended.set()
for thread in threading.enumerate():
    if thread.name == "held-interpreter":
        thread.join()
until = time.monotonic() + 1.5
re.search('(a|a)*$', 'a' * 23 + 'b')
while time.monotonic() < until:
    pass
"""


def run(work: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WATCHED.format(work=work)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_call_that_holds_the_interpreter_ends_the_process_and_says_where() -> None:
    found = run(_HELD)
    assert found.returncode == 1
    assert "Timeout" in found.stderr
    assert "re/__init__.py" in found.stderr
    assert "done" not in found.stdout


def test_a_busy_thread_that_gives_others_their_turns_goes_on() -> None:
    found = run(_BUSY)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


def test_the_watch_ends() -> None:
    found = run(_UNWATCHED)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
