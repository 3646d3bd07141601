"""What each sampling parameter may be. A request that breaks a rule gets a 400 that names it and says what is allowed.

Stock checks some ranges, and the types of none. What it lets through ends an engine (a repetition penalty that is 0 in
32 bits makes logits infinite, `is_normalized` leaves out its checks), is answered with a text that names nothing, or
means nothing. Rules are stock's ranges (sglang/srt/sampling/sampling_params.py) within what 32-bit numbers hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 1e30
"""Of temperatures and logit biases: divided by the least temperature, 1e-6, such a logit is still finite in 32 bits."""
LEAST_REPETITION_PENALTY = 1e-6
_INT32, _INT64 = 1 << 31, 1 << 63
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclass(frozen=True)
class Rule:
    """One parameter's.

    Attributes:
        holds: for this value, which is not None; None is stock's default.
        allowed: in words, after "must be".
    """

    holds: Callable[[Any], bool]
    allowed: str


def _whole(least: int, beyond: int = _INT64) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < beyond


def _number(least: float, most: float) -> Callable[[Any], bool]:
    # Nothing compares with NaN.
    return lambda value: type(value) in (int, float) and least <= value <= most


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return _text(value) or (isinstance(value, list) and all(map(_text, value)))


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or _whole(-_INT64)(one) for one in value)


def _biases(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(token, str) and re.fullmatch("[0-9]{1,10}", token) and _number(-LARGEST, LARGEST)(bias)
        for token, bias in value.items()
    )


_FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
_TEXT = Rule(_text, "a text")
_WHOLE = "a whole number"

RULES: Mapping[str, Rule] = {
    "max_new_tokens": Rule(_whole(0), f"{_WHOLE}, at least 0"),
    "min_new_tokens": Rule(_whole(0), f"{_WHOLE}, at least 0 and at most max_new_tokens"),
    "n": Rule(_whole(1), f"{_WHOLE}, at least 1"),
    "temperature": Rule(_number(0, LARGEST), f"a number from 0 to {LARGEST:g}"),
    "top_p": Rule(_number(1e-30, 1), "a number above 0 and at most 1"),
    "top_k": Rule(
        lambda value: value == -1 if type(value) is int and value < 1 else _whole(1, _INT32)(value),
        f"{_WHOLE}: -1 (all tokens), or at least 1 and below {_INT32}",
    ),
    "min_p": Rule(_number(0, 1), "a number from 0 to 1"),
    "frequency_penalty": Rule(_number(-2, 2), "a number from -2 to 2"),
    "presence_penalty": Rule(_number(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": Rule(
        _number(LEAST_REPETITION_PENALTY, 2), f"a number from {LEAST_REPETITION_PENALTY:g} to 2 (1: no penalty)"
    ),
    "stop": Rule(_texts, "a text or a list of texts"),
    "stop_regex": Rule(_texts, "a regular expression or a list of them, as texts"),
    "stop_token_ids": Rule(_token_ids, "a list of token ids"),
    "logit_bias": Rule(_biases, f"an object of token ids with a number each, from {-LARGEST:g} to {LARGEST:g}"),
    "sampling_seed": Rule(_whole(-_INT64), f"{_WHOLE} of 64 bits"),
    "stream_interval": Rule(_whole(1, _INT32), f"{_WHOLE}, at least 1"),
    "json_schema": Rule(_text, "a JSON schema as a text"),
    "regex": Rule(_text, "a regular expression as a text"),
    "ebnf": Rule(_text, "a grammar as a text"),
    "structural_tag": Rule(_text, "a structural tag as a text"),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
    "custom_params": Rule(lambda value: isinstance(value, dict), "an object"),
}


def sampling_fault(given: object, at: str = "") -> str | None:
    """Which sampling parameter is not as it may be, and what it may be, or None.

    Args:
        given: `sampling_params` of one prompt as a client sent them.
        at: what goes before the name, where there are several prompts: `sampling_params[1].`.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        return f"{at.rstrip('.') or 'sampling_params'} must be an object of parameters, got {shown(given)}."
    for name, value in given.items():
        rule = RULES.get(name)
        if rule is None:
            return f"{at}{shown_name(name)} is no sampling parameter; there are {', '.join(sorted(RULES))}."
        # Stock compares the number of samples before it fills in defaults.
        if (value is not None or name == "n") and not rule.holds(value):
            return f"{at}{name} must be {rule.allowed}, got {shown(value)}."
    least, most = given.get("min_new_tokens") or 0, given.get("max_new_tokens", 128)
    if most is not None and least > most:
        return f"{at}min_new_tokens must be from 0 to max_new_tokens, which is {most}, got {least}."
    grammars = [name for name in _GRAMMARS if given.get(name)]
    if len(grammars) > 1:
        return f"{at}{grammars[0]} cannot be set together with {grammars[1]}; give one of {', '.join(_GRAMMARS)}."
    expressions = given.get("stop_regex") or ()
    for expression in [expressions] if isinstance(expressions, str) else expressions:
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            return f"{at}stop_regex must be a regular expression of Python: {shown(expression)}: {error}."
    return None


def shown(value: object) -> str:
    """A client's value as it may stand in an answer."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def shown_name(name: object) -> str:
    """A client's name of a parameter: as it is, if it can be one."""
    text = str(name)
    return text if text.isidentifier() and text.isascii() and len(text) <= 60 else shown(text)
