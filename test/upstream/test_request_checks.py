"""What would end an engine is found in the front, and named."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from router_fakes import generate
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_adapt.upstream.grammar_checks import MOST_LEVELS, grammar_fault
from sglang_adapt.upstream.request_checks import (
    RefuseBatchesThatDoNotFit,
    RefuseBodiesThatFailTheirChecks,
    RefuseWhatTheModelCannotTake,
    labels_fault,
    model_fault,
    samples_fault,
    wire_fault,
)
from sglang_adapt.upstream.wire import WARMUP_RID_PREFIX

VOCAB = 100
MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=VOCAB),
    server_args=SimpleNamespace(tokenizer_metrics_allowed_custom_labels=None),
)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ({"text": "a"}, {"n": 10**9}, "n must be at most 1024, got 1000000000"),
        ({"input_ids": [[1], [2]]}, [{"n": 1}, {"n": 1025}], "n must be at most 1024, got 1025"),
        ({"text": ["a"] * 17}, {"n": 1024}, "17 prompts with n=1024 are 17408 samples"),
        ({"input_embeds": [[[0.5]]] * 17}, {"n": 1024}, "17 prompts with n=1024 are 17408 samples"),
        ({"input_ids": [1] * 20_000}, {"n": 2}, None),
        ({"text": ["a"] * 100_000}, {"n": 1}, None),
        ({"text": "a"}, {"n": "3"}, None),
        ({"text": "a"}, None, None),
    ],
)
def test_more_samples_than_can_be_served_are_refused(prompts: Any, params: Any, words: str | None) -> None:
    obj = GenerateReqInput(**prompts, sampling_params=params)
    obj._determine_batch_size()
    fault = samples_fault(obj)
    assert fault is None if words is None else words in (fault or "")


def request(**fields: Any) -> GenerateReqInput:
    obj = GenerateReqInput(**{"text": "a", "sampling_params": {"max_new_tokens": 4}, **fields})
    obj.normalize_batch_and_arguments()
    return obj


@pytest.mark.parametrize(
    ("fields", "ids", "words"),
    [
        ({}, [1, VOCAB], f"token id {VOCAB} at position 1"),
        ({}, [-1], "token id -1"),
        ({}, [], "no tokens"),
        ({"top_logprobs_num": VOCAB + 1}, [1], "top log probabilities"),
        ({"top_logprobs_num": -1}, [1], "top log probabilities"),
        ({"logprob_start_len": -7}, [1], "logprob_start_len"),
        ({"rid": f"{WARMUP_RID_PREFIX}_mine"}, [1], WARMUP_RID_PREFIX),
        ({"sampling_params": {"max_new_tokens": 2.5}}, [1], "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": "5"}}, [1], "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 2, "top_k": 2**31}}, [1], "top_k"),
        ({"sampling_params": {"max_new_tokens": 2, "top_k": -(2**63)}}, [1], "top_k"),
    ],
)
def test_what_the_model_cannot_take(fields: dict[str, Any], ids: list[int], words: str) -> None:
    fault = model_fault(request(**fields), ids, VOCAB)
    assert fault is not None
    assert words in fault


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("regex", "\0", "regex has the character NUL"),
        ("ebnf", 'root ::= "\0"', "ebnf has the character NUL"),
        ("json_schema", json.dumps({"type": "string", "pattern": "\0"}), "json_schema has the character NUL"),
        ("structural_tag", json.dumps({"format": {"type": "regex", "pattern": "\0"}}), "structural_tag has"),
        ("json_schema", '{"items":' * 100_000, "json_schema is nested more than"),
        ("json_schema", '{"anyOf":[' * MOST_LEVELS + "{}" + "]}" * MOST_LEVELS, "json_schema is nested more than"),
        ("structural_tag", "[" * (MOST_LEVELS + 1), "structural_tag is nested more than"),
    ],
)
def test_a_grammar_that_no_engine_survives(name: str, text: str, words: str) -> None:
    fault = model_fault(request(sampling_params={"max_new_tokens": 4, name: text}), [1], VOCAB)
    assert fault is not None
    assert words in fault


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("regex", r"\u0000[a-z]((((" + "(" * 1000),
        ("json_schema", json.dumps({"type": "string", "pattern": r"\u0000"})),
        ("json_schema", json.dumps({"enum": ["[" * 1000, '"{' * 1000]})),
        ("json_schema", json.dumps({"anyOf": [{"type": "object"}] * 1000})),
        ("json_schema", "[" * MOST_LEVELS + "]" * MOST_LEVELS),
        ("json_schema", {"type": "object"}),
        ("json_schema", None),
    ],
)
def test_other_grammars_are_left_to_stock(name: str, text: Any) -> None:
    assert grammar_fault({name: text}) is None


@pytest.mark.parametrize("name", ["a", "model_name", "is_streaming"])
def test_a_label_of_the_clients_own_is_refused(name: str) -> None:
    obj = request(custom_labels={name: "x"})
    assert f"custom_labels: {name!r} is no label" in (labels_fault(obj, ()) or "")
    assert labels_fault(obj, (name,)) is None
    with pytest.raises(ValueError, match="custom_labels"):
        RefuseWhatTheModelCannotTake.hook(MANAGER, obj, [1])
    RefuseWhatTheModelCannotTake.hook(MANAGER, request(), [1])


def test_a_list_that_is_shorter_than_the_batch() -> None:
    obj = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}])
    with pytest.raises(ValueError, match="do not fit its prompts"):
        RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, obj)
    good = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}])
    RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, good)
    # As stock does it next.
    good.priority = 7
    assert good[1].sampling_params == {"max_new_tokens": 3}
    assert [good[0].priority, good[1].priority] == [7, 7]


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs_num": [1]}, {"logprob_start_len": [1]}, {"sampling_params": [{}]}, {"rid": ["x"]}, {"rid": []}],
)
def test_a_parameter_that_cannot_be_compared_is_refused(fields: dict[str, Any]) -> None:
    obj = GenerateReqInput(**{"text": "a", "sampling_params": {"max_new_tokens": 2}, **fields})
    with pytest.raises(ValueError, match="parameter"):
        RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, obj)
        RefuseWhatTheModelCannotTake.hook(MANAGER, obj, [1])


def test_a_body_on_which_stocks_checks_stumble_is_refused() -> None:
    async def check(body: Any) -> Any:
        return body.get("response_format"), []

    assert asyncio.run(RefuseBodiesThatFailTheirChecks.hook(check, body={"response_format": 1})) == (1, [])
    with pytest.raises(RequestValidationError) as raised:
        asyncio.run(RefuseBodiesThatFailTheirChecks.hook(check, body=None))
    assert "The body has a part of the wrong type: 'NoneType' object" in raised.value.errors()[0]["msg"]


def test_what_the_model_can_take() -> None:
    assert model_fault(request(top_logprobs_num=VOCAB, logprob_start_len=-1), [0, VOCAB - 1], VOCAB) is None
    assert model_fault(request(sampling_params={"max_new_tokens": None}), [1], VOCAB) is None


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("json_schema", {"type": "object"}, "object"),
        ("regex", 5, "int"),
        ("ignore_eos", "x", "str"),
        ("logit_bias", [1], "array"),
        ("sampling_seed", "3", "str"),
        ("sampling_seed", float(2**65), "float"),
        ("stream_interval", "x", "str"),
    ],
)
def test_a_sampling_parameter_of_the_wrong_type_is_named(name: str, value: Any, got: str) -> None:
    tokenized = generate("a")
    setattr(tokenized.sampling_params, name, value)
    fault = wire_fault(tokenized)
    assert fault is not None
    assert f"sampling_params.{name} has the wrong type" in fault
    assert f"got {got}" in fault


def test_a_field_of_the_wrong_type_is_named() -> None:
    tokenized = generate("a")
    tokenized.top_logprobs_num = "many"
    assert "top_logprobs_num has the wrong type: Expected int, got str" in (wire_fault(tokenized) or "")


def test_a_good_request_is_left_as_it_was() -> None:
    tokenized = generate("a", tokens=5)
    assert wire_fault(tokenized) is None
    assert list(tokenized.input_ids) == [0, 1, 2, 3, 4]
