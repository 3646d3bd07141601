"""Each sampling parameter has a rule, and what breaks it is named with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_adapt.upstream.sampling_rules import LARGEST, RULES, sampling_fault

_OF_STOCK_ITSELF = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "x", True, [1], 1 << 63],
    "min_new_tokens": [-1, 1.5, "x", True],
    "n": [0, -1, 1.5, "x", True, [1], None],
    "temperature": ["hot", -1, NAN, INF, True, [1], 1e300, 2 * LARGEST],
    "top_p": ["x", 0, -1, 2, NAN, 1e-300],
    "top_k": ["x", 0, -5, 1.5, 1 << 31, True, -(1 << 40)],
    "min_p": ["x", -1, 2, NAN],
    "frequency_penalty": ["x", -3, 3, NAN, INF],
    "presence_penalty": ["x", -3, 3, NAN],
    "repetition_penalty": ["x", 0, -1, 3, NAN, 1e-300, 1e-7],
    "stop": [5, [5], {"a": 1}, [["a"]]],
    "stop_regex": [5, "(", ["a", "["], [5]],
    "stop_token_ids": ["a", 5, [1.5], ["a"], [True], [1 << 63]],
    "logit_bias": [[1], {"a": 1}, {"1": "x"}, {"1": NAN}, {"1": 1e300}, {"-1": 1}, {"\u0661": 1}, {"1": None}],
    "sampling_seed": ["x", 1 << 63, 1.5],
    "stream_interval": ["x", -1, 0, 1.5],
    "json_schema": [5, {"type": "object"}],
    "regex": [5, ["a"]],
    "ebnf": [5],
    "structural_tag": [5, {}],
    "ignore_eos": ["x", 5],
    "skip_special_tokens": ["x", 1],
    "spaces_between_special_tokens": ["x"],
    "no_stop_trim": [5],
    "custom_params": [5, [1]],
}
GOOD: dict[str, list[Any]] = {
    "max_new_tokens": [0, 4096],
    "min_new_tokens": [0, 5],
    "n": [1, 1024],
    "temperature": [0, 0.0, 1, 1e-9, LARGEST],
    "top_p": [1, 1.0, 0.01],
    "top_k": [-1, 1, (1 << 31) - 1],
    "min_p": [0, 1],
    "frequency_penalty": [-2, 2.0],
    "presence_penalty": [-2, 2],
    "repetition_penalty": [1, 0.5, 2],
    "stop": ["", "a", [], ["a", "b"]],
    "stop_regex": ["", "a+", ["(a|b)*"]],
    "stop_token_ids": [[], [1, None], [-1], [10**12]],
    "logit_bias": [{}, {"0": 1}, {"5": -100.5}],
    "sampling_seed": [0, -1, (1 << 63) - 1],
    "stream_interval": [1, 100],
    "json_schema": ["", "{}"],
    "regex": ["a"],
    "ebnf": ['root ::= "a"'],
    "structural_tag": ["{}"],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "no_stop_trim": [True],
    "custom_params": [{}, {"a": 1}],
}


def test_each_parameter_of_stock_has_a_rule_and_cases() -> None:
    assert set(RULES) == set(SamplingParams.__struct_fields__) - _OF_STOCK_ITSELF
    assert set(BAD) == set(GOOD) == set(RULES)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_breaks_a_rule_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    assert (sampling_fault({name: value}) or "").startswith(f"{name} must be ")
    at = "sampling_params[3]."
    assert (sampling_fault({"top_p": 0.5, name: value}, at) or "").startswith(f"{at}{name} must be ")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_what_keeps_it_passes(name: str, value: Any) -> None:
    assert sampling_fault({name: value}) is None
    if name != "n":
        assert sampling_fault({name: None}) is None


@pytest.mark.parametrize("name", [*sorted(_OF_STOCK_ITSELF), "no_such", "", "a b", "x" * 500, "\u202e"])
def test_what_is_no_parameter_is_refused_with_those_that_are(name: str) -> None:
    fault = sampling_fault({name: 1})
    assert fault is not None and "is no sampling parameter; there are custom_params, " in fault
    assert fault.isascii() and len(fault) < 600


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens must be from 0 to max_new_tokens, which is 2"),
        ({"min_new_tokens": 129}, "min_new_tokens must be from 0 to max_new_tokens, which is 128"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema cannot be set together with regex"),
        (5, "sampling_params must be an object of parameters, got 5"),
    ],
)
def test_what_does_not_go_together(given: Any, words: str) -> None:
    assert words in (sampling_fault(given) or "")


def test_a_long_value_is_cut() -> None:
    assert len(sampling_fault({"temperature": "x" * 10_000}) or "") < 200


def test_none_is_what_stock_has() -> None:
    assert sampling_fault(None) is None
    assert sampling_fault({"max_new_tokens": None, "min_new_tokens": 500}) is None
