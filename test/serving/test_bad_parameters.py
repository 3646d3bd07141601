"""Every bad value of every parameter gets a 400 that names it, streamed or not, and no engine notices.

Of `repetition_penalty: 1e-300`, `logit_bias` of 1e300, `stop_token_ids` beyond the vocabulary with `min_new_tokens`
and a grammar that no text fits stock's engine ends, and with it, as each engine tries the request in turn, a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server import Server

pytestmark = pytest.mark.engine

SAMPLING: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "x", True, 10**9, [1]],
    "stop": [5, [5], {"a": 1}],
    "stop_token_ids": ["a", 5, [1.5], ["a"]],
    "stop_regex": ["(", 5],
    "temperature": ["hot", -1, True, [1], 1e300],
    "top_p": ["x", 0, -1, 2],
    "top_k": ["x", 0, -5, 1.5, 2**40],
    "min_p": ["x", -1, 2],
    "frequency_penalty": ["x", -3, 3],
    "presence_penalty": ["x", -3],
    "repetition_penalty": ["x", 0, -1, 3, 1e-300],
    "min_new_tokens": ["x", -1, 50],
    "n": ["x", 0, -1, 1.5, [1], None, 10**9],
    "json_schema": [{"type": "object"}, 5, "{"],
    "regex": ["(", 5],
    "ebnf": ["??? ::", 5],
    "structural_tag": ["{", 5],
    "ignore_eos": ["x", 5],
    "skip_special_tokens": ["x"],
    "stream_interval": ["x", -1, 0],
    "logit_bias": [[1], {"a": 1}, {"999999": 1}, {"1": "x"}, {"1": 1e300}, {"-1": 1}],
    "sampling_seed": ["x", 2**70, 1.5],
    "custom_params": [5, {"a": {"b": {"c": 1}}}],
    "no_such": [1],
    "is_normalized": [True],
}
FIELDS: dict[str, list[Any]] = {
    "text": [5, {"a": 1}, [], [""], [5], ["a", 5], ""],
    "input_ids": ["a", [], [[]], [[1], 5], [1.5], [-1], [10**9], [2**70]],
    "input_embeds": ["x", [], [[]]],
    "sampling_params": ["x", 5, [], [5], [{}, {}]],
    "return_logprob": ["x", [True]],
    "logprob_start_len": ["x", -7, 1.5, [1]],
    "top_logprobs_num": ["x", -1, 10**9],
    "token_ids_logprob": ["x", [-1], [10**9], [1.5]],
    "stream": ["x", 5],
    "rid": [5, ["a"], []],
    "priority": ["x", 1.5, 2**70],
    "lora_path": ["x", 5],
    "return_hidden_states": ["x", True],
    "custom_logit_processor": ["x", 5],
    "session_params": ["x", {"id": "x"}],
    "max_thinking_tokens": [5],
    "routed_dp_rank": [7, "x", -1],
    "extra_key": [5],
    "custom_labels": [5, {"a": "b"}],
    "return_sampling_mask": [True],
}
OPENAI: dict[str, list[Any]] = {
    "model": [5],
    "frequency_penalty": ["x", -3],
    "logit_bias": [[1], {"a": 1}, {"999999": 1}, {"1": 1e300}],
    "max_tokens": ["x", -1, 1.5, 10**9],
    "n": ["x", 0, -1, 10**9],
    "presence_penalty": ["x", 5],
    "seed": ["x", 2**70],
    "stop": [5, [5]],
    "stream_options": ["x"],
    "temperature": ["x", -1, 1e300],
    "top_p": ["x", 0, 2],
    "top_k": ["x", 0, 2**40],
    "min_p": ["x", 2],
    "min_tokens": ["x", -1, 50],
    "regex": ["(", 5],
    "ebnf": ["?", 5],
    "repetition_penalty": ["x", 0, 5, 1e-300],
    "stop_token_ids": ["x", [2**70]],
    "stop_regex": ["("],
    "ignore_eos": ["x"],
    "response_format": [
        5,
        {"type": "x"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}},
    ],
    "custom_params": [5, {"a": {"b": {"c": 1}}}],
    "custom_logit_processor": ["x"],
    "rid": [5, ["a"]],
    "extra_key": [5],
    "cache_salt": [5],
    "priority": ["x", 2**70],
    "lora_path": ["x"],
    "return_hidden_states": [True, "x"],
    "routed_dp_rank": [7],
    "data_parallel_rank": [7],
}
COMPLETIONS = OPENAI | {
    "prompt": ["", [], 5, [[]], [""], [10**9], [-1], {"a": 1}, None],
    "logprobs": ["x", -1, 10**6],
    "json_schema": ["{"],
    "echo": ["x"],
    "best_of": ["x"],
}
CHAT = OPENAI | {
    "messages": [[], "hi", 5, [5], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}]],
    "max_completion_tokens": ["x", -1, 10**9],
    "top_logprobs": ["x", -1, 10**6],
    "tools": ["x", [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]],
    "tool_choice": ["x", "required", {"type": "function", "function": {"name": "zz"}}],
    "reasoning_effort": ["x", True, 5],
    "reasoning": [{"effort": "x"}],
    "chat_template_kwargs": [5],
    "input_ids": ["x", [10**9]],
}
OTHER_NAMES = {"data_parallel_rank": "routed_dp_rank", "tool_choice": "tools", "max_tokens": "max_completion_tokens"}
"""`param` where stock checks the field by another one; the text has both."""
AS_RESPONSE_FORMAT = "json_schema"


def _with(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    instead = {"input_ids": ("text",), "input_embeds": ("text",)}.get(name, ()) if "text" in body else ()
    return {key: was for key, was in body.items() if key not in instead} | {name: value}


def _cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    params = {"max_new_tokens": 2}
    for name, values in SAMPLING.items():
        for value in values:
            yield "/generate", name, {"text": "a", "sampling_params": {**params, name: value}}
    for path, table, body in (
        ("/generate", FIELDS, {"text": "a", "sampling_params": params}),
        ("/v1/completions", COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            CHAT,
            {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True},
        ),
    ):
        for name, values in table.items():
            for value in values:
                yield path, name, _with(body, name, value)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_bad_value_gets_a_400_that_names_its_parameter(
    path: str, stream: bool, ours: Callable[[str], Server]
) -> None:
    wrong = []
    with httpx.Client(base_url=ours("tp1").url, timeout=180) as client:
        for at, name, body in _cases():
            if at != path:
                continue
            said = json.dumps({"stream": True, **body} if stream else body)
            answer = client.post(path, content=said, headers={"content-type": "application/json"})
            fault = _fault(path, name, answer)
            if fault is not None:
                wrong.append(f"{said[:150]}: {fault}")
        assert not wrong, "\n".join(wrong)
        engines = client.get("/adapt/engines").json()["engines"]
    assert [engine["restarts"] for engine in engines] == [0, 0, 0]


def _fault(path: str, name: str, answer: httpx.Response) -> str | None:
    """How an answer is not the 400 that it should be, or None."""
    if answer.status_code != 400:
        return f"{answer.status_code} {answer.text[:100]}"
    said = answer.json()
    if ("object" not in said) != path.startswith("/v1/"):
        return f"another form: {said}"
    said = said.get("error", said)
    param = OTHER_NAMES.get(name, name) if path != "/v1/completions" or name != "max_tokens" else name
    if name == "response_format" and path == "/v1/completions":
        param = AS_RESPONSE_FORMAT if said["param"] == AS_RESPONSE_FORMAT else name
    if said["param"] not in (param, name) or name not in said["message"] or "\n\n" in said["message"][:40]:
        return f"names {said['param']}: {said['message'][:200]}"
    if (said["code"], said["type"], said["object"]) != ("bad_parameter", "invalid_request", "error"):
        return f"another form: {said}"
    return None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": '{"$ref": "#"}'},
        {"ebnf": "root ::= root"},
        {"ebnf": 'root ::= "a" b\nb ::= b'},
        {"repetition_penalty": 1e-6, "temperature": 1.1e-6, "logit_bias": {"5": 1e30, "6": -1e30}},
        {"temperature": 1e30, "regex": "[ab]*"},
    ],
)
def test_what_stocks_engine_does_not_survive_is_answered(
    params: dict[str, Any], stream: bool, ours: Callable[[str], Server]
) -> None:
    server = ours("tp1")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4, **params}, "stream": stream}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=180)
    assert answer.status_code == 200
    engines = httpx.get(f"{server.url}/adapt/engines", timeout=180).json()["engines"]
    assert [engine["restarts"] for engine in engines] == [0, 0, 0]


def test_stop_ids_that_the_model_does_not_have_are_no_use_to_min_new_tokens(ours: Callable[[str], Server]) -> None:
    params = {"max_new_tokens": 4, "min_new_tokens": 2, "stop_token_ids": [10**12]}
    answer = httpx.post(f"{ours('tp1').url}/generate", json={"text": "a", "sampling_params": params}, timeout=180)
    assert (answer.status_code, answer.json()["param"]) == (400, "stop_token_ids")


def test_a_stream_that_is_refused_for_its_id_does_not_end_the_one_that_has_it(ours: Callable[[str], Server]) -> None:
    """Stock aborts what has the id of a stream two seconds after that has ended."""
    url = f"{ours('tp1').url}/generate"
    body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with httpx.stream("POST", url, json=body, timeout=180) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        refused = httpx.post(url, json=body, timeout=180)
        assert (refused.status_code, refused.json()["param"]) == (400, "rid")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 1500}
