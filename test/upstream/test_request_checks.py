"""What would end an engine is found in the front, and named."""

from __future__ import annotations

from typing import Any

import pytest
from router_fakes import generate
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_adapt.upstream.request_checks import RefuseBatchesThatDoNotFit, model_fault, wire_fault
from sglang_adapt.upstream.wire import WARMUP_RID_PREFIX

VOCAB = 100


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
    ],
)
def test_what_the_model_cannot_take(fields: dict[str, Any], ids: list[int], words: str) -> None:
    fault = model_fault(request(**fields), ids, VOCAB)
    assert fault is not None
    assert words in fault


def test_a_list_that_is_shorter_than_the_batch() -> None:
    obj = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}])
    with pytest.raises(ValueError, match="do not fit its prompts"):
        RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, obj)
    good = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}])
    RefuseBatchesThatDoNotFit.hook(GenerateReqInput.normalize_batch_and_arguments, good)
    assert good[1].sampling_params == {"max_new_tokens": 3}


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
