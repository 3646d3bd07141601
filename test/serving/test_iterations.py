"""Engines under limits: prompts are read in parts between decode steps, background work gives way, outputs stay."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import Server
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, TpProfile, write_profile
from sglang_adapt.front.settings import make_settings

pytestmark = pytest.mark.engine

# With a second for a token of a prompt, steps of 5 s and 25 s between tokens, 64 tokens of prompts go with four steps
# (256 once it has been learned that they take less, which is believed up to a factor of 4). Steps are so long that a
# prompt which is not cut would break the target of those that run beside it.
TIERS = """\
default: strict
tiers:
  - {name: strict, ttft_ms: 3600000, tpot_ms: 25000}
  - {name: night, background: true}
"""
MOST_PART = 4 * 96
SLOTS = 3
STREAM = 600
"""Tokens of a stream: they last until what comes beside them has been read. Ten come at a time, so that the client
keeps up with four streams on a busy machine."""
LONG = [10 + number % 200 for number in range(1500)]


@pytest.fixture(scope="module", params=[pytest.param("tp1@0,tp1@1", marks=pytest.mark.full), "tp2@0-1"])
def limited(
    request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    config, profile = folder / "tiers.yaml", folder / "profile.json"
    config.write_text(TIERS)
    gpus = ["--adapt-virtual-gpus", "2", "--max-running-requests", str(SLOTS), "--stream-interval", "10"]
    key = make_settings(gpus, "/nowhere", "forkserver").tiers.key
    prefill = (PrefillPoint(1, 0, 1000.0), PrefillPoint(1000, 0, 1e6))
    decode = tuple(DecodePoint(batch, context, 5000.0) for batch in (1, 8) for context in (1, 8192))
    sizes = tuple(TpProfile(tp, prefill, decode) for tp in (1, 2))
    write_profile(profile, Profile(key, sizes))
    flags = ["--adapt-slo-config", str(config), "--adapt-profile", str(profile), "--adapt-layout", request.param]
    server = start("limited", *gpus, *flags)
    yield server
    server.stop()


def ask(server: Server, prompt: list[int], tokens: int, tier: str) -> list[int]:
    """Its output."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    answer = httpx.post(f"{server.url}/generate", json=body, headers={"x-adapt-tier": tier}, timeout=300)
    assert answer.status_code == 200, answer.text
    output: list[int] = answer.json()["output_ids"]
    return output


def at_once(server: Server, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Outputs of requests that are asked together, in the background's tier."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, tokens, "night"), prompts))


class Stream:
    """A request whose tokens are counted as they come."""

    def __init__(self, server: Server, prompt: list[int], tokens: int, tier: str) -> None:
        self._server, self._tier = server, tier
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self._body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        self.output: list[int] = []
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        headers = {"x-adapt-tier": self._tier}
        url = f"{self._server.url}/generate"
        with httpx.stream("POST", url, json=self._body, headers=headers, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.output = json.loads(line[6:])["output_ids"]
                    self.first.set()

    def started(self) -> Stream:
        assert self.first.wait(120)
        return self

    def end(self) -> list[int]:
        self._thread.join(300)
        return self.output


def parts(log: Path, since: int) -> list[int]:
    """New tokens of each batch of prompts in a server's log."""
    return [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", log.read_text()[since:])]


def test_tokens_go_on_while_a_long_prompt_is_read(limited: Server) -> None:
    prompt, others = [7, 8, 9], [11, 12]
    wanted = [*at_once(limited, [prompt, others], STREAM), ask(limited, LONG, 4, "night")]
    assert max(parts(limited.log, 0)) > MOST_PART
    httpx.post(f"{limited.url}/flush_cache", timeout=180)
    # More streams than one engine has places: none of several is idle, where a prompt would be read whole, rightly.
    count = SLOTS + 1 if "tp1@0,tp1@1" in limited.flags else SLOTS - 1
    starts = [(prompt, others)[number % 2] for number in range(count)]
    streams = [Stream(limited, start, STREAM, "strict").started() for start in starts]
    since = len(limited.log.read_text())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, limited, LONG, 4, "strict")
        assert [stream.end() for stream in streams] == [wanted[number % 2] for number in range(count)]
        assert long.result() == wanted[2]
    sizes = parts(limited.log, since)
    assert sum(sizes) >= len(LONG) - 1 and max(sizes) <= MOST_PART, sizes


def test_background_work_gives_way_and_goes_on(limited: Server) -> None:
    """All slots of all engines run background work; what was promised goes ahead, and nothing is lost."""
    prompts = [[20 + number, 30, 40] for number in range(2 * SLOTS)]
    wanted = at_once(limited, prompts, 400)
    short = ask(limited, [5, 6], 4, "night")
    streams = [Stream(limited, prompt, 400, "night") for prompt in prompts]
    for stream in streams[:SLOTS]:
        # Two engines have all of them, one has as many as it runs.
        stream.started()
    assert ask(limited, [5, 6], 4, "strict") == short
    assert any(len(stream.output) < 400 for stream in streams)
    assert [stream.end() for stream in streams] == wanted
