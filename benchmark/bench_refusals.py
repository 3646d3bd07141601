"""What refusing costs: refusals a second of the real front, and the TTFT of accepted requests beside them.

    python benchmark/bench_refusals.py [--seconds 5] [--rate 5000] [--own-targets] [--profile front.txt]

The server alone on two cores, where there are more:

    python benchmark/bench_refusals.py --server-cpus 0,1 --client-cpus 2-15

Before and after a change, by turns, so that both see the same machine:

    python benchmark/bench_refusals.py --name after --other-name before --other OTHER_CHECKOUT

One server on one virtual GPU with two tiers: `open`, whose targets everything meets, and `shut`, whose targets no
request here can meet, so that each is answered with a 429. Two measurements, by turns:

1. Refusals as fast as they go: connections that are kept, each with one request at a time (no pipelining).
2. TTFT of streamed `open` requests, alone, and beside refusals at `--rate` a second.

What sends is a process of its own (`flood.py`). Without `--client-cpus` it takes its share of the server's cores. The
result has how much (`generator_cpu`: of one core), what each process of the server took, and what all that has nothing
to do with this did (`others_cpu`: mean of the round, in cores): with more than a tenth there a TTFT says little. Goal:
5,000 refusals/s on 2 cores, TTFT at most 10 % up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cpus import Cpus, add_cpu_flags, busy_s, chosen_cpus, cpu_s, cpu_since, family, on_cpus
from flood import flooding, percentile
from server import Server, environment, write_json

TIERS = """\
default: open
tiers:
  - {name: open, ttft_ms: 60000, tpot_ms: 60000}
  - {name: shut, ttft_ms: 3, tpot_ms: 60000, when_infeasible: reject}
"""
GOAL_RPS = 5000
GOAL_TTFT_RATIO = 1.1
QUIET_CPU = 0.2
"""Of a core: a machine where what else runs takes less is quiet."""
_PROMPT = "Once upon a time there was a small house at the end of the road. "


def requests(host: str, sizes: tuple[int, int], own_targets: bool, rng: random.Random) -> list[bytes]:
    """256 different requests of the tier `shut`, with prompts of so many bytes."""
    made = []
    for number in range(256):
        size = rng.randint(*sizes)
        content = (_PROMPT * (size // len(_PROMPT) + 1))[:size]
        body = json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 64, "stream": True}
        ).encode()
        own = f"x-slo-ttft-ms: {3 + number / 1e6:.6f}\r\n" if own_targets else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nx-adapt-tier: shut\r\n{own}Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


def ttfts(port: int, seconds: float, rate: float, rng: random.Random) -> list[float]:
    """TTFT in ms of streamed requests of the tier `open`, one after the other, begun `rate` a second."""
    seen: list[float] = []
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        due = began + len(seen) / rate
        if due > now:
            time.sleep(due - now)
        body = {"model": "demo", "prompt": [rng.randrange(10, 250) for _ in range(32)], "max_tokens": 4, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        sent = time.perf_counter()
        headers = {"content-type": "application/json", "x-adapt-tier": "open"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.readline()
        seen.append((time.perf_counter() - sent) * 1000)
        answer.read()
        connection.close()
    return seen


def front_pid(server: Server) -> int:
    """The front's process."""
    for process in family(server.pid):
        if process.cmdline()[:1] == ["sglang_adapt::front"]:
            return process.pid
    raise RuntimeError("the server has no front")


class Subject:
    """A server that is measured, and what was measured of it.

    Args:
        name: of its figures.
        server: which runs.
        options: the command line.
    """

    def __init__(self, name: str, server: Server, options: argparse.Namespace) -> None:
        self.name = name
        self.rounds: list[dict] = []
        self.left_out: list[dict] = []
        self._server = server
        self._o = options
        self._rng = random.Random(0)
        sizes = (options.least, options.most)
        self._made = requests(f"127.0.0.1:{server.port}", sizes, options.own_targets, self._rng)
        ttfts(server.port, 3.0, options.accepted, self._rng)

    def measure(self) -> float:
        """One round: `fastest` (refusals only), `alone` and `beside` (TTFT without and with refusals).

        Returns what else took of the machine meanwhile, in cores.
        """
        o, port, pid = self._o, self._server.port, self._server.pid
        first, started, busy, own = cpu_s(pid), time.perf_counter(), busy_s(), time.process_time()
        fastest: dict = {}
        before = cpu_s(pid)
        with flooding(port, self._made, o.connections, 0.0, fastest):
            time.sleep(o.seconds)
        answered = sum(fastest["statuses"].values())
        fastest["cpu_us"] = {kind: round(spent / answered * 1e6, 1) for kind, spent in cpu_since(pid, before).items()}
        alone = ttfts(port, o.seconds, o.accepted, self._rng)
        paced: dict = {}
        before, began = cpu_s(pid), time.perf_counter()
        with flooding(port, self._made, o.connections, o.rate, paced):
            time.sleep(0.5)
            beside = ttfts(port, o.seconds, o.accepted, self._rng)
        now = time.perf_counter()
        paced["cpu_s"], paced["seconds"] = cpu_since(pid, before), round(now - began, 2)
        ours = sum(cpu_since(pid, first).values()) + time.process_time() - own
        ours += fastest["generator_cpu"] * o.seconds + paced["generator_cpu"] * (now - began)
        others = max(0.0, (busy_s() - busy - ours) / (now - started))
        found = {"fastest": fastest, "alone_ttft_ms": alone, "beside_ttft_ms": beside, "beside": paced}
        self.rounds.append({**found, "others_cpu": round(others, 3)})
        print(
            f"{self.name}: {fastest['rps']:,.0f} refusals/s {fastest['statuses']}, front "
            f"{fastest['cpu_us'].get('front')} us each; TTFT p50 {statistics.median(alone):.1f} ms alone, "
            f"{statistics.median(beside):.1f} beside {paced['rps']:,.0f}/s (p99 {paced['latency_ms_p99']} ms); "
            f"of a core: front {paced['cpu_s'].get('front', 0.0) / paced['seconds']:.2f}, "
            f"generator {paced['generator_cpu']:.2f}, what else ran {others:.2f}",
            flush=True,
        )
        return others

    def figures(self) -> dict:
        """Of all rounds."""
        alone = statistics.median([value for one in self.rounds for value in one["alone_ttft_ms"]])
        beside = statistics.median([value for one in self.rounds for value in one["beside_ttft_ms"]])
        return {
            "refusals_rps": max(one["fastest"]["rps"] for one in self.rounds),
            "ttft_ms_alone": round(alone, 2),
            "ttft_ms_beside": round(beside, 2),
            "ttft_ratio": round(beside / alone, 3),
            "beside_rps": [one["beside"]["rps"] for one in self.rounds],
            "rounds_left_out": len(self.left_out),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default: 3)")
    parser.add_argument("--rate", type=float, default=float(GOAL_RPS), help="refusals/s beside accepted requests")
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.0,
        metavar="S",
        help=f"wait up to S seconds in all for times in which other processes take less than {QUIET_CPU} of a core, "
        "and leave out rounds in which they took more (default: 0)",
    )
    parser.add_argument("--accepted", type=float, default=8.0, help="accepted requests/s (default: 8)")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--least", type=int, default=200, help="bytes of the shortest prompt (default: 200)")
    parser.add_argument("--most", type=int, default=4000, help="bytes of the longest prompt (default: 4000)")
    parser.add_argument("--own-targets", action="store_true", help="256 different targets, so that terms differ")
    parser.add_argument("--server-flags", default="", help="further flags of the server, as one string")
    parser.add_argument("--profile", type=Path, help="py-spy's profile of the front under refusals goes here")
    parser.add_argument("--name", default="now", help="of these figures in the result (default: now)")
    parser.add_argument("--other", type=Path, help="another checkout, whose server is measured by turns with this one")
    parser.add_argument("--other-name", default="before", help="of its figures (default: before)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_refusals.json")
    add_cpu_flags(parser)
    options = parser.parse_args()
    if options.other is not None and not (options.other / "python" / "sglang_adapt").is_dir():
        parser.error(f"--other: {options.other} has no python/sglang_adapt")
    cpus = chosen_cpus(parser, options)
    with on_cpus(cpus.client), contextlib.ExitStack() as stack:
        run(options, cpus, Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)


def run(options: argparse.Namespace, cpus: Cpus, folder: Path, stack: contextlib.ExitStack) -> None:
    """Start the servers, measure, and write the result.

    Args:
        folder: for files of this run.
        stack: ends the servers.
    """
    tiers = folder / "tiers.yaml"
    tiers.write_text(TIERS)
    flags = ["--adapt-virtual-gpus", "1", "--adapt-tp-sizes", "1", "--adapt-slo-config", str(tiers)]
    flags += options.server_flags.split()

    def server(name: str, variables: dict[str, str]) -> Server:
        log = folder / f"{len(list(folder.iterdir()))}.log"
        return stack.enter_context(Server(name, "sglang_adapt.launch_server", flags, log, variables, cpus=cpus.server))

    ours = server(options.name, {})
    if options.profile is not None:
        profile(ours, options)
        return
    subjects = [Subject(options.name, ours, options)]
    if options.other is not None:
        paths = [str(options.other / "python"), str(options.other / "sgl-kernel-ext" / "python")]
        variables = {"PYTHONPATH": os.pathsep.join(paths)}
        subjects.insert(0, Subject(options.other_name, server(options.other_name, variables), options))
    deadline = time.monotonic() + options.quiet
    for _ in range(options.rounds):
        for subject in subjects:
            wait_quiet(deadline)
            while subject.measure() > QUIET_CPU and time.monotonic() < deadline:
                subject.left_out.append(subject.rounds.pop())
                wait_quiet(deadline)
    store(subjects, cpus, options.out)


def wait_quiet(deadline: float) -> None:
    """Wait until all that runs takes little of the machine for two seconds, until `deadline` at most."""
    while time.monotonic() < deadline:
        began, busy = time.monotonic(), busy_s()
        time.sleep(2.0)
        if (busy_s() - busy) / (time.monotonic() - began) < QUIET_CPU:
            return


def store(subjects: Sequence[Subject], cpus: Cpus, out: Path) -> None:
    """Print the figures, and add them to a result."""
    known = json.loads(out.read_text()) if out.exists() else {}
    for subject in subjects:
        figures = subject.figures()
        print(f"{subject.name}: {figures}; goals: {GOAL_RPS}/s, ratio {GOAL_TTFT_RATIO}")
        rounds = [_short(one) for one in subject.rounds]
        pinned = {} if cpus.told() is None else {"cpus": cpus.told()}
        known[subject.name] = {**environment(), **pinned, **figures, "rounds": rounds}
    write_json(out, known)


def _short(one: dict) -> dict:
    """A round without its single times."""
    cut = {key: [percentile(one[key], percent) for percent in (50, 90, 99)] for key in one if key.endswith("_ms")}
    kept = {key: one[key] for key in ("fastest", "beside", "others_cpu")}
    return {**kept, **{f"{key}_p50_p90_p99": cut[key] for key in cut}}


def profile(server: Server, options: argparse.Namespace) -> None:
    """Where the front's time goes while it refuses as fast as it can, by py-spy."""
    rng = random.Random(0)
    made = requests(f"127.0.0.1:{server.port}", (options.least, options.most), options.own_targets, rng)
    spy = str(Path(sys.executable).with_name("py-spy"))
    command = [spy, "record", "-p", str(front_pid(server)), "-d", str(int(options.seconds)), "-r", "500"]
    with flooding(server.port, made, options.connections, 0.0, {}):
        subprocess.run([*command, "-f", "raw", "-o", str(options.profile)], check=True)


if __name__ == "__main__":
    main()
