"""Greedy outputs in float32 equal stock sglang's, through every endpoint and at every TP size."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from server import Server

pytestmark = pytest.mark.engine

PROMPTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog, and then",
    "Q: What is the capital of France?\nA:",
    "In the beginning there was a small village by the sea, where an old man lived with his daughter. " * 4,
    "ä",
]
NEW_TOKENS = 16
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}


def generate(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def streamed_ids(server: Server, prompt: str) -> list[int]:
    """The token ids of a streamed answer, each chunk's checked to extend the one before."""
    body = {"text": prompt, "sampling_params": GREEDY, "stream": True}
    ids: list[int] = []
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data:") and "[DONE]" not in line:
                chunk = json.loads(line[5:])["output_ids"]
                assert chunk[: len(ids)] == ids
                ids = chunk
    return ids


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def expected(stock: Server) -> dict[str, list[Any]]:
    """Stock's answers."""
    return answers(stock)


def answers(server: Server) -> dict[str, list[Any]]:
    api = client(server)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return {
        "generate": [generate(server, text=prompt, sampling_params=GREEDY).json()["output_ids"] for prompt in PROMPTS],
        "stream": [streamed_ids(server, prompt) for prompt in PROMPTS],
        "completions": [
            api.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=NEW_TOKENS).choices[0].text
            for prompt in PROMPTS
        ],
        "completions stream": [
            "".join(
                chunk.choices[0].text
                for chunk in api.completions.create(
                    model="m", prompt=prompt, temperature=0, max_tokens=NEW_TOKENS, stream=True
                )
            )
            for prompt in PROMPTS
        ],
        "chat": [
            api.chat.completions.create(model="m", messages=chat, temperature=0, max_tokens=NEW_TOKENS)
            .choices[0]
            .message.content
            for chat in chats
        ],
        "chat stream": [
            "".join(
                chunk.choices[0].delta.content or ""
                for chunk in api.chat.completions.create(
                    model="m", messages=chat, temperature=0, max_tokens=NEW_TOKENS, stream=True
                )
                if chunk.choices
            )
            for chat in chats
        ],
    }


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp4"])
def test_outputs_equal_stock(layout: str, ours: Callable[[str], Server], expected: dict[str, list[Any]]) -> None:
    got = answers(ours(layout))
    assert set(got) == set(expected)
    for endpoint, texts in expected.items():
        assert got[endpoint] == texts, endpoint
    assert all(len(ids) > 4 for ids in expected["generate"])


def test_the_wanted_layout_is_the_one_that_serves(ours: Callable[[str], Server]) -> None:
    engines = httpx.get(f"{ours('tp2').url}/adapt/engines").json()["engines"]
    assert {engine["name"]: engine["active"] for engine in engines} == {
        "tp1@0": False,
        "tp1@1": False,
        "tp2@0-1": True,
    }
    before = _prefilled(ours("tp2"))
    generate(ours("tp2"), input_ids=[7, 700, 70] * 50, sampling_params={"max_new_tokens": 2})
    grown = [after - then for after, then in zip(_prefilled(ours("tp2")), before, strict=True)]
    # Slots are in the order of the engines' names above.
    assert grown[:2] == [0, 0] and grown[2] >= 150


def _prefilled(server: Server) -> list[int]:
    """Prompt tokens that each engine has computed."""
    return [load["total_prefill_uncached_tokens"] for load in httpx.get(f"{server.url}/v1/loads").json()["loads"]]


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_64_at_once(layout: str, ours: Callable[[str], Server], stock: Server) -> None:
    server = ours(layout)
    prompts = [f"{number} bottles of beer on the wall, {number} bottles of" for number in range(64)]

    def ids(server: Server, prompt: str) -> list[int]:
        answer: list[int] = generate(server, text=prompt, sampling_params=GREEDY).json()["output_ids"]
        return answer

    with ThreadPoolExecutor(64) as pool:
        got = list(pool.map(lambda prompt: ids(server, prompt), prompts))
        want = list(pool.map(lambda prompt: ids(stock, prompt), prompts))
    assert got == want
    assert sum(e["in_flight"] for e in httpx.get(f"{server.url}/adapt/engines").json()["engines"]) == 0


def test_batches_and_several_samples(ours: Callable[[str], Server], stock: Server) -> None:
    body = {"text": PROMPTS[:3], "sampling_params": {**GREEDY, "n": 2}}
    got, want = (generate(server, **body).json() for server in (ours("tp1"), stock))
    assert len(got) == 6
    assert [answer["output_ids"] for answer in got] == [answer["output_ids"] for answer in want]


def test_logprobs_equal_stock(ours: Callable[[str], Server], stock: Server) -> None:
    body = {"text": PROMPTS[1], "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    got, want = (
        generate(server, **body).json()["meta_info"]["output_token_logprobs"] for server in (ours("tp1"), stock)
    )
    assert [token for _, token, *_ in got] == [token for _, token, *_ in want]
    assert [value for value, *_ in got] == pytest.approx([value for value, *_ in want], abs=1e-5)


def test_log_probabilities_of_named_tokens_beside_requests_that_name_none(ours: Callable[[str], Server]) -> None:
    """In one batch, which a long prompt before them lets come about."""
    named = {"text": "The dog", "sampling_params": GREEDY, "return_logprob": True, "token_ids_logprob": [5, 6]}
    plain = {"text": "The cat", "sampling_params": GREEDY}
    server = ours("tp2")
    alone = generate(server, **named).json()["meta_info"]["output_token_ids_logprobs"]

    def ask(number: int) -> Any:
        return generate(server, **(named if number % 2 else plain)).json()

    with ThreadPoolExecutor(13) as pool:
        before = pool.submit(generate, server, input_ids=[5] * 3000, sampling_params=GREEDY)
        answers = list(pool.map(ask, range(12)))
        assert before.result().status_code == 200
    for number, answer in enumerate(answers):
        assert len(answer["output_ids"]) == GREEDY["max_new_tokens"]
        if number % 2:
            found = answer["meta_info"]["output_token_ids_logprobs"]
            assert [[i for _, i, *_ in step] for step in found] == [[5, 6]] * len(answer["output_ids"])
            values = [[value for value, *_ in step] for step in found]
            assert values == [pytest.approx([value for value, *_ in step], abs=1e-5) for step in alone]


def test_structured_output(ours: Callable[[str], Server]) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for layout in ("tp1", "tp2"):
        answer = client(ours(layout)).chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Give me a person."}],
            temperature=0,
            max_tokens=96,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        )
        person = json.loads(answer.choices[0].message.content or "")
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)


def test_prefixes_are_reused(ours: Callable[[str], Server]) -> None:
    server = ours("tp2")
    prompt = "A long prefix that several requests share, with many words in it, again and again. " * 5
    first = generate(server, text=prompt + "one", sampling_params=GREEDY).json()["meta_info"]
    second = generate(server, text=prompt + "two", sampling_params=GREEDY).json()["meta_info"]
    assert first["cached_tokens"] < 10
    assert second["cached_tokens"] > second["prompt_tokens"] * 0.8


def test_flush_cache_reaches_every_engine(ours: Callable[[str], Server]) -> None:
    server = ours("tp2")
    prompt = "Another long prefix, to be flushed, with enough words to be worth it. " * 5
    generate(server, text=prompt, sampling_params=GREEDY)
    assert httpx.post(f"{server.url}/flush_cache", timeout=180).status_code == 200
    assert generate(server, text=prompt, sampling_params=GREEDY).json()["meta_info"]["cached_tokens"] == 0


def test_server_info_names_every_engine(ours: Callable[[str], Server]) -> None:
    info = httpx.get(f"{ours('tp2').url}/server_info", timeout=180).json()
    engines = info["internal_states"][0]["adapt_engines"]
    assert engines[0]["engine"] == "tp2@0-1"
    assert {engine["engine"] for engine in engines} == {"tp1@0", "tp1@1", "tp2@0-1"}


def test_health_and_readiness(ours: Callable[[str], Server]) -> None:
    server = ours("tp1")
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    assert httpx.get(f"{server.url}/ready").json() == {"ready": True, "reason": None}
    assert httpx.get(f"{server.url}/health_generate", timeout=180).status_code == 200
