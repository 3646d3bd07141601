"""A long storm: random switches of layout, and kills, under mixed streams whose answers are all checked.

    python benchmark/storm.py --seconds 600                    # random layouts of four virtual GPUs every 0.3 s
    python benchmark/storm.py --seconds 600 --kill-every 5     # and a process of an engine killed every 5 s

Every answer is compared with that of the same request before the storm. Every request that is accepted must be
answered, and right. With kills one that comes while no engine of the layout is up may be turned away with a 503; those
are counted as "turned away". After each switch at rest the ledgers must add up. Without kills the server's memory must
not grow. When it has been told to end, no process, shared memory or folder of it may be left. Exit code 0 if all held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import psutil

import leftovers
from layouts import Layouts, SwitchFailedError, blocks_by_gpu
from server import Server, environment, write_json

LAYOUTS = (
    "tp1@0,tp1@1,tp1@2,tp1@3",
    "tp2@0-1,tp1@2,tp1@3",
    "tp1@0,tp1@1,tp2@2-3",
    "tp2@0-1,tp2@2-3",
    "tp4@0-3",
)
STRATEGIES = ("auto", "migrate", "migrate", "recompute", "keep")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_END_S = 180.0
"""How long requests may take to end when the storm is over."""
_NO_ENGINE = re.compile(r"no engine of layout \S+ is up")
"""What a request is told that comes when it cannot be accepted."""
_LOOK_S = 15.0
"""How often memory is looked at, and a line printed."""
_GROWTH = 0.05
"""By this part of it the memory of a server may grow from the second fifth of a storm to the last."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--every", type=float, default=0.3, help="seconds from one switch to the next")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="0: nothing is killed")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument(
        "--max-total-tokens", type=int, help="of the server: with few, requests are retracted, switches refused"
    )
    parser.add_argument("--cases", type=int, default=48, help="different requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/storm.json"))
    options = parser.parse_args()
    storm = Storm(options)
    result: dict[str, Any] = {**environment(), "verdict": "not finished"}
    flags = [
        *("--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "1,2,4", "--adapt-restart-limit", "1000000"),
        *("--chunked-prefill-size", "64", "--constrained-json-disable-any-whitespace"),
        "--incremental-streaming-output",
    ]
    if options.max_total_tokens is not None:
        flags += ["--max-total-tokens", str(options.max_total_tokens)]
    try:
        with tempfile.TemporaryDirectory() as temporary:
            log = options.log or Path(temporary) / "server.log"
            with Server("ours", "sglang_adapt.launch_server", flags, log) as server:
                before = leftovers.shared_memory()
                asyncio.run(storm.run(server))
                storm.note_left(leftovers.end(server, before))
    finally:
        result |= storm.report()
        print(
            json.dumps({key: result[key] for key in ("verdict", "answers", "switches", "ledgers", "kills")}, indent=1)
        )
        write_json(options.out, result)
    return 0 if result["verdict"] == "all held" else 1


@dataclass(frozen=True)
class Answer:
    """Token ids of each sample, rounded log probabilities, and the last finish reason."""

    ids: list[list[int]]
    logprobs: list[float]
    reason: str


class AnswerError(RuntimeError):
    """The server answered with an error; `status` is its HTTP status, 0 if unknown."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Counts:
    """What has happened so far."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    switches: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)
    ledgers: Counter[str] = field(default_factory=Counter)
    bad_ledgers: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Storm:
    """The storm over one server.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._o = options
        self._n = Counts()
        self._memory: list[dict[str, float]] = []
        self._left: list[str] | None = None
        self._asking = 0
        self._seconds = 0.0
        self._finished = False

    async def run(self, server: Server) -> None:
        self._url = server.url
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            self._session = session
            self._layouts = Layouts(session, server.url)
            await self._calm()
            self._total = blocks_by_gpu(await self._layouts.engines())
            began = perf_counter()
            self._stop_s = began + self._o.seconds
            looking = asyncio.create_task(self._look(server.pid, began))
            clients = [asyncio.create_task(self._client(number)) for number in range(self._o.streams)]
            others = [self._switcher(), *([self._killer()] if self._o.kill_every else [])]
            try:
                await asyncio.gather(*others)
                self._seconds = perf_counter() - began
                await self._end(clients)
            finally:
                for task in (*clients, looking):
                    task.cancel()
                await asyncio.gather(*clients, looking, return_exceptions=True)
            self._finished = True

    def note_left(self, left: list[str]) -> None:
        """What the server has left behind."""
        self._left = left

    async def _look(self, session: int, began: float) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            shared, private = await asyncio.to_thread(_memory_mb, session)
            seconds = round(perf_counter() - began)
            total = round(sum(private.values()), 1)
            self._memory.append({"second": seconds, "with shares": shared, "private": total, **private})
            n = self._n
            counts = f"{dict(n.answers)}, switches {dict(n.switches)}, ledgers {dict(n.ledgers)}"
            kills = sum(n.kills.values())
            print(
                f"{seconds} s: {counts}, {kills} kills, {self._asking} in flight, {total:.0f} MB private",
                [*n.faults, *n.bad_ledgers][-3:],
                flush=True,
            )

    async def _calm(self) -> None:
        """The answers before the storm; those to a request asked twice must be the same."""
        cases = _cases(self._o.cases, self._o.seed)
        gate = asyncio.Semaphore(8)

        async def ask(body: dict[str, Any]) -> Answer:
            async with gate:
                return await self._ask(body)

        answers = await asyncio.gather(*(ask(body) for body in cases))
        again = await asyncio.gather(*(ask(body) for body in cases[:8]))
        if [answer.ids for answer in again] != [answer.ids for answer in answers[:8]]:
            raise RuntimeError("the server gives different answers to the same request without a switch")
        self._cases = list(zip(cases, answers, strict=True))
        print(f"{len(cases)} requests answered before the storm", flush=True)

    async def _client(self, number: int) -> None:
        rng = random.Random(1000 * self._o.seed + number)
        while perf_counter() < self._stop_s:
            body, expected = rng.choice(self._cases)
            if body.get("stream") and rng.random() < 0.1:
                await self._leave(body, rng.randrange(1, 10))
                continue
            self._asking += 1
            try:
                got = await self._ask(body)
            except AnswerError as error:
                away = error.status == 503 and _NO_ENGINE.search(str(error)) is not None
                self._n.answers["turned away" if away else "503" if error.status == 503 else "errors"] += 1
                self._n.errors[str(error)[:160]] += 1
            except (aiohttp.ClientError, ValueError, KeyError) as error:
                self._n.answers["errors"] += 1
                self._n.errors[f"{type(error).__name__}: {error}"[:160]] += 1
            else:
                self._judge(body, expected, got)
            finally:
                self._asking -= 1

    def _judge(self, body: dict[str, Any], expected: Answer, got: Answer) -> None:
        near = len(got.logprobs) == len(expected.logprobs) and all(
            abs(a - b) < 1e-3 for a, b in zip(got.logprobs, expected.logprobs, strict=True)
        )
        if got.ids == expected.ids and got.reason == expected.reason and near:
            self._n.answers["right"] += 1
            return
        counts = sum(map(len, got.ids)), sum(map(len, expected.ids))
        fault = "repeated tokens" if counts[0] > counts[1] else "missing tokens" if counts[0] < counts[1] else "wrong"
        if got.ids == expected.ids:
            fault = "wrong log probabilities" if not near else "wrong finish reason"
        self._n.answers[fault] += 1
        if len(self._n.wrong) < 20:
            pairs = enumerate(zip(chain(*got.ids), chain(*expected.ids), strict=False))
            first = next((at for at, (a, b) in pairs if a != b), None)
            self._n.wrong.append(
                {"fault": fault, "first": first, "got": counts[0], "expected": counts[1], "reason": got.reason}
                | {"sampling": body["sampling_params"], "logprobs": [len(got.logprobs), len(expected.logprobs)]}
            )

    async def _leave(self, body: dict[str, Any], chunks: int) -> None:
        """A client that goes away after a few tokens."""
        try:
            async with self._session.post(f"{self._url}/generate", json=body) as response:
                for _ in range(2 * chunks):
                    await response.content.readline()
        except aiohttp.ClientError as error:
            self._n.errors[f"leaving: {type(error).__name__}: {error}"[:160]] += 1
        self._n.answers["left"] += 1

    async def _ask(self, body: dict[str, Any]) -> Answer:
        """One request to its end. Raises AnswerError, aiohttp.ClientError."""
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            if response.status != 200:
                raise AnswerError(f"HTTP {response.status}: {(await response.text())[:300]}", response.status)
            if not body.get("stream"):
                answer = await response.json()
                samples = answer if isinstance(answer, list) else [answer]
                return _answer([sample["output_ids"] for sample in samples], [s["meta_info"] for s in samples])
            ids: list[int] = []
            metas: list[dict[str, Any]] = []
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise AnswerError(str(chunk["error"]), chunk["error"].get("code", 0))
                ids += chunk["output_ids"]
                metas.append(chunk["meta_info"])
        return _answer([ids], metas)

    async def _switcher(self) -> None:
        rng = random.Random(self._o.seed)
        while (began := perf_counter()) < self._stop_s:
            layout, strategy = rng.choice(LAYOUTS), rng.choice(self._o.strategies)
            await self._switch(layout, strategy)
            await self._check_ledgers(f"after {layout} by {strategy}")
            await asyncio.sleep(max(0.0, began + self._o.every - perf_counter()))

    async def _switch(self, layout: str, strategy: str) -> bool:
        self._n.asking.append(self._asking)
        try:
            report = (await self._layouts.switch(layout, strategy)).report
        except SwitchFailedError as error:
            self._n.switches["refused"] += 1
            self._n.refusals[str(error)[-240:]] += 1
            if "HTTP 409" not in str(error):
                self._n.faults.append(str(error)[:300])
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            self._n.faults.append(f"switch to {layout} by {strategy}: {type(error).__name__}: {error}")
            return False
        self._n.switches[strategy if report["phases_ms"] else "to itself"] += 1
        self._n.requests.update(report["requests"])
        self._n.failures.update(failure[:160] for failure in report["failures"])
        if report["phases_ms"]:
            self._n.pauses.append(report["pause_ms"])
        return True

    async def _check_ledgers(self, when: str) -> None:
        """At rest the layout serves, ranks hold what ledgers say, and every block of a GPU is somebody's or free."""
        try:
            said, engines = await self._layouts.get(), await self._layouts.engines()
        except (SwitchFailedError, aiohttp.ClientError, TimeoutError) as error:
            self._n.faults.append(f"{when}: {type(error).__name__}: {error}")
            return
        if any(engine["state"] != "ready" for engine in engines.values()) or said["switching_to"]:
            self._n.ledgers["not at rest"] += 1
            return
        if self._o.kill_every and any("leased_blocks" not in engine for engine in said["engines"].values()):
            # It has died since the router was asked, or while it was.
            self._n.ledgers["not at rest"] += 1
            return
        blocks = blocks_by_gpu(engines)
        differ = {
            name: (engine.get("leased_blocks"), engines[name]["leased_blocks"])
            for name, engine in said["engines"].items()
            if engine.get("leased_blocks") != engines[name]["leased_blocks"]
        }
        if set(said["serving"]) != set(said["active"].split(",")):
            differ["layout"] = (",".join(said["serving"]), said["active"])
        adds_up = blocks == self._total if not said["kept"] else all(blocks[g] <= self._total[g] for g in blocks)
        if adds_up and not differ:
            self._n.ledgers["add up" if not said["kept"] else "add up, some kept"] += 1
        elif self._o.kill_every and (await self._layouts.engines()) != engines:
            self._n.ledgers["not at rest"] += 1
        else:
            self._n.ledgers["WRONG"] += 1
            self._n.bad_ledgers.append(f"{when}: {blocks} of {self._total}, ranks and ledgers {differ}")

    async def _killer(self) -> None:
        rng = random.Random(self._o.seed + 7)
        while perf_counter() < self._stop_s - 5:
            await asyncio.sleep(self._o.kill_every * rng.uniform(0.5, 1.5))
            try:
                engines = await self._layouts.engines()
            except (aiohttp.ClientError, TimeoutError) as error:
                self._n.faults.append(f"asking for engines: {type(error).__name__}: {error}")
                continue
            ready = [engine for engine in engines.values() if engine["state"] == "ready" and engine["pids"]]
            if ready:
                engine = rng.choice(ready)
                pid = rng.choice(engine["pids"])
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
                    self._n.kills[engine["name"]] += 1

    async def _end(self, clients: list[asyncio.Task[None]]) -> None:
        """Let kept requests go on, wait until all have ended, and look at what is left."""
        deadline = perf_counter() + _END_S
        while perf_counter() < deadline and not all(client.done() for client in clients):
            for layout in LAYOUTS:
                await self._switch(layout, "migrate")
            await asyncio.wait(clients, timeout=5)
        hung = sum(not client.done() for client in clients)
        if hung:
            self._n.faults.append(f"{hung} clients have no answer {_END_S:.0f} s after the storm")
        for client in clients:
            if client.done() and client.exception() is not None:
                self._n.faults.append(f"a client ended with {client.exception()!r}")
        while perf_counter() < deadline:
            engines = await self._layouts.engines()
            left = sum(engine["in_flight"] for engine in engines.values())
            if not left and all(engine["state"] == "ready" for engine in engines.values()):
                break
            await asyncio.sleep(0.2)
        else:
            self._n.faults.append(f"not at rest after the storm: {left} requests in flight, {engines}")
        await self._switch(LAYOUTS[0], "migrate")
        await self._check_ledgers("at the end")
        deaths = sum(engine["restarts"] for engine in (await self._layouts.engines()).values())
        if deaths > sum(self._n.kills.values()):
            self._n.faults.append(
                f"engines were started again {deaths} times, {sum(self._n.kills.values())} were killed"
            )

    def report(self) -> dict[str, Any]:
        """All figures, with the verdict."""
        n = self._n
        fine = ("right", "left", "turned away") if self._o.kill_every else ("right", "left")
        bad = sum(n.answers[kind] for kind in n.answers if kind not in fine)
        if not self._o.kill_every and (grown := _growth(self._memory)) > _GROWTH:
            n.faults.append(f"the server's memory grew by {100 * grown:.1f} %")
        if self._left:
            n.faults.append(f"left behind by the server: {self._left}")
        held = self._finished and not bad and not n.faults and not n.bad_ledgers and n.answers["right"] > 0
        held = held and self._left is not None
        pauses = sorted(n.pauses)
        return {
            "options": {name: str(value) for name, value in vars(self._o).items() if name not in ("log", "out")},
            "verdict": "all held" if held else "FAILED" if self._finished else "FAILED: not finished",
            "seconds": round(self._seconds, 1),
            "answers": dict(n.answers),
            "wrong": n.wrong,
            "errors": dict(n.errors.most_common(20)),
            "switches": dict(n.switches),
            "requests in switches": dict(n.requests),
            "refusals": dict(n.refusals.most_common(10)),
            "failures": dict(n.failures.most_common(10)),
            "pause_ms": {"p50": statistics.median(pauses), "p99": pauses[len(pauses) * 99 // 100]} if pauses else None,
            "ledgers": dict(n.ledgers),
            "bad ledgers": n.bad_ledgers[:20],
            "kills": dict(n.kills),
            "faults": n.faults[:20],
            "requests in flight at a switch": _spread(n.asking),
            "left behind": self._left,
            "memory_growth": round(_growth(self._memory), 4) if len(self._memory) >= 10 else None,
            "memory_mb": self._memory,
        }


def _cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of every kind, in turn."""
    rng = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for number in range(count):
        ids = [rng.randrange(10, 900) for _ in range(rng.choice((3, 20, 70, 300)))]
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": rng.choice((10, 40, 120)),
            "ignore_eos": True,
        }
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        match number % 8:
            case 0:
                body["return_logprob"] = True
            case 1:
                sampling |= {"n": 2}
                del body["stream"]
            case 2:
                sampling |= {"temperature": 0.9, "sampling_seed": number}
            case 3:
                sampling |= {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 96}
            case 4:
                sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
            case 5:
                sampling |= {"stop": ["e ", "an", ". "]}
        cases.append(body)
    return cases


def _answer(ids: list[list[int]], metas: list[dict[str, Any]]) -> Answer:
    reason = metas[-1]["finish_reason"] if metas else None
    if reason is None:
        raise AnswerError("a stream ended without a finish reason", 0)
    if reason["type"] == "abort":
        raise AnswerError(f"aborted: {reason}", int(reason.get("status_code") or 0))
    logprobs = [value for meta in metas for value, *_ in meta.get("output_token_logprobs") or []]
    return Answer(ids, logprobs, str(reason["type"]))


def _memory_mb(session: int) -> tuple[float, dict[str, float]]:
    """Memory of a server's processes in MB: all, shared memory divided among those that share it; and that which is
    private, by what the processes are called. What a process shares with the one it was forked from becomes private
    as either writes to it."""
    shares = 0
    private: Counter[str] = Counter()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                memory = process.memory_full_info()
                private[_title(" ".join(process.cmdline()))] += memory.uss
                shares += memory.pss
        except (ProcessLookupError, psutil.Error):
            continue
    return round(shares / 1e6, 1), {title: round(uss / 1e6, 1) for title, uss in sorted(private.items())}


def _title(command: str) -> str:
    first = command.split(" ")[0]
    return first if "::" in first else "launch_server"


def _growth(memory: Sequence[Mapping[str, float]]) -> float:
    """By which part the private memory of all processes has grown from the second fifth of the looks to the last; 0 if
    there are fewer than ten."""
    fifth = len(memory) // 5
    if fifth < 2:
        return 0.0
    totals = [look["private"] for look in memory]
    return statistics.fmean(totals[-fifth:]) / statistics.fmean(totals[fifth : 2 * fifth]) - 1.0


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"least": min(values), "p50": statistics.median(values), "most": max(values)}


if __name__ == "__main__":
    raise SystemExit(main())
