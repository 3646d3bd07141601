"""The front's process ends when it should."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import types

import pytest

from sglang_adapt.front import process

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


class Somebody(http.server.BaseHTTPRequestHandler):
    """Answers everything with 200, as a server that has taken the address."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.mark.parametrize("taken", [False, True])
def test_a_server_that_could_not_listen_is_not_waited_for(taken: bool) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Somebody) as other:
        url = f"http://127.0.0.1:{other.server_port}"
        if taken:
            threading.Thread(target=other.serve_forever, daemon=True).start()
        else:
            other.server_close()
        stopped = threading.Event()
        stopped.set()
        with pytest.raises(ConnectionError, match=f"{url} .*cannot be listened on"):
            process._warm_up(types.SimpleNamespace(url=lambda: url, api_key=None), stopped)
        if taken:
            other.shutdown()


def test_what_front_and_router_import_does_not_load_sglang() -> None:
    """It costs each of them seconds of CPU at the start, and is loaded where they are forked from."""
    script = "import sys, sglang_adapt.front.process; sys.exit('sglang.srt' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
