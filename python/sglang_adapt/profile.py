"""Measure how long prefill and decode take at each TP size: `python -m sglang_adapt.profile --output FILE`.

Asks a running server, which should have nothing else to do. For each TP size it goes over to the layout that has all
GPUs at that size, loads every engine alike, and times what a client sees, so that the figures hold the server's own
overhead. The layout that served before is restored. Works on virtual GPUs, too.

A server with `--adapt-sp 0` runs all batches of its wider engines sequence-parallel: what is measured there is added to
the profile in FILE, which was measured with `--adapt-sp off`. From both comes the threshold of `--adapt-sp auto`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sglang_adapt.core.digits import whole
from sglang_adapt.core.layout import uniform_layout
from sglang_adapt.core.profile import (
    DecodePoint,
    PrefillPoint,
    Profile,
    ProfileError,
    ProfileKey,
    SequenceProfile,
    TpProfile,
    profile_fault,
    read_profile,
    write_profile,
)
from sglang_adapt.core.urls import KEEP_ALIVE_S, server_url

_PREFILL = (16, 64, 250, 700, 1500, 3000, 6000, 16000)
"""Few of them round: engines have graphs for round sizes, which few prompts meet."""
_PREFIX = (0, 1024, 8192)
_BATCH = (1, 4, 16, 64, 128)
_CONTEXT = (64, 512, 4096)
_STEPS = 24
_WATCHED = 32
_BESIDE_STEPS = 400
_BESIDE_PROMPTS = 5
_BESIDE_TRIES = 10
_APART = 3
"""Times to a first token between two prompts beside a stream."""
_LEAST_MS = 0.01
"""What is less was not seen, or was less than chance."""
_TIMEOUT_S = 600.0


class ProfilingError(RuntimeError):
    """The server cannot be measured; the text says why."""


def prefill_sizes(longest: int, most: int) -> list[tuple[int, int]]:
    """(new tokens, cached tokens) to measure: those of the table that fit into a request.

    Args:
        longest: tokens of the longest request.
        most: new tokens at most.
    """
    return [
        (tokens, prefix)
        for prefix in _PREFIX
        for tokens in _PREFILL
        if tokens <= most and prefix + tokens + 2 <= longest
    ] or [(max(1, longest // 2), 0)]


def decode_sizes(longest: int, capacity: int, most_requests: int) -> list[tuple[int, int]]:
    """(requests, tokens of each when its prompt is read) to measure: those that an engine can hold.

    Args:
        longest: tokens of the longest request.
        capacity: tokens of KV that an engine holds.
        most_requests: that it runs at a time. One less is measured: while a prompt is read in parts, stock counts it
            twice, and the last request then waits until the others have ended.
    """
    most = max(1, most_requests - 1)
    return [
        (batch, context)
        for context in _CONTEXT
        for batch in sorted({min(batch, most) for batch in _BATCH})
        if context + 2 * _STEPS + 2 <= longest and batch * (context + 2 * _STEPS) <= capacity // 2
    ] or [(1, 1)]


def middle_step_ms(times: Sequence[Sequence[tuple[float, int]]]) -> float:
    """The mean time of a decode step while all streams decoded, in ms.

    Args:
        times: of each stream, (seconds, tokens that it has) of each chunk; at least two.

    Raises:
        NoOverlapError: the streams were not all decoding at the same time.
    """
    begin, end = max(stream[0][0] for stream in times), min(stream[-1][0] for stream in times)
    steps = []
    for stream in times:
        inside = [(at, tokens) for at, tokens in stream if begin <= at <= end]
        if len(inside) >= 2 and inside[-1][1] > inside[0][1]:
            steps.append((inside[-1][0] - inside[0][0]) * 1000 / (inside[-1][1] - inside[0][1]))
    if not steps:
        raise NoOverlapError(f"{len(times)} requests never decoded at the same time; is the server busy?")
    return statistics.median(steps)


def held_up_ms(streams: Sequence[Sequence[tuple[float, int]]], prompts: Sequence[float]) -> list[float]:
    """By how much each prompt holds up what decodes on its engine, in ms.

    Args:
        streams: one on each engine; of each, (seconds, tokens that it has) of each chunk.
        prompts: seconds when each was sent; each had its first token before the next one was sent.

    Returns:
        Of those prompts that were sent, as the one behind them, while all streams decoded; there may be none.
    """
    begin, end = max(stream[0][0] for stream in streams), min(stream[-1][0] for stream in streams)
    return [
        sum(_held_up_s(stream, sent, following) for stream in streams) * 1000
        for sent, following in itertools.pairwise(prompts)
        if begin <= sent and following <= end
    ]


def _held_up_s(stream: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """By how much later than with its usual steps the tokens of a stream came from one time to another."""
    steps = [
        (had_at, at, (at - had_at) / (tokens - had), tokens - had)
        for (had_at, had), (at, tokens) in itertools.pairwise(stream)
        if tokens > had and at > had_at
    ]
    usual = statistics.median(step for *_, step, _ in steps)
    return sum(
        max(0.0, min(at, end) - max(had_at, begin)) * (1 - usual * tokens / (at - had_at))
        for had_at, at, _, tokens in steps
    )


def watched(count: int) -> set[int]:
    """Which of `count` requests that decode together are streamed: the first, the last, and some between.

    Tokens of all of them would keep this process busier than the engines, and its own time would be in the figures:
    256 streams were seen with 15 ms a step, of engines that took 6.3.
    """
    most = min(count, _WATCHED)
    return {round(at * (count - 1) / max(1, most - 1)) for at in range(most)}


class NoOverlapError(ProfilingError):
    """Requests that were to decode together did not."""


class Server:
    """What is asked of the server.

    Args:
        session: with no limit on connections and the key in its headers.
        url: its address.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._rng = random.Random(seed)
        self.vocab = 100

    async def get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as answer:
            if answer.status != 200:
                raise ProfilingError(f"{self._url}{path} answers {answer.status}: {(await answer.text())[:300]}")
            return await answer.json()

    async def go_to(self, layout: str) -> None:
        async with self._session.post(f"{self._url}/adapt/layout", json={"layout": layout}) as answer:
            if answer.status != 200:
                raise ProfilingError(f"no way to layout {layout}: {(await answer.text())[:300]}")

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, self.vocab) for _ in range(tokens)]

    async def stream(
        self, prompt: list[int], output: int, *, each_token: bool = True
    ) -> tuple[float, list[tuple[float, int]]]:
        """(seconds when it was sent, (seconds, tokens) of each chunk); one chunk with all without `each_token`."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": output, "temperature": 0, "ignore_eos": True},
            "stream": each_token,
        }
        sent, chunks = time.perf_counter(), []
        async with self._session.post(f"{self._url}/generate", json=body) as answer:
            if answer.status != 200:
                raise ProfilingError(
                    f"a request of {len(prompt)} tokens: {answer.status}: {(await answer.text())[:300]}"
                )
            if not each_token:
                fields = await answer.json()
                return sent, [(time.perf_counter(), fields["meta_info"]["completion_tokens"])]
            async for line in answer.content:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    fields = json.loads(line[5:])
                    if "error" in fields:
                        raise ProfilingError(f"a request of {len(prompt)} tokens failed: {fields['error']}")
                    chunks.append((time.perf_counter(), fields["meta_info"]["completion_tokens"]))
        if not chunks:
            raise ProfilingError(f"a request of {len(prompt)} tokens gave no token")
        return sent, chunks

    async def prefill_ms(self, engines: int, tokens: int, prefix: int, repeats: int) -> float:
        """Time to the first token with nothing else to do; the median of some."""
        cached = self.prompt(prefix)
        if cached:
            await asyncio.gather(*(self.stream(cached, 1) for _ in range(engines)))
        seen = []
        for _ in range(repeats):
            sent, chunks = await self.stream(cached + self.prompt(tokens), 1)
            seen.append((chunks[0][0] - sent) * 1000)
        return statistics.median(seen)

    async def beside_ms(self, engines: int, tokens: int, longest: int) -> float:
        """By how much a prompt of `tokens` holds up a request that decodes on its engine; the median of some."""
        held_up: list[float] = []
        for _ in range(_BESIDE_TRIES):
            held_up += await self._held_up_ms(engines, tokens, max(2, min(_BESIDE_STEPS, longest - tokens - 2)))
            if len(held_up) >= _BESIDE_PROMPTS:
                return statistics.median(held_up)
        raise NoOverlapError(f"only {len(held_up)} prompts were read while {engines} requests decoded")

    async def _held_up_ms(self, engines: int, tokens: int, output: int) -> list[float]:
        streams = [asyncio.create_task(self.stream(self.prompt(tokens), output)) for _ in range(engines)]
        prompts: list[float] = []
        try:
            while not any(stream.done() for stream in streams):
                sent, chunks = await self.stream(self.prompt(tokens), 1)
                prompts.append(sent)
                # Between two there are steps that nothing holds up: by those the others are judged.
                await asyncio.sleep(_APART * (chunks[0][0] - sent))
            return held_up_ms([(await stream)[1] for stream in streams], prompts)
        finally:
            for stream in streams:
                stream.cancel()

    async def decode_ms(self, engines: int, batch: int, context: int, longest: int, capacity: int) -> float:
        """Time of a step of `batch` requests on every engine.

        The first requests may have ended before the last is read; then all give twice as many tokens, up to `longest`
        and as long as the `capacity` tokens of an engine hold them all.
        """
        output = _STEPS * 2
        while True:
            count = engines * batch
            seen = watched(count)
            sent = (self.stream(self.prompt(context), output, each_token=at in seen) for at in range(count))
            streams = await asyncio.gather(*sent)
            try:
                return middle_step_ms([streams[at][1] for at in sorted(seen)])
            except NoOverlapError:
                output *= 2
                if context + output + 2 > longest or batch * (context + output) > capacity:
                    raise


def sequence_sizes(said: dict[str, int], known: Profile | None, key: ProfileKey, output: Path) -> tuple[int, ...]:
    """TP sizes of which sequence-parallel batches are to be measured; none on a server that runs no batch so.

    Args:
        said: by TP size, tokens of a batch from which the server runs it so.
        known: the profile that they are added to.
        key: of the server.
        output: file of the profile.

    Raises:
        ProfilingError: some batches run one way and some the other, or there is no profile to add them to.
    """
    sizes = tuple(sorted(int(tp) for tp in said))
    if any(tokens > 1 for tokens in said.values()):
        raise ProfilingError(
            "some of its batches run sequence-parallel and some do not; start it with --adapt-sp off, and then with "
            "--adapt-sp 0"
        )
    if sizes and known is None:
        raise ProfilingError(
            f"all its batches run sequence-parallel, and there is no profile in {output} to add them to; measure with "
            "--adapt-sp off first"
        )
    fault = None if known is None or not sizes else profile_fault(known, key, sizes)
    if fault is not None:
        raise ProfilingError(f"what is measured cannot be added to {output}: {fault}")
    return sizes


def with_sequences(known: Profile, measured: Sequence[TpProfile], base_tp: int) -> Profile:
    """A profile with what was measured of sequence-parallel batches of some of its TP sizes.

    Args:
        known: the profile.
        measured: in place of tensor-parallel batches those.
        base_tp: the smallest TP size of the server, on whose shards of the weights they ran.
    """
    by_tp = {size.tp: SequenceProfile(size.prefill, size.decode, base_tp) for size in measured}
    return msgspec.structs.replace(
        known,
        sizes=tuple(msgspec.structs.replace(size, sequence=by_tp.get(size.tp, size.sequence)) for size in known.sizes),
    )


async def measure(url: str, api_key: str | None, longest: int | None, repeats: int, seed: int, output: Path) -> Profile:
    """Measure all TP sizes of the server at `url`, or those that run sequence-parallel.

    Args:
        url: the server.
        api_key: its admin key, or None.
        longest: prompts of at most so many tokens; None for what the server takes.
        repeats: of each prefill.
        seed: of the prompts.
        output: file of the profile; what is in it is kept if this adds to it.

    Raises:
        ProfilingError: it cannot be measured.
        ProfileError: what is in the file is no profile, and would be added to.
        aiohttp.ClientError: it does not answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S), timeout=timeout, headers=headers
    ) as session:
        server = Server(session, url.rstrip("/"), seed)
        said, info = await server.get("/adapt/slo"), await server.get("/server_info")
        key = msgspec.convert(said["profile_key"], ProfileKey)
        if said["config"] is not None:
            raise ProfilingError("this server has tiers, which would hold requests back; start it without them")
        known = read_profile(output) if said["sp_tokens"] and output.exists() else None
        sequences = sequence_sizes(said["sp_tokens"], known, key, output)
        capacity = int(info["max_total_num_tokens"])
        running = int(info.get("max_running_requests") or 4096)
        before = (await server.get("/adapt/engines"))["layout"]
        sizes = []
        try:
            for tp in sequences or said["tp_sizes"]:
                engines = said["gpus"] // tp
                if len(said["tp_sizes"]) > 1:
                    await server.go_to(str(uniform_layout(tp, said["gpus"])))
                # The longest request is another one in each layout.
                request = int((await server.get("/server_info"))["max_req_input_len"])
                limit = request if longest is None else min(longest, request)
                await server.decode_ms(engines, 1, 1, request, capacity)
                sizes.append(await _measure_size(server, tp, engines, limit, request, capacity, running, repeats))
        finally:
            if len(said["tp_sizes"]) > 1:
                await server.go_to(before)
        return Profile(key, tuple(sizes)) if known is None else with_sequences(known, sizes, min(said["tp_sizes"]))


async def _measure_size(
    server: Server, tp: int, engines: int, limit: int, longest: int, capacity: int, running: int, repeats: int
) -> TpProfile:
    prefill, decode = [], []
    sizes = prefill_sizes(limit, limit)
    for tokens, prefix in sizes:
        ms = await server.prefill_ms(engines, tokens, prefix, repeats)
        prefill.append(PrefillPoint(tokens, prefix, round(ms, 4)))
        print(f"TP {tp}: prefill of {tokens} tokens behind {prefix}: {ms:.2f} ms", flush=True)
    for batch, context in decode_sizes(limit, capacity, running):
        ms = await server.decode_ms(engines, batch, context, longest, capacity)
        decode.append(DecodePoint(batch, batch * (context + _STEPS), round(ms, 4)))
        print(f"TP {tp}: decode step of {batch} requests with {context} tokens each: {ms:.2f} ms", flush=True)
    smallest = sizes[0][0]
    beside = max(_LEAST_MS, round(await server.beside_ms(engines, smallest, longest), 4))
    print(f"TP {tp}: a prompt of {smallest} tokens holds up what decodes beside it by {beside:.2f} ms", flush=True)
    return TpProfile(tp, tuple(prefill), tuple(decode), beside_ms=beside)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the profile was written, 1 if the server cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adapt.profile", description=__doc__)
    parser.add_argument(
        "--url", type=server_url, default="http://127.0.0.1:30000", help="the server (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument("--output", type=Path, required=True, help="where the profile is written, as JSON")
    parser.add_argument(
        "--longest", type=whole, metavar="TOKENS", help="longest prompt (default: what the server takes)"
    )
    parser.add_argument("--repeats", type=whole, default=5, help="times that each prefill is measured (default: 5)")
    parser.add_argument("--seed", type=whole, default=0, help="of the prompts (default: 0)")
    options = parser.parse_args(argv)
    if options.repeats < 1 or (options.longest is not None and options.longest < 4):
        parser.error("--repeats is at least 1 and --longest at least 4")
    if not options.output.parent.is_dir():
        # Not only once all is measured.
        parser.error(f"--output {options.output}: there is no folder {options.output.parent}; make it first")
    try:
        profile = asyncio.run(
            measure(options.url, options.api_key, options.longest, options.repeats, options.seed, options.output)
        )
        write_profile(options.output, profile)
    except (ProfilingError, ProfileError, aiohttp.ClientError, TimeoutError, OSError) as error:
        print(f"error: {options.url} cannot be measured: {error}", file=sys.stderr)
        return 1
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
