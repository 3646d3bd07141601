"""The front's process ends when it should."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys, time
from sglang_adapt.core.process import die_with_parent
from sglang_adapt.front import process

def child():
    die_with_parent()
    time.sleep(30)

def serve(*args):
    # As stock starts the detokenizer: a child that Python would wait for.
    multiprocessing.get_context("fork").Process(target=child).start()
    {end}

process._serve = serve
process.front_main([], "", "spawn")
"""


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("raise RuntimeError('broken')", 1), ("sys.exit()", 0), ("sys.exit('no')", 1)]
)
def test_it_does_not_wait_for_its_children(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], stderr=subprocess.DEVNULL, timeout=25, check=False
    )
    assert done.returncode == code
