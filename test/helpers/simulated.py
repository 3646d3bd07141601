"""One engine in simulated time behind the real router and admission, and the same engine as stock would run it.

The engine does what stock's scheduler does with our limits: prompts first, in parts of at most so many tokens, by class
and then by arrival; decode steps after each part while there is a limit. Goodput is judged as by `bench_goodput.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router_fakes import World, generate, token_output
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from sglang_adapt.core.messages import AdmitRequest, RequestReport
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, TpProfile
from sglang_adapt.core.slo import SloConfig, request_terms
from sglang_adapt.policy.limits import OPEN, STEPS, Bounds
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.admission import Admission
from sglang_adapt.upstream import wire

ENGINE = "tp2@0-1"
KEY = ProfileKey("m", "float32", "g", "0.5.17", "2.11.0", "torch_native")
_CHUNK = 2048
_SLOTS = 64


@dataclass(frozen=True)
class Speed:
    """Of an engine, in ms: a batch of prompts, and a token of it; a decode step, and a request in it.

    Of a batch of prompts it is busy for a part only; for the rest, `latency_ms`, prompts are on their way.
    """

    batch: float
    token: float
    step: float
    request: float

    def prefill_ms(self, tokens: int) -> float:
        return self.batch + self.token * tokens

    def decode_ms(self, requests: int) -> float:
        return self.step + self.request * requests

    @property
    def latency_ms(self) -> float:
        """As a profile says it: a prompt of one token beside a step of one request."""
        return max(0.0, self.prefill_ms(1) - self.decode_ms(1))

    def profile(self) -> Profile:
        """As it would be measured."""
        sizes = [(tokens, prefix) for tokens in (1, 64, 1024, 8192) for prefix in (0, 8192)]
        prefill = tuple(PrefillPoint(tokens, prefix, self.prefill_ms(tokens)) for tokens, prefix in sizes)
        decode = tuple(DecodePoint(batch, 1, self.decode_ms(batch)) for batch in (1, 2, 4, 8, 16, 32, 64))
        decode += (DecodePoint(1, 10**6, self.decode_ms(1)),)
        return Profile(KEY, tuple(TpProfile(tp, prefill, decode) for tp in (1, 2)))


@dataclass
class Arrival:
    """One request, and what becomes of it. Times in ms."""

    rid: str
    at: float
    tier: str
    prompt: int
    output: int
    unread: int = 0
    given: int = 0
    first: float | None = None
    last: float = 0.0
    priority: int = 0


def poisson(rate: float, seconds: float, tiers: Sequence[str], prompt: int, output: int, seed: int) -> list[Arrival]:
    """Arrivals at `rate` a second of tiers with equal shares; lengths between half and 1.5 times those given."""
    rng, at, made = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate) * 1000) < seconds * 1000:
        lengths = [max(2, round(length * rng.uniform(0.5, 1.5))) for length in (prompt, output)]
        made.append(Arrival(f"r{len(made)}", at, rng.choice(tiers), *lengths))
    return made


class _Tiered(World):
    def __init__(self, config: SloConfig, believed: Speed, clock: Callable[[], float]) -> None:
        settings = TierSettings(config, "test", KEY, (1, 2), 2, believed.profile(), ())
        names = {"tp1@0": 1, "tp1@1": 1, ENGINE: 2}
        self.reports: list[RequestReport] = []
        bounds = Bounds(1, _CHUNK, _SLOTS)
        self.admission = Admission(settings, names, {1: bounds, 2: bounds}, self.reports.append, clock)
        super().__init__(ENGINE, self.admission)


def run(
    config: SloConfig, arrivals: Sequence[Arrival], speed: Speed, *, stock: bool, believed: Speed | None = None
) -> dict[str, float]:
    """The share of requests, by tier and in `total`, that met both targets; refused ones have not.

    Args:
        config: the tiers.
        arrivals: in order of time; what becomes of them is written into them.
        speed: of the engine.
        stock: run all as they come.
        believed: what the router takes for its speed; None: as it is.
    """
    sim = _Simulation(config, arrivals, speed, stock, believed or speed)
    sim.run()
    return {name: sim.met(name) for name in [*(tier.name for tier in config.tiers), "total"]}


class _Simulation:
    def __init__(
        self, config: SloConfig, arrivals: Sequence[Arrival], speed: Speed, stock: bool, believed: Speed
    ) -> None:
        self.now = 0.0
        self._config = config
        self._arrivals = arrivals
        self._by_rid = {arrival.rid: arrival for arrival in arrivals}
        self._speed = speed
        self._stock = stock
        self.world = World(ENGINE) if stock else _Tiered(config, believed, lambda: self.now)
        self.world.warm()
        self.world.received[ENGINE].clear()
        self._coming: list[tuple[float, Arrival]] = []
        self._waiting: list[Arrival] = []
        self._running: list[Arrival] = []
        self._owed = 0
        self._limits = OPEN

    def run(self) -> None:
        coming = list(self._arrivals)[::-1]
        free_at, batch, timer = math.inf, None, 0.0
        end = self._arrivals[-1].at + 60_000
        while (
            coming or self._coming or self._waiting or self._running or self.world.router.in_flight
        ) and self.now < end:
            there_at = self._coming[0][0] if self._coming else math.inf
            self.now = min(coming[-1].at if coming else math.inf, free_at, timer, there_at)
            if batch is not None and self.now >= free_at:
                self._done(batch)
                free_at, batch = math.inf, None
            while coming and coming[-1].at <= self.now:
                self._arrive(coming.pop())
            if self.now >= timer:
                timer = self.now + 50
                self.world.router.let_go()
            self._take()
            if batch is None and (found := self._next()) is not None:
                batch, took = found
                free_at = self.now + took

    def _arrive(self, arrival: Arrival) -> None:
        world = self.world
        if isinstance(world, _Tiered):
            terms = request_terms(self._config, arrival.tier)
            number = int(arrival.rid[1:])
            asked = AdmitRequest(number, terms, arrival.prompt, arrival.output, self.now)
            if not world.admission.ask(asked, world.router.serving()).admitted:
                return
            world.router.on_front_message(wire.encode_ticket(arrival.rid, asked))
        request = generate(arrival.rid, arrival.prompt)
        # No two have a beginning in common.
        request.input_ids[0] = 1_000_000 + int(arrival.rid[1:])
        world.send(request)

    def _take(self) -> None:
        """What has been sent to the engine."""
        for data in self.world.received[ENGINE]:
            message = msgpack_decode(data)
            arrival = self._by_rid[message.rid]
            arrival.unread, arrival.priority = arrival.prompt, message.priority or 0
            self._coming.append((self.now + self._speed.latency_ms, arrival))
        self.world.received[ENGINE].clear()
        while self._coming and self._coming[0][0] <= self.now:
            self._waiting.append(self._coming.pop(0)[1])
        if isinstance(self.world, _Tiered):
            self._limits = self.world.admission.limits(self.world.engine(ENGINE))

    def _next(self) -> tuple[list[Arrival], float] | None:
        """The next batch, and how long it takes: prompts that are read by it, or all that decode."""
        limit = self._limits.prefill_tokens
        slots = min(_SLOTS, self._limits.requests or _SLOTS) - len(self._running)
        if limit is not None and self._owed and self._running:
            self._owed -= 1
        elif self._waiting and slots > 0:
            left = most = min(_CHUNK, limit or _CHUNK)
            read = []
            # One whose prompt has been begun goes on first.
            for arrival in sorted(self._waiting, key=lambda one: (one.unread == one.prompt, -one.priority, one.at)):
                if not left or len(read) >= slots:
                    break
                part = min(left, arrival.unread)
                arrival.unread -= part
                left -= part
                read.append(arrival)
            self._owed = min(STEPS, math.ceil(STEPS * (most - left) / most))
            return read, self._speed.prefill_ms(most - left) - self._speed.latency_ms
        if not self._running:
            return None
        return list(self._running), self._speed.decode_ms(len(self._running))

    def _done(self, batch: list[Arrival]) -> None:
        given = [arrival for arrival in batch if not arrival.unread]
        for arrival in given:
            if arrival in self._waiting:
                self._waiting.remove(arrival)
                self._running.append(arrival)
            arrival.given += 1
            arrival.first = self.now if arrival.first is None else arrival.first
            arrival.last = self.now
        if given:
            reasons = [{"type": "length", "length": 4} if one.given >= one.output else None for one in given]
            output = token_output([one.rid for one in given], reasons)
            output.completion_tokens = [one.given for one in given]
            self.world.router.on_engine_message(self.world.engine(ENGINE), msgpack_encode(output))
            self._running = [one for one in self._running if one.given < one.output]

    def met(self, tier: str) -> float:
        """The share of a tier's requests, or of all, that met both targets."""
        mine = [one for one in self._arrivals if tier in (one.tier, "total")]
        good = 0
        for one in mine:
            targets = self._config.tier(one.tier)
            if one.first is None or one.given < one.output:
                continue
            tpot = (one.last - one.first) / max(1, one.given - 1)
            good += one.first - one.at <= (targets.ttft_ms or math.inf) and tpot <= (targets.tpot_ms or math.inf)
        return good / max(1, len(mine))
