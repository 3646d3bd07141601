"""One engine in simulated time: iterations of prompts and of decode steps, as a stock scheduler with our limits.

Prompts go first, in parts of at most a chunk, by class and then by arrival; while there is a limit, decode steps follow
each part (`upstream/limits.py`). Several decode steps in which nothing changes are one event (`MOST_STEPS`); a request
that comes meanwhile cuts the event short at the end of the step in flight.

Simpler than stock: there is no prefix cache; a request takes the KV of its prompt and whole output when it begins, so
none is ever retracted; pages are not rounded; background work is not preempted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.policy.limits import OPEN, STEPS, Bounds, Limits
from sglang_adapt.policy.profile import Times
from sglang_adapt.simulate.load import Arrival

MOST_STEPS = 16
"""Decode steps in one event. Their time is that of the middle one, and what the router knows of lengths is as old."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what becomes of it. Times in ms.

    Attributes:
        number: in order of arrival; `rid` is its id for the router.
        rank: order among those that wait; the higher the sooner.
        unread: tokens to be computed before its next token.
        read: tokens that have KV, of those that were to be computed.
        joined: step of its engine at which it had `given` tokens.
        refused: it was turned away.
    """

    number: int
    rid: str
    arrival: Arrival
    rank: int = 0
    unread: int = 0
    read: int = 0
    given: int = 0
    joined: int = 0
    first_ms: float = math.nan
    last_ms: float = math.nan
    refused: bool = False

    @property
    def done(self) -> bool:
        return self.given >= self.arrival.output


@dataclass(slots=True)
class _Batch:
    """What an engine does: prompts (`read`, with the tokens of each), or `steps` decode steps of `step_ms`; or nothing,
    until a request comes that is on its way."""

    began_ms: float
    ends_ms: float
    read: tuple[tuple[Request, int], ...] = ()
    steps: int = 0
    step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a batch has brought: tokens beside first ones, requests that have their first token now, and that ended."""

    tokens: int
    first: tuple[Request, ...]
    ended: tuple[Request, ...]


class SimulatedEngine:
    """See the module. The caller asks for `due_ms` after each call, and calls `finish` at that time.

    Args:
        spec: its GPUs.
        times: how fast it is.
        bounds: of its iterations.
        kv_tokens: that it holds.
    """

    def __init__(self, spec: EngineSpec, times: Times, bounds: Bounds, kv_tokens: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.times = times
        self.bounds = bounds
        self.kv_tokens = kv_tokens
        self.limits: Limits = OPEN
        self.requests: dict[int, Request] = {}
        self.batch: _Batch | None = None
        self.paused = False
        self._coming: deque[tuple[float, Request]] = deque()
        self._waiting: list[tuple[int, float, int, Request]] = []
        self._begun: Request | None = None
        self._ends: list[tuple[int, int, Request]] = []
        self._context = 0
        self._reserved = 0
        self._step = 0
        self._owed = 0
        self._expected: set[int] = set()

    @property
    def due_ms(self) -> float:
        """When the batch ends; infinite if there is none."""
        return math.inf if self.batch is None else self.batch.ends_ms

    @property
    def context(self) -> int:
        """Tokens of KV that it has: of what decodes, and of a prompt that is half read."""
        return self._context + (0 if self._begun is None else self._begun.read)

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that nobody has or will have."""
        return self.kv_tokens - self._reserved

    @property
    def next_to_end(self) -> tuple[Request, int] | None:
        """Of what decodes the request that ends first, and the tokens that it has given; None if nothing does."""
        if not self._ends:
            return None
        request = self._ends[0][2]
        return request, request.given + self._step - request.joined

    def add(self, request: Request, now_ms: float) -> None:
        """A request has been sent here; `unread` of it is to be computed, after the latency of a first token."""
        self.requests[request.number] = request
        if request.given:
            self._queue(request)
        else:
            self._coming.append((now_ms + self.times.latency_ms, request))
        self._cut(now_ms)
        self.start(now_ms)

    def expect(self, request: Request) -> None:
        """Keep room for a request that is on its way here; `resume` comes for each."""
        self._expected.add(request.number)
        self._reserved += request.arrival.prompt + request.arrival.output

    def hand_over(self, request: Request) -> None:
        """A request that decodes here leaves, with its KV, between two batches."""
        assert self.batch is None
        request.given += self._step - request.joined
        self._context -= request.arrival.prompt + request.given
        self._ends = [entry for entry in self._ends if entry[2] is not request]
        heapify(self._ends)
        self._forget(request)

    def resume(self, request: Request, now_ms: float) -> None:
        """A request goes on here, its KV is there already."""
        self.requests[request.number] = request
        if request.number in self._expected:
            self._expected.remove(request.number)
        else:
            self._reserved += request.arrival.prompt + request.arrival.output
        self._join(request)
        self._cut(now_ms)
        self.start(now_ms)

    def start(self, now_ms: float) -> None:
        """Begin the next batch, if there is none, and there is something to do."""
        if self.batch is not None or self.paused:
            return
        while self._coming and self._coming[0][0] <= now_ms:
            self._queue(self._coming.popleft()[1])
        limit, running = self.limits.prefill_tokens, len(self._ends)
        if limit is not None and self._owed and running:
            self._decode(now_ms, self._owed)
            return
        read = self._prompts()
        if read:
            most = min(self.bounds.prefill_tokens, limit or self.bounds.prefill_tokens)
            tokens = sum(part for _, part in read)
            took = self.batch_ms(read)
            self._owed = min(STEPS, math.ceil(STEPS * tokens / most)) if limit is not None else 0
            self.batch = _Batch(now_ms, now_ms + took, read=read)
        elif running:
            self._decode(now_ms, MOST_STEPS)
        elif self._coming:
            self.batch = _Batch(now_ms, self._coming[0][0])

    def finish(self) -> Progress:
        """The batch has ended, which is `due_ms`."""
        batch = self.batch
        assert batch is not None
        self.batch = None
        return self._stepped(batch) if batch.steps else self._read(batch)

    def pause(self, now_ms: float) -> float:
        """Do nothing after the batch in flight; returns when that ends."""
        self.paused = True
        self._cut(now_ms)
        return max(now_ms, self.due_ms) if self.batch is not None else now_ms

    def leave(self) -> list[Request]:
        """All requests leave, in order of arrival; those that had KV have it in `read`, what has none has 0."""
        assert self.batch is None
        for _, _, request in self._ends:
            request.given += self._step - request.joined
            request.read, request.unread = request.arrival.prompt + request.given, 0
        left = sorted(self.requests.values(), key=lambda one: one.number)
        self.requests.clear()
        self._coming.clear()
        self._waiting.clear()
        self._ends.clear()
        self._begun, self._context, self._reserved, self._owed = None, 0, 0, 0
        return left

    # Prompts.

    def batch_ms(self, read: tuple[tuple[Request, int], ...]) -> float:
        """The time of prompts, or parts, that are read together: each attends to itself alone; what a batch takes
        however small it is they share. One prompt of all their tokens takes no less, and as a batch of that size it
        may be read in another way (`policy.sequence`)."""
        shared = (len(read) - 1) * self.times.prefill_ms(1)
        alone = [self.times.prefill_ms(part, request.read) for request, part in read]
        together = sum(part for _, part in read)
        as_one = self.times.prefill_ms(together, max(request.read for request, _ in read))
        return max(max(alone), min(sum(alone) - shared, as_one))

    def _queue(self, request: Request) -> None:
        heappush(self._waiting, (-request.rank, request.arrival.at_ms, request.number, request))

    def _prompts(self) -> tuple[tuple[Request, int], ...]:
        """What of which prompts is read next: the one that has been begun, then by class and arrival."""
        if self._begun is None and not self._waiting:
            return ()
        left = min(self.bounds.prefill_tokens, self.limits.prefill_tokens or self.bounds.prefill_tokens)
        slots = min(self.bounds.requests, self.limits.requests or self.bounds.requests) - len(self._ends)
        read: list[tuple[Request, int]] = []
        if self._begun is not None:
            request = self._begun
            part = min(left, request.unread)
            read.append((request, part))
            left -= part
        while left and self._waiting and len(read) < slots:
            request = self._waiting[0][3]
            held = request.arrival.prompt + request.arrival.output
            if held > self.free_tokens:
                break
            heappop(self._waiting)
            self._reserved += held
            part = min(left, request.unread)
            read.append((request, part))
            left -= part
        return tuple(read)

    def _read(self, batch: _Batch) -> Progress:
        self._begun = None
        first, ended, again = [], [], 0
        for request, part in batch.read:
            request.read += part
            request.unread -= part
            if request.unread:
                self._begun = request
                continue
            if not request.given:
                request.first_ms = batch.ends_ms
                first.append(request)
            else:
                again += 1
            request.given += 1
            request.last_ms = batch.ends_ms
            if request.done:
                ended.append(request)
                self._forget(request)
            else:
                self._join(request)
        return Progress(again, tuple(first), tuple(ended))

    # Decode steps.

    def _join(self, request: Request) -> None:
        """A request decodes from the next step on."""
        request.joined = self._step
        heappush(self._ends, (self._step + request.arrival.output - request.given, request.number, request))
        self._context += request.arrival.prompt + request.given

    def _decode(self, now_ms: float, most: int) -> None:
        running = len(self._ends)
        steps = min(most, self._ends[0][0] - self._step)
        step_ms = self.times.decode_ms(running, self._context + running * (steps - 1) / 2)
        if self._coming:
            steps = min(steps, max(1, math.ceil((self._coming[0][0] - now_ms) / step_ms)))
        self.batch = _Batch(now_ms, now_ms + steps * step_ms, steps=steps, step_ms=step_ms)

    def _stepped(self, batch: _Batch) -> Progress:
        self._step += batch.steps
        if self._owed:
            self._owed = max(0, self._owed - batch.steps)
        tokens = batch.steps * len(self._ends)
        self._context += tokens
        ended = []
        while self._ends and self._ends[0][0] <= self._step:
            request = heappop(self._ends)[2]
            request.given = request.arrival.output
            request.last_ms = batch.ends_ms
            self._context -= request.arrival.prompt + request.given
            ended.append(request)
            self._forget(request)
        return Progress(tokens, (), tuple(ended))

    def _cut(self, now_ms: float) -> None:
        """Let decode steps end with the one in flight, and what is nothing at once."""
        batch = self.batch
        if batch is not None and not batch.steps and not batch.read:
            self.batch = batch = None
        if batch is None or batch.steps <= 1:
            return
        steps = min(batch.steps, max(1, math.ceil((now_ms - batch.began_ms) / batch.step_ms)))
        batch.steps, batch.ends_ms = steps, batch.began_ms + steps * batch.step_ms

    def _forget(self, request: Request) -> None:
        del self.requests[request.number]
        self._reserved -= request.arrival.prompt + request.arrival.output
