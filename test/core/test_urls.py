"""Addresses of servers on a command line."""

from __future__ import annotations

import argparse

import pytest

from sglang_adapt.core.urls import server_url


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="does not begin with http://"):
        server_url("127.0.0.1:30000")


def test_a_path_can_be_added_to_an_address() -> None:
    assert server_url("https://host:1/") + "/adapt" == "https://host:1/adapt"
