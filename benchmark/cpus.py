"""Which cores a benchmark's server and clients run on, and what CPU time each takes."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Cpus:
    """Cores by number; None: all that this process may use.

    Attributes:
        server: of every process of the server.
        client: of this process and of those that it starts, but for the server.
    """

    server: frozenset[int] | None = None
    client: frozenset[int] | None = None

    def told(self) -> dict[str, list[int]] | None:
        """For a result file; None if nothing is pinned."""
        named = {"server": self.server, "client": self.client}
        return {name: sorted(cpus) for name, cpus in named.items() if cpus is not None} or None


def parse_cpus(text: str) -> frozenset[int]:
    """`0,1` or `2-15` or both by commas. Raises ArgumentTypeError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise argparse.ArgumentTypeError(f"{text!r} names no cores; give numbers and ranges, e.g. 0,1 or 2-15")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise argparse.ArgumentTypeError(f"{part!r} ends before it begins")
        cpus.update(numbers)
    return frozenset(cpus)


def add_cpu_flags(parser: argparse.ArgumentParser) -> None:
    """`--server-cpus` and `--client-cpus`; `chosen_cpus` reads them."""
    where = "e.g. 0,1 or 2-15 (default: all)"
    parser.add_argument("--server-cpus", type=parse_cpus, help=f"cores of all processes of the server, {where}")
    parser.add_argument("--client-cpus", type=parse_cpus, help=f"cores of what sends requests, {where}")


def chosen_cpus(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Cpus:
    """The cores that were asked for. Ends the program if they are not there, or both have the same one."""
    fault = cpus_fault(options.server_cpus, options.client_cpus, os.sched_getaffinity(0))
    if fault is not None:
        parser.error(fault)
    return Cpus(options.server_cpus, options.client_cpus)


def cpus_fault(server: frozenset[int] | None, client: frozenset[int] | None, there: set[int]) -> str | None:
    """What is wrong with cores that were asked for, or None."""
    for flag, cpus in (("--server-cpus", server), ("--client-cpus", client)):
        missing = sorted((cpus or frozenset()) - there)
        if missing:
            return f"{flag}: there is no core {_list(missing)} for this process; it may use {_list(sorted(there))}"
    both = sorted((server or frozenset()) & (client or frozenset()))
    return f"--server-cpus and --client-cpus both have core {_list(both)}" if both else None


@contextlib.contextmanager
def on_cpus(cpus: frozenset[int] | None) -> Iterator[None]:
    """In the block this thread, and each process that it starts, runs on these cores; None: where it does already."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_cpus(pid: int, cpus: frozenset[int] | None) -> None:
    """Look that a process and all that descend from it are on these cores. Raises RuntimeError."""
    if cpus is None:
        return
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.cpu_affinity()
            if found is None or not set(found) <= cpus:
                raise RuntimeError(f"process {process.pid} of the server is on cores {found}, not on {sorted(cpus)}")


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds so far of a process and all that descend from it, by what they are."""
    spent: dict[str, float] = {}
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, words = process.cpu_times(), process.cmdline() or ["?"]
            kind = words[0].removeprefix("sglang_adapt::").removeprefix("sglang::").split()[0].rsplit("/", 1)[-1]
            spent[kind] = spent.get(kind, 0.0) + times.user + times.system
    return spent


def cpu_since(pid: int, before: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds since `before`, an answer of `cpu_s`; without what took none."""
    since = {kind: round(spent - before.get(kind, 0.0), 3) for kind, spent in cpu_s(pid).items()}
    return {kind: spent for kind, spent in since.items() if spent}


def busy_s() -> float:
    """CPU seconds that all processes of the machine have taken so far, on all cores."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _list(cpus: list[int]) -> str:
    return ", ".join(map(str, cpus))
