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
    LeaveTheRequestOfThatIdAlone,
    RaiseRefusalsOfStreams,
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
        (
            {"top_logprobs_num": VOCAB + 1},
            [1],
            f"top_logprobs_num must be from 0 to the size of the vocabulary, {VOCAB}",
        ),
        ({"top_logprobs_num": -1}, [1], "top_logprobs_num must be"),
        ({"logprob_start_len": -7}, [1], "logprob_start_len"),
        ({"rid": f"{WARMUP_RID_PREFIX}_mine"}, [1], WARMUP_RID_PREFIX),
        (
            {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [VOCAB]}},
            [1],
            "stop_token_ids must be in the model",
        ),
        (
            {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [5, -1]}},
            [1],
            "stop_token_ids must be in the model",
        ),
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


def normalised(**fields: Any) -> GenerateReqInput:
    obj = GenerateReqInput(**fields)
    RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, obj)
    return obj


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2}]}, "sampling_params must have 2 entries"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob must have 2 entries for 2 prompts, got 1"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params[1].n must be"),
        ({"text": ["a", "b"], "sampling_params": []}, "sampling_params must not be an empty list"),
        ({"text": "a", "top_logprobs_num": [1]}, "top_logprobs_num must not be a list"),
        ({"text": "a", "logprob_start_len": [1]}, "logprob_start_len must not be a list"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params must not be a list"),
        ({"text": "a", "rid": ["x"]}, "rid must not be a list"),
        ({"text": "a", "rid": []}, "rid must not be a list"),
        ({"text": ""}, "text must not be empty"),
        ({"text": []}, "text must not be empty"),
        ({"input_embeds": []}, "input_embeds must have"),
        ({"input_embeds": [[]]}, "input_embeds must have"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n must be a whole number, at least 1, got 0"),
    ],
)
def test_lists_and_prompts_that_do_not_fit_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        normalised(**fields)
    assert words in str(raised.value)


def test_lists_that_fit_pass() -> None:
    good = normalised(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}])
    # As stock does it next.
    good.priority = 7
    assert good[1].sampling_params == {"max_new_tokens": 3}
    assert [good[0].priority, good[1].priority] == [7, 7]
    assert normalised(text=["a", "b"], rid=["x", "y"], sampling_params={"n": 3}).rid == ["x", "y"]
    assert normalised(text="", image_data="x").is_single


def test_nothing_is_aborted_later_in_the_name_of_what_is_refused() -> None:
    """Stock aborts what has a stream's id two seconds after its end, and another request may have it."""
    obj = GenerateReqInput(text="a", rid="x", sampling_params={"n": 0})
    with pytest.raises(ValueError, match="n must be"):
        RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, obj)
    assert (obj.is_single, obj.rid) == (False, [])

    def taken(manager: Any, obj: Any, request: Any) -> None:
        raise ValueError("Duplicate request ID detected: x")

    obj = GenerateReqInput(text="a", rid="x")
    with pytest.raises(ValueError, match="Duplicate"):
        LeaveTheRequestOfThatIdAlone.hook(taken, MANAGER, obj, None)
    assert (obj.is_single, obj.rid) == (False, [])
    assert LeaveTheRequestOfThatIdAlone.hook(lambda *given: given[1], MANAGER, obj, None) is obj


def test_what_an_engine_refuses_is_raised_in_streams() -> None:
    """The stock method raises where it is told that nobody streams."""

    async def said(manager: Any, out: Any, state: Any, is_stream: bool) -> bool:
        return is_stream

    def streams(**reason: Any) -> bool:
        out = {"meta_info": {"finish_reason": {"type": "abort", **reason}}}
        return asyncio.run(RaiseRefusalsOfStreams.hook(said, MANAGER, out, None, True))

    assert [streams(status_code=400), streams(status_code=503), streams(status_code=None)] == [False, True, True]


def test_a_body_on_which_stocks_checks_stumble_is_refused() -> None:
    async def check(body: Any) -> Any:
        return body.get("response_format"), []

    async def look_into(fields: Any, body: Any, embed: bool) -> Any:
        return body["response_format"]["type"]

    assert asyncio.run(RefuseBodiesThatFailTheirChecks.hook(check, body={"response_format": 1})) == (1, [])
    for body, at in ((None, ("body",)), ({"response_format": 5}, ("body", "response_format"))):
        with pytest.raises(RequestValidationError) as raised:
            asyncio.run(RefuseBodiesThatFailTheirChecks.hook(look_into, ["field"], body, False))
        assert raised.value.errors()[0]["loc"] == at


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
