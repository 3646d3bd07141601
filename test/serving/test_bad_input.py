"""Bad input gets the same answer as from stock sglang, and the server lives."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server import Server

pytestmark = pytest.mark.engine

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CASES: dict[str, tuple[str, Any]] = {
    "prompt longer than the context": (
        "/generate",
        {"input_ids": [5] * 20000, "sampling_params": {"max_new_tokens": 2}},
    ),
    "prompt longer than the context, chat": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "word " * 20000}]},
    ),
    "no text": ("/generate", {"sampling_params": {"max_new_tokens": 2}}),
    "empty text": ("/generate", {"text": "", "sampling_params": {"max_new_tokens": 2}}),
    "empty ids": ("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 2}}),
    "text and ids": ("/generate", {"text": "a", "input_ids": [1], "sampling_params": {"max_new_tokens": 2}}),
    "text of the wrong type": ("/generate", {"text": {"a": 1}, "sampling_params": {"max_new_tokens": 2}}),
    "negative max_new_tokens": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
    "negative temperature": ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}),
    "top_p of two": ("/generate", {"text": "a", "sampling_params": {"top_p": 2}}),
    "negative max_tokens": ("/v1/chat/completions", {**CHAT, "max_tokens": -1}),
    "no messages": ("/v1/chat/completions", {**CHAT, "messages": []}),
    "messages of the wrong type": ("/v1/chat/completions", {**CHAT, "messages": "hi"}),
    "unknown role": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "nobody", "content": "hi"}]}),
    "temperature of the wrong type": ("/v1/chat/completions", {**CHAT, "temperature": "hot"}),
    "n of zero": ("/v1/chat/completions", {**CHAT, "n": 0}),
    "n of zero, text": ("/v1/completions", {"model": "m", "prompt": "a", "n": 0}),
    "unknown model": ("/v1/completions", {"model": "no-such-model", "prompt": "a", "max_tokens": 2}),
    "no prompt": ("/v1/completions", {"model": "m", "max_tokens": 2}),
    "bad schema": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
    ),
    "bad regex": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "regex": "("}}),
    "no such route": ("/v1/no-such-route", {}),
}


def status(server: Server, path: str, body: Any) -> tuple[int, str]:
    """HTTP status and the kind of body: what a client can rely on."""
    response = httpx.post(server.url + path, json=body, timeout=180)
    kind = response.headers.get("content-type", "").split(";")[0]
    return response.status_code, kind


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_stocks(case: str, ours: Callable[[str], Server], stock: Server) -> None:
    path, body = CASES[case]
    got, want = status(ours("tp1"), path, body), status(stock, path, body)
    assert got == want


FATAL: dict[str, tuple[str, Any]] = {
    "labels of the client's own": ("/generate", {"text": "a", "custom_labels": {"a": "b"}}),
    "a known label": ("/generate", {"text": "a", "custom_labels": {"model_name": "b"}}),
    "a regular expression that is NUL": ("/generate", {"text": "a", "sampling_params": {"regex": "\0"}}),
    "a pattern that is NUL": (
        "/v1/chat/completions",
        {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "\0"}},
            },
        },
    ),
    "a schema without end": ("/generate", {"text": "a", "sampling_params": {"json_schema": '{"items":' * 100_000}}),
    "no object": ("/v1/chat/completions", None),
    "a format that is none": ("/v1/chat/completions", {**CHAT, "response_format": 5}),
    "ids in a list": ("/generate", {"text": "a", "rid": ["a"]}),
}
"""Of these stock's engine or server ends, or it answers with a 500."""


@pytest.mark.parametrize("case", FATAL)
def test_what_stock_does_not_survive_is_refused(case: str, ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    engines = [engine["pids"] for engine in httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]]
    path, body = FATAL[case]
    answer = httpx.post(
        server.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=180
    )
    assert answer.status_code == 400, answer.text
    good = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{server.url}/generate", json=good, timeout=180).status_code == 200
    after = httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]
    assert [engine["pids"] for engine in after] == engines


@pytest.mark.parametrize("ids", [[10**6], [5, -5], [[1, 2], [10**9]]])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_that_the_model_does_not_have(ids: list[Any], stream: bool, ours: Callable[[str], Server]) -> None:
    """Stock has no such check: one of these ends its engine."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}, "stream": stream}
    response = httpx.post(f"{ours('tp1').url}/generate", json=body, timeout=180)
    assert "not in the model's vocabulary" in response.text
    assert response.status_code == 400


TEXT = {"text": "a", "sampling_params": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"text": "a", "sampling_params": {"no_such": 1}}, "no_such"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature must be"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": {"type": "object"}}}, "json_schema"),
        ("/generate", {"text": "a", "sampling_params": {"ignore_eos": "x"}}, "ignore_eos"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2}]}, "sampling_params must have 2"),
        ("/generate", {"input_ids": [[]], "sampling_params": {"max_new_tokens": 2}}, "no tokens"),
        ("/generate", {**TEXT, "return_logprob": True, "logprob_start_len": -7}, "logprob_start_len"),
        ("/generate", {**TEXT, "positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
        ("/generate", {**TEXT, "rid": "SGLANG_ADAPT_WARMUP_mine"}, "SGLANG_ADAPT_WARMUP"),
        (
            "/v1/completions",
            {"model": "m", "prompt": "a", "max_tokens": 2, "logprobs": 100000},
            "logprobs must be from 0",
        ),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 100000}, "top_logprobs must be from 0"),
    ],
)
def test_what_ends_a_stock_engine_is_refused(path: str, body: Any, named: str, ours: Callable[[str], Server]) -> None:
    """Stock ends its engine, hangs or answers an empty 500; here the parameter is named."""
    response = httpx.post(ours("tp1").url + path, json=body, timeout=180)
    assert response.status_code == 400
    assert named in response.text


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1, 2", b'{"text": "a"} trailing', b"null"])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_broken_json(content: bytes, path: str, ours: Callable[[str], Server], stock: Server) -> None:
    headers = {"content-type": "application/json"}
    got, want = (
        httpx.post(server.url + path, content=content, headers=headers, timeout=180).status_code
        for server in (ours("tp1"), stock)
    )
    if (path, content) == ("/v1/chat/completions", b"null"):
        # That is the client's fault.
        assert (got, want) == (400, 500)
    else:
        assert got == want
        assert got >= 400


def test_ten_megabytes(ours: Callable[[str], Server], stock: Server) -> None:
    body = json.dumps({"text": "x" * 10_000_000, "sampling_params": {"max_new_tokens": 2}}).encode()
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor() as pool:
        got, want = pool.map(
            lambda url: httpx.post(f"{url}/generate", content=body, headers=headers, timeout=120).status_code,
            (ours("tp1").url, stock.url),
        )
    assert got == want == 400


def test_the_server_lives_on(ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    health = httpx.get(f"{server.url}/health").json()
    assert health["status"] == "ok"
    assert [engine["restarts"] for engine in health["engines"]] == [0, 0, 0]
    assert [engine["in_flight"] for engine in health["engines"]] == [0, 0, 0]
    answer = httpx.post(
        f"{server.url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}, timeout=180
    )
    assert answer.status_code == 200
