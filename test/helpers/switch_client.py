"""A client for tests of switches: requests of every kind, their answers, and what ledgers must add up to."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

from server import Server

LIMIT_S = 180.0
"""What a request or a condition may take at most: on a machine that is busy with other tests, too."""
HTTP = httpx.Client(
    verify=False, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
"""One for all: making one takes longer than a request. No connection is used twice: where threads share a client, one
may close a connection as idle for too long that another has just been given."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Answer:
    """What a client got: token ids and log probabilities of each sample, and the last finish reason."""

    ids: list[list[int]]
    logprobs: list[float]
    reason: str

    def equals(self, other: Answer) -> bool:
        """The same tokens, and log probabilities as near as engines of different TP sizes come."""
        near = len(self.logprobs) == len(other.logprobs) and all(
            abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )
        return near and (self.ids, self.reason) == (other.ids, other.reason)


class RequestError(RuntimeError):
    """The server answered with an error."""


def prompt(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 900) for _ in range(count)]


def bodies(tokens: int) -> dict[str, dict[str, Any]]:
    """A request of each kind, of about `tokens` output tokens."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    talk = "Once upon a time there was a small village by the sea, where"
    return {
        "plain": {"text": talk, "sampling_params": greedy, "stream": True},
        "whole": {"text": "The quick brown fox", "sampling_params": greedy},
        "long": {"input_ids": prompt(300, 1), "sampling_params": greedy, "stream": True},
        "logprobs": {
            "input_ids": prompt(20, 2),
            "sampling_params": greedy,
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": True,
        },
        "two": {"input_ids": prompt(17, 3), "sampling_params": {**greedy, "n": 2}},
        "json": {
            "text": "A person:",
            "sampling_params": {"temperature": 0, "max_new_tokens": 96, "json_schema": json.dumps(SCHEMA)},
            "stream": True,
        },
        "seeded": {
            "text": talk,
            "sampling_params": {**greedy, "temperature": 0.9, "sampling_seed": 77},
            "stream": True,
        },
        "penalized": {
            "text": talk,
            "sampling_params": {**greedy, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            "stream": True,
        },
    }


def ask(server: Server, body: dict[str, Any]) -> Answer:
    """Send a request to its end; of a stream, every chunk must extend the one before. Raises RequestError."""
    if not body.get("stream"):
        response = HTTP.post(f"{server.url}/generate", json=body)
        if response.status_code != 200:
            raise RequestError(f"HTTP {response.status_code}: {response.text[:300]}")
        answer = response.json()
        return _answer(answer if isinstance(answer, list) else [answer])
    last: dict[str, Any] = {}
    with HTTP.stream("POST", f"{server.url}/generate", json=body) as response:
        if response.status_code != 200:
            raise RequestError(f"HTTP {response.status_code}: {response.read()[:300]!r}")
        for line in response.iter_lines():
            if not line.startswith("data:") or "[DONE]" in line:
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                raise RequestError(str(chunk["error"]))
            before = last.get("output_ids", [])
            assert chunk["output_ids"][: len(before)] == before, "a stream took tokens back"
            last = chunk
    return _answer([last])


def _answer(samples: list[dict[str, Any]]) -> Answer:
    reasons = [sample["meta_info"]["finish_reason"] for sample in samples]
    if any(reason is None for reason in reasons):
        raise RequestError("a stream ended without a finish reason")
    logprobs = [
        value
        for sample in samples
        for key in ("input_token_logprobs", "output_token_logprobs")
        for value, *_ in sample["meta_info"].get(key) or []
        if value is not None
    ]
    return Answer([sample["output_ids"] for sample in samples], logprobs, str(reasons[-1]["type"]))


def switch(server: Server, layout: str, strategy: str = "auto") -> httpx.Response:
    body = {"layout": layout, "strategy": strategy}
    return HTTP.post(f"{server.url}/adapt/layout", json=body)


def layout_of(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = HTTP.get(f"{server.url}/adapt/layout").json()
    return body


def engines_of(server: Server) -> dict[str, dict[str, Any]]:
    """The router's view of each engine, asked for now."""
    answer = HTTP.get(f"{server.url}/adapt/engines").json()
    return {engine["name"]: engine for engine in answer["engines"]}
