"""The parameter that a refusal is about is found in its text, by the name that it has on the route."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_adapt.upstream.stock_refusals import body_fault, explained

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "text", "param", "told"),
    [
        (GENERATE, "temperature must be a number, got 5.", "temperature", "temperature must be a number, got 5."),
        (GENERATE, "sampling_params[1].n must be 1.", "n", "sampling_params[1].n must be 1."),
        (COMPLETIONS, "sampling_params[1].n must be 1.", "n", "n must be 1."),
        (GENERATE, "Requested token count exceeds the model", "max_new_tokens", "max_new_tokens: Requested token"),
        (COMPLETIONS, "Requested token count exceeds", "max_tokens", "max_tokens: Requested token"),
        (CHAT, "Requested token count exceeds", "max_completion_tokens", "max_completion_tokens (or max_tokens): "),
        (CHAT, "The input (9 tokens) is longer than the model's text.", "messages", "messages: The input (9 tokens)"),
        (COMPLETIONS, "input_ids: the token id 5 of the text", "prompt", "prompt: the token id 5 of the text"),
        (CHAT, "input_ids: the token id 5", "input_ids", "input_ids: the token id 5"),
        (GENERATE, "texts cannot be empty and more", "text", "text must not be empty."),
        (
            COMPLETIONS,
            "Failed to compile json grammar: [19:42:26] /a/b.cc:29: Type should be a string\n",
            "json_schema",
            "json_schema (or response_format) must be a JSON schema: Type should be a string",
        ),
        (CHAT, "Failed to compile json grammar: x", "response_format", "response_format must be a JSON schema: x"),
        (
            GENERATE,
            "The parameter sampling_params.stop has the wrong type: Expected",
            "stop",
            "sampling_params.stop has",
        ),
        (
            GENERATE,
            "The parameter top_logprobs_num has the wrong type: Expected",
            "top_logprobs_num",
            "top_logprobs_num",
        ),
        (GENERATE, "no_such is no sampling parameter; there are n.", "no_such", "no_such is no sampling parameter"),
        (
            GENERATE,
            "routed_dp_rank=7 out of range [0, 1)",
            "routed_dp_rank",
            "routed_dp_rank is out of range: 7 not in [0, 1)",
        ),
        (GENERATE, "The length of extra_key should be equal", "extra_key", "extra_key: the length should be equal"),
        (GENERATE, "LoRA adapter 'x' was requested", "lora_path", "lora_path: LoRA adapter"),
        (GENERATE, "Invalid request: session id x does not exist", "session_params", "session_params: session x does"),
        (
            GENERATE,
            "req.logprob_start_len=9 is higher than",
            "logprob_start_len",
            "logprob_start_len: 9 is higher than",
        ),
        (GENERATE, "Something is wrong", None, "Something is wrong"),
        (GENERATE, "the body is not JSON", None, "the body is not JSON"),
    ],
)
def test_a_refusal_names_its_parameter(path: str, text: str, param: str | None, told: str) -> None:
    got = explained(text, path)
    assert got[0] == param
    assert got[1].startswith(told)


@pytest.mark.parametrize(
    ("errors", "param", "told"),
    [
        (
            [
                {"type": "list_type", "loc": ("body", "rid", "list[str]"), "msg": "Input should be a list", "input": 5},
                {"type": "string_type", "loc": ("body", "rid", "str"), "msg": "Input should be a string", "input": 5},
            ],
            "rid",
            "rid: Input should be a list; or Input should be a string, got 5",
        ),
        (
            [{"type": "missing", "loc": ("body", "prompt"), "msg": "Field required", "input": {}}],
            "prompt",
            "prompt: Field",
        ),
        (
            [{"type": "value_error", "loc": ("body", "x"), "msg": "Value error, x must be 1", "input": 0}],
            "x",
            "x must be 1, got 0",
        ),
        (
            [
                {
                    "type": "x",
                    "loc": ("body", "messages", 3, "Union", "role"),
                    "msg": "Input should be 'user'",
                    "input": 1,
                }
            ],
            "messages",
            "messages[3]: Input should be 'user'",
        ),
        (
            [
                {
                    "type": "json_invalid",
                    "loc": ("body", 7),
                    "msg": "JSON decode error",
                    "ctx": {"error": "no"},
                    "input": {},
                }
            ],
            None,
            "the body is not JSON (byte 7): no",
        ),
        (
            [
                {
                    "type": "is_instance_of",
                    "loc": ("body", "is-instance[AbortReq]"),
                    "msg": "Input should be an instance of AbortReq",
                    "input": None,
                }
            ],
            None,
            "the body must be a JSON object with the fields of AbortReq, of their types",
        ),
        (
            [{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}],
            None,
            "the body must be a JSON",
        ),
        (
            [{"type": "value_error", "loc": ["header", "content-type"], "msg": "Only x", "input": None}],
            "content-type",
            "content-type header: Only x",
        ),
    ],
)
def test_a_body_that_does_not_pass_names_its_field(errors: list[dict[str, Any]], param: str | None, told: str) -> None:
    got = body_fault(errors)
    assert got[0] == param
    assert got[1].startswith(told)
    assert "\n" not in got[1]
