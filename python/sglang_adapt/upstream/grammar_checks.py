"""Grammars of requests on which stock's compiler (xgrammar 0.2) would end the engine, found before they reach it.

A grammar that is merely wrong is stock's to refuse, with a 400 that says why. But on a regular expression that begins
with NUL, and on a schema with many thousands of levels, the compiler ends the process, and every request on it; with a
few hundred levels it takes minutes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST_LEVELS = 128
"""Brackets inside of brackets; compiling takes 0.2 s at 128 levels and grows with their third power."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_JSON = frozenset(("json_schema", "structural_tag"))
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


def grammar_fault(sampling_params: Mapping[str, Any]) -> str | None:
    """Why an engine would not survive a request's grammar, naming the parameter, or None.

    Args:
        sampling_params: of stock's request, by name; what is no text is left to the check of types.
    """
    for name in _GRAMMARS:
        text = sampling_params.get(name)
        if not isinstance(text, str):
            continue
        in_json = name in _JSON
        if "\0" in text or (in_json and _ESCAPED_NUL.search(text)):
            return f"{name} has the character NUL (\\u0000), which no grammar can have."
        if in_json and too_deep(text):
            return f"{name} is nested more than {MOST_LEVELS} levels deep; give a flatter one."
    return None


def too_deep(text: str) -> bool:
    """Is a JSON text, valid or not, nested more than `MOST_LEVELS` deep? Brackets in strings do not count."""
    if text.count("[") + text.count("{") <= MOST_LEVELS:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MOST_LEVELS:
                return True
        elif found[0] in "]}":
            depth -= 1
    return False
