"""Replay a trace with its own arrival times against an OpenAI-compatible server, through the OpenAI client.

    python benchmark/replay_trace.py --requests 200 --divide 16                # starts the demo server itself
    python benchmark/replay_trace.py --url http://127.0.0.1:30000 --requests 200

Prompts are random token ids of the trace's lengths. Prints how many requests completed and their TTFT, TPOT and
latency; exits with 1 if one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

import openai

from load import Request, Timing, read_trace, summarize
from server import Server, environment, write_json

TRACE = Path(__file__).parent / "traces" / "azure_code_2023.csv"


async def replay(url: str, requests: list[Request], vocab: int) -> tuple[list[Timing], float]:
    """Send every request at its arrival time; returns the timings and the seconds until the last answer."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, vocab) for _ in range(request.input_tokens)] for request in requests]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        start = time.perf_counter()

        async def one(request: Request, prompt: list[int]) -> Timing:
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
            return await complete(client, request, prompt)

        timings = await asyncio.gather(*(one(r, p) for r, p in zip(requests, prompts, strict=True)))
        return list(timings), time.perf_counter() - start


async def complete(client: openai.AsyncOpenAI, request: Request, prompt: list[int]) -> Timing:
    sent = time.perf_counter()
    first = last = None
    tokens = 0
    try:
        stream = await client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=request.output_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            if chunk.choices:
                last = time.perf_counter()
                first = first or last
    except openai.APIError as error:
        return Timing(None, None, (time.perf_counter() - sent) * 1000, tokens, str(error))
    latency = (time.perf_counter() - sent) * 1000
    if first is None or last is None or tokens != request.output_tokens:
        return Timing(None, None, latency, tokens, f"{tokens} tokens of {request.output_tokens}")
    tpot = (last - first) * 1000 / (tokens - 1) if tokens > 1 else None
    return Timing((first - sent) * 1000, tpot, latency, tokens, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="server to use (default: start the demo server)")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--divide", type=int, default=16, help="divide prompt and output lengths by this")
    parser.add_argument("--vocab", type=int, default=500, help="token ids are drawn below this")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.requests, options.divide)
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
            url = stack.enter_context(Server("demo", "sglang_adapt.launch_server", [], log)).url
        timings, seconds = asyncio.run(replay(url, requests, options.vocab))
    summary = summarize(timings, seconds)
    print(summary)
    for error in sorted({timing.error for timing in timings if timing.error}):
        print(f"error: {error}")
    if options.out:
        write_json(options.out, {**environment(), "trace": options.trace.name, "summary": summary})
    print(f"{summary['completed']} of {summary['sent']} complete")
    return 0 if summary["completed"] == summary["sent"] else 1


if __name__ == "__main__":
    sys.exit(main())
