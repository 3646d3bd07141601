"""Whose fault a 400 of stock's is: the parameter that its text is about, and a text that names it.

Most texts of stock's, and all of ours, begin with the parameter's name. The others are in a table here, by how they
begin. On OpenAI's routes a parameter has another name than the one that stock checks it by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sglang_adapt.upstream.sampling_rules import RULES, shown

_ABOUT: tuple[tuple[str, str, str], ...] = (
    # (how a text of stock's begins, the parameter, what is told; \g<0> is what has matched, and the rest follows)
    (r"Requested token count exceeds", "max_new_tokens", r"max_new_tokens: \g<0>"),
    (r"The input \(\d+ tokens\) is longer", "text", r"text: \g<0>"),
    (r"texts cannot be empty.*", "text", "text must not be empty."),
    (r"Either text, input_ids or input_embeds.*", "text", "text, or else input_ids or input_embeds, must be given."),
    (r"Text should be a list", "text", r"text: \g<0>"),
    (r"Prompt cannot be empty", "prompt", "prompt must not be empty"),
    (r"Messages cannot be empty", "messages", "messages must not be empty"),
    (r"Model only supports text input; received", "messages", r"messages: the model takes text only; received"),
    (
        r"schema_ is required.*",
        "response_format",
        "response_format must have json_schema.schema, since its type is json_schema.",
    ),
    (r"Failed to compile json grammar: ", "json_schema", "json_schema must be a JSON schema: "),
    (r"Failed to compile regex grammar: ", "regex", "regex must be a regular expression: "),
    (r"Failed to compile ebnf grammar: ", "ebnf", "ebnf must be a grammar: "),
    (r"Failed to compile structural.tag grammar: ", "structural_tag", "structural_tag must be a structural tag: "),
    (r"LoRA adapter", "lora_path", r"lora_path: \g<0>"),
    (r"Received request with \d+ unique loras", "lora_path", r"lora_path: \g<0>"),
    (r"Got LoRA adapter", "lora_path", r"lora_path: \g<0>"),
    (r"The server is not configured to return hidden", "return_hidden_states", r"return_hidden_states: \g<0>"),
    (r"The requested return_hidden_states mode", "return_hidden_states", r"return_hidden_states: \g<0>"),
    (r"The server is not configured to enable custom", "custom_logit_processor", r"custom_logit_processor: \g<0>"),
    (r"Invalid request: session id", "session_params", "session_params: session"),
    (r"Duplicate request ID", "rid", r"rid: \g<0>"),
    (r"The specified rids length", "rid", r"rid: \g<0>"),
    (r"The rid should", "rid", "rid should"),
    (r"The parallel_sample_num should", "n", "n should"),
    (r"Cannot use list (\w+) with parallel_sample_num", r"\1", r"\1 cannot be a list with n"),
    (r"The length of (\w+) should", r"\1", r"\1: the length should"),
    (r"routed_dp_rank=(\S+) out of range", "routed_dp_rank", r"routed_dp_rank is out of range: \1 not in"),
    (r"Tools cannot be empty if tool choice", "tools", "tools cannot be empty if tool_choice"),
    (r"invalid reasoning effort", "reasoning", r"reasoning: \g<0>"),
    (r"Tool names must", "tools", "tools: their names must"),
    (r"Tool \d+ function", "tools", r"tools: \g<0>"),
    (r"Tool '[^']*' not found in tools", "tool_choice", r"tool_choice: \g<0>"),
    (r"req\.logprob_start_len=(\d+) is higher", "logprob_start_len", r"logprob_start_len: \1 is higher"),
    (r"recv_req\.routed_experts_start_len=(-?\d+) is", "routed_experts_start_len", r"routed_experts_start_len: \1 is"),
    (r"Invalid X-Data-Parallel-Rank header", "X-Data-Parallel-Rank", "X-Data-Parallel-Rank header"),
    (r"(\S+) is no sampling parameter", r"\1", r"\g<0>"),
    (r"The parameter ([\w.]+) has the wrong type", r"\1", r"\1 has the wrong type"),
)
_LEADING = re.compile(
    r"(?P<at>sampling_params(?:\[\d+\])?\.)?(?P<name>[A-Za-z][\w.-]*)(?:\[\d+\])*(?::|=| (?:must|requires|has|contains|"
    r"cannot|should|does|is|header|and session_params)\b)"
)
_COMPILER_AT = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""Where in its sources the grammar compiler found a fault, and when."""

_OPENAI = {
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "routed_dp_rank": "routed_dp_rank (or data_parallel_rank)",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        **_OPENAI,
        "max_new_tokens": "max_tokens",
        "text": "prompt",
        "input_ids": "prompt",
        "top_logprobs_num": "logprobs",
        "json_schema": "json_schema (or response_format)",
    },
    "/v1/chat/completions": {
        **_OPENAI,
        "max_new_tokens": "max_completion_tokens (or max_tokens)",
        "text": "messages",
        "top_logprobs_num": "top_logprobs",
        "json_schema": "response_format",
        "structural_tag": "response_format",
    },
}
"""By path: what a parameter is called there; in the field `param` by the first word."""


def explained(text: str, path: str) -> tuple[str | None, str]:
    """(the parameter, a text that names it) of a 400.

    Args:
        text: stock's, or one of our checks.
        path: of the request.

    Returns:
        None as the parameter if the text is about none.
    """
    text = _COMPILER_AT.sub("", text.strip())
    for begins, name, told in _patterns():
        match = begins.match(text)
        if match is not None:
            name, text = match.expand(name), match.expand(told) + text[match.end() :]
            break
    else:
        match = _LEADING.match(text)
        if match is None or (match["at"] is None and match["name"] not in _request_names()):
            return None, text
        name = match["name"]
    name = name.rpartition(".")[2] if name.startswith("sampling_params.") else name
    names = _NAMES.get(path)
    if names is None:
        return name, text
    text = re.sub(r"\bsampling_params(\[\d+\])?\.", "", text)
    for ours, theirs in names.items():
        # Prose has the words text and input, too.
        text = re.sub(rf"^{ours}\b" if ours in ("text", "input_ids") else rf"\b{ours}\b", theirs, text)
    return names.get(name, name).partition(" ")[0], text


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    return tuple((re.compile(begins, re.DOTALL), name, told) for begins, name, told in _ABOUT)


@cache
def _request_names() -> frozenset[str]:
    """What a text may begin with, and be about."""
    from dataclasses import fields

    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
    from sglang.srt.managers.io_struct import GenerateReqInput

    openai = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest)
    named = [
        *(one.name for one in fields(GenerateReqInput)),
        *(name for model in openai for name in model.model_fields),
    ]
    return frozenset((*named, *RULES))


def body_fault(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """(the field, what is wrong with it) of a body, from FastAPI's list of validation errors.

    Args:
        errors: each with `loc`, e.g. ("body", "stop", "list[str]", 0), `msg`, `input`; a field that may have several
            types has one for each.
    """
    where = tuple(errors[0].get("loc", ()))
    words = list(dict.fromkeys(str(one["msg"]) for one in errors if tuple(one.get("loc", ()))[:2] == where[:2]))
    said = "; or ".join(word.removeprefix("Value error, ").rstrip(".") for word in words[:3])
    kind = errors[0].get("type")
    if kind == "json_invalid":
        why = errors[0].get("ctx")
        fault = why.get("error", "") if isinstance(why, dict) else ""
        return None, f"the body is not JSON (byte {where[-1]}): {fault}"
    if where[:1] == ("header",):
        return where[1], f"{where[1]} header: {said}"
    if kind == "value_error" and len(where) < 2:
        return None, said
    if kind == "is_instance_of" and len(where) == 2:
        # Of bodies that are structs of msgspec pydantic knows neither fields nor faults.
        return None, f"the body must be a JSON object with the fields of {words[0].rpartition(' ')[2]}, of their types"
    if len(where) < 2 or not isinstance(where[1], str):
        return None, f"the body must be a JSON object: {said}"
    name = where[1] + "".join(f"[{step}]" for step in where[2:3] if isinstance(step, int))
    got = "" if kind == "missing" or len(where) > 3 else f", got {shown(errors[0].get('input'))}"
    return where[1], f"{said}{got}" if said.startswith(f"{name} ") else f"{name}: {said}{got}"
