"""`ctl` against a stand-in for the server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from sglang_adapt import ctl


class Handler(BaseHTTPRequestHandler):
    orders: ClassVar[list[object]] = []

    def do_GET(self) -> None:
        if self.headers["authorization"] == "Bearer other":
            self._answer({"error": "Unauthorized"}, 401)
        else:
            self._answer({"switches": [{"reason": "x" * 100}] * 5000})

    def do_POST(self) -> None:
        self.orders.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer({"active": "tp2@0-1"})

    def _answer(self, body: object, status: int = 200) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Handler.orders = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reader_that_has_enough_is_no_missing_server(url: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m sglang_adapt.ctl --url {url} layout | head -1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "{\n", "")


def test_a_strategy_is_sent_only_if_it_is_given(url: str) -> None:
    assert ctl.main(["layout", "auto", "--url", url]) == 0
    assert ctl.main(["--url", url, "layout", "tp2@0-1", "--strategy", "keep"]) == 0
    reason = "asked for by ctl"
    assert Handler.orders == [
        {"layout": "auto", "reason": reason},
        {"layout": "tp2@0-1", "reason": reason, "strategy": "keep"},
    ]


def test_a_wrong_key_is_told_with_the_way_out(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["--url", url, "--api-key", "other", "layout"]) == 1
    assert capsys.readouterr().err == "refused (401): Unauthorized; give the server's key as --api-key\n"


def test_no_server_is_told_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    # A port that is bound and not listened on refuses, and nobody else can get it meanwhile.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert ctl.main(["--url", f"http://127.0.0.1:{held.getsockname()[1]}", "layout"]) == 2
    said = capsys.readouterr().err
    assert "Connection refused; is it up" in said and "urlopen" not in said


def test_an_address_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["--url", "127.0.0.1:30000", "layout"])
    assert ended.value.code == 2
    assert "--url: '127.0.0.1:30000' does not begin with http://" in capsys.readouterr().err
