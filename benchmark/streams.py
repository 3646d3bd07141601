"""A number of streams that are always decoding, with the time of each token at the client.

Works on stock sglang and on sglang_adapt: `/generate` with `input_ids` and `ignore_eos`. Start the server with
`--incremental-streaming-output`; otherwise every chunk repeats all that came before it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from types import TracebackType

import aiohttp

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_RETRY_S = 0.1
_POLL_S = 0.005


@dataclass
class Stream:
    """One of them, and the request that it is at.

    Attributes:
        request: number of the request; -1 before the first.
        tokens: that the request has given.
        times: when tokens came, as (request, seconds by perf_counter); of chunks with several, one entry.
    """

    request: int = -1
    tokens: int = 0
    times: list[tuple[int, float]] = field(default_factory=list)


class Streams:
    """A context manager that runs `count` streams, each of which begins a new request when one has ended.

    Args:
        session: with no limit on connections.
        url: of the server.
        count: streams.
        input_tokens, output_tokens: of each request.
        vocab: token ids are drawn below this.
        seed: of the prompts, all of which differ.

    Attributes:
        tokens: given by all streams since the start.
        ended: requests that have given all their tokens.
        errors: what went wrong with requests, the first of each kind with its count.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        count: int,
        input_tokens: int,
        output_tokens: int,
        vocab: int,
        seed: int = 0,
    ) -> None:
        self._session = session
        self._url = f"{url}/generate"
        self._shape = input_tokens, output_tokens
        self._vocab = vocab
        self._rng = random.Random(seed)
        self._streams = [Stream() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.tokens = 0
        self.ended = 0
        self.errors: dict[str, int] = {}

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._run(stream)) for stream in self._streams]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closing the connections aborts the requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def decoding(self, left: int, timeout_s: float) -> None:
        """Wait until every stream has given a token just now and has at least `left` to give.

        Raises:
            TimeoutError: with how many have not.
        """
        since = perf_counter()
        most = self._shape[1] - left
        await self._until(lambda s: 0 < s.tokens <= most and bool(s.times) and s.times[-1][1] > since, timeout_s)

    async def past(self, time_s: float, timeout_s: float) -> None:
        """Wait until every stream has given a token after a time. Raises TimeoutError."""
        await self._until(lambda s: bool(s.times) and s.times[-1][1] > time_s, timeout_s)

    def forget(self) -> None:
        """Forget the times of all tokens but the last of each stream."""
        for stream in self._streams:
            del stream.times[:-1]

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Of each stream, the longest time between two tokens of one request that overlaps a span of time."""
        gaps = []
        for stream in self._streams:
            spans = [
                1e3 * (after - before)
                for (request, before), (other, after) in pairwise(stream.times)
                if request == other and after >= begin_s and before <= end_s
            ]
            if spans:
                gaps.append(max(spans))
        return gaps

    def steps_ms(self) -> list[float]:
        """Of all streams, the times between two tokens of one request."""
        return [
            1e3 * (after - before)
            for stream in self._streams
            for (request, before), (other, after) in pairwise(stream.times)
            if request == other
        ]

    async def _until(self, there: Callable[[Stream], bool], timeout_s: float) -> None:
        deadline = perf_counter() + timeout_s
        while missing := sum(not there(stream) for stream in self._streams):
            if perf_counter() > deadline:
                raise TimeoutError(
                    f"{missing} of {len(self._streams)} streams do not decode after {timeout_s:.0f} s; "
                    f"errors so far: {self.errors or 'none'}"
                )
            await asyncio.sleep(_POLL_S)

    async def _run(self, stream: Stream) -> None:
        while True:
            stream.request += 1
            stream.tokens = 0
            try:
                error = await self._one(stream)
            except (aiohttp.ClientError, TimeoutError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            if error is None:
                self.ended += 1
            else:
                self.errors[error] = self.errors.get(error, 0) + 1
                await asyncio.sleep(_RETRY_S)

    async def _one(self, stream: Stream) -> str | None:
        """One request to its end; returns its error."""
        prompt = [self._rng.randrange(10, self._vocab) for _ in range(self._shape[0])]
        sampling = {"max_new_tokens": self._shape[1], "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {(await response.text())[:160]}"
            async for line in response.content:
                found = _TOKENS.search(line)
                if found is None:
                    if line.startswith(b"data: {"):
                        return line.decode()[:160]
                    continue
                count = int(found[1])
                if count > stream.tokens:
                    stream.times.append((stream.request, perf_counter()))
                    self.tokens += count - stream.tokens
                    stream.tokens = count
        if stream.tokens < self._shape[1]:
            return f"ended after {stream.tokens} tokens"
        return None
