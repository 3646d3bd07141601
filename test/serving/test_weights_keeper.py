"""The keeper of the weights: one for all virtual GPUs, and its death takes its engines out and brings them back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from server import Server

pytestmark = pytest.mark.engine

BODY = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


def keepers(server: Server) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == server.pid and "sglang_adapt::keeper" in " ".join(process.cmdline()):
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_a_keeper_that_dies_is_started_anew_with_its_engines(ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    before = httpx.post(f"{server.url}/generate", json=BODY, timeout=180).json()["output_ids"]
    [keeper] = keepers(server)
    os.kill(keeper, signal.SIGKILL)
    started = time.monotonic()
    while httpx.get(f"{server.url}/ready").status_code == 200:
        assert time.monotonic() - started < 2, "the death of the keeper was not noticed within 2 s"
        time.sleep(0.02)
    while httpx.get(f"{server.url}/health").json()["status"] != "ok":
        assert time.monotonic() - started < 180, "the engines are not back within 180 s"
        time.sleep(0.1)
    [again] = keepers(server)
    assert again != keeper
    after = httpx.post(f"{server.url}/generate", json=BODY, timeout=180).json()["output_ids"]
    assert after == before


def test_weights_are_not_updated_under_other_engines(ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    body = {"model_path": "/nowhere", "load_format": "auto"}
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=180)
    assert answer.status_code == 400
    assert "are shared by the engines of all TP sizes" in answer.text
