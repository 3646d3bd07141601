"""Addresses of servers on a command line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from sglang_adapt.core.urls import KEEP_ALIVE_S, server_url


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="does not begin with http://"):
        server_url("127.0.0.1:30000")


def test_a_path_can_be_added_to_an_address() -> None:
    assert server_url("https://host:1/") + "/adapt" == "https://host:1/adapt"


def test_our_clients_give_idle_connections_up_before_the_server_does() -> None:
    from sglang.srt.environ import envs

    assert envs.SGLANG_TIMEOUT_KEEP_ALIVE.get() / 2 >= KEEP_ALIVE_S
    root = Path(__file__).parents[2]
    files = [*(root / "python").rglob("*.py"), *(root / "benchmark").rglob("*.py")]
    made = [call for file in files for call in re.findall(r"TCPConnector\((.*?)\)", file.read_text())]
    assert len(made) > 4
    assert all("keepalive_timeout=KEEP_ALIVE_S" in call or "force_close=True" in call for call in made), made
