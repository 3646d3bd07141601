"""Cores of a benchmark's server and clients."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpus import Cpus, check_cpus, cpu_s, cpu_since, cpus_fault, on_cpus, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"), [("0,1", {0, 1}), ("2-5", {2, 3, 4, 5}), ("0,2-3", {0, 2, 3}), ("7", {7}), ("7-7", {7})]
)
def test_cores_in_words(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "3-2", "0x1"])
def test_what_names_no_cores_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        ("0,1", "2-3", ["--client-cpus", "no core 2, 3", "may use 0, 1"]),
        ("4", None, ["--server-cpus", "no core 4"]),
        ("0,1", "1", ["both have core 1"]),
    ],
)
def test_cores_that_cannot_be_had(server: str, client: str | None, words: list[str]) -> None:
    fault = cpus_fault(parse_cpus(server), None if client is None else parse_cpus(client), {0, 1})
    assert fault is not None and all(word in fault for word in words)
    assert cpus_fault(parse_cpus("0"), parse_cpus("1"), {0, 1}) is None
    assert cpus_fault(None, None, {0, 1}) is None


def test_a_process_started_there_stays_there_and_this_one_comes_back() -> None:
    there = os.sched_getaffinity(0)
    one = frozenset((max(there),))
    with on_cpus(one):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert os.sched_getaffinity(0) == there
        assert os.sched_getaffinity(child.pid) == one
        check_cpus(child.pid, one)
        with pytest.raises(RuntimeError, match=f"process {child.pid} .* is on cores"):
            check_cpus(child.pid, frozenset((max(there) + 1,)))
    finally:
        child.communicate(b"\n")


def test_time_of_a_process_and_its_children() -> None:
    work = "sum(range(3 * 10**7)); print(1, flush=True); input()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        name = Path(sys.executable).name
        spent = cpu_s(child.pid)
        assert set(spent) == {name} and spent[name] > 0.1
        assert cpu_since(child.pid, {name: spent[name] - 5.0})[name] >= 5.0
        assert cpu_since(child.pid, cpu_s(child.pid)) == {}
    finally:
        child.communicate(b"\n")


def test_what_is_pinned_is_in_the_result() -> None:
    assert Cpus().told() is None
    assert Cpus(frozenset((1, 0)), None).told() == {"server": [0, 1]}
