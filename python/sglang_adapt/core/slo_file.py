"""Reads a file of tiers (`--adapt-slo-config`), YAML or JSON. A fault is told with its line and key.

JSON is read as YAML, which it is a part of once its tabs are spaces, so that both have lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sglang_adapt.core.slo import BUILT_IN, SloConfig, config_faults

BUILT_IN_NAME = "built-in"
"""In place of a file: the tiers of `slo.BUILT_IN`."""
MAX_FILE_BYTES = 1_000_000


class SloFileError(ValueError):
    """A file of tiers cannot be used; the text names the file, the line, the key, and what would do."""


def read_slo_config(source: str) -> SloConfig:
    """The tiers of a file, or the built-in ones if `source` is `built-in`.

    Raises:
        SloFileError: it cannot be read, or anything in it is wrong.
    """
    if source == BUILT_IN_NAME:
        return BUILT_IN
    try:
        if (path := Path(source)).exists() and not (path.is_file() or path.is_dir()):
            # A pipe or a device would hold who reads it for ever.
            raise SloFileError(f"{source} is not a regular file; give a YAML or JSON file of tiers")
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise SloFileError(f"{source} has {len(data)} bytes; a file of tiers has at most {MAX_FILE_BYTES}")
        text = data.decode()
    except OSError as error:
        raise SloFileError(f"{source} cannot be read ({error.strerror}); give a YAML or JSON file of tiers") from None
    except UnicodeDecodeError as error:
        raise SloFileError(f"{source} is not UTF-8 ({error.reason} at byte {error.start})") from None
    return parse_slo_config(text, source)


def parse_slo_config(text: str, source: str) -> SloConfig:
    """The tiers in a text.

    Args:
        text: YAML or JSON.
        source: names it in errors.

    Raises:
        SloFileError: with every fault across keys, or the first one in a value.
    """
    if text.lstrip().startswith("{"):
        # A tab in a JSON text is space between its items: inside of strings it would be an error.
        text = text.replace("\t", " ")
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            lines: dict[str, int] = {}
            data = None if root is None else loader.plain(root, "$", lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise SloFileError(f"{source}, line {1 if mark is None else mark.line + 1}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SloFileError(f"{source} is neither YAML nor JSON: {error}") from None
    try:
        config = msgspec.convert(data, SloConfig)
    except msgspec.ValidationError as error:
        raise SloFileError(_told(source, lines, *_parted(str(error)))) from None
    faults = [_told(source, lines, path, fault) for path, fault in config_faults(config)]
    if faults:
        raise SloFileError("; ".join(faults))
    return config


class _Loader(yaml.SafeLoader):
    """Builds plain values and notes on which line each begins."""

    def plain(self, node: Any, path: str, lines: dict[str, int]) -> Any:
        """The value of a node; raises yaml.MarkedYAMLError."""
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, f"{path}[{at}]", lines) for at, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self.construct_object(node, deep=True)
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.MarkedYAMLError(problem=f"{name!r} is not a key", problem_mark=key.start_mark)
            if name in found:
                raise yaml.MarkedYAMLError(problem=f"key {name} is given twice", problem_mark=key.start_mark)
            lines[f"{path}.{name}"] = key.start_mark.line + 1
            found[name] = self.plain(value, f"{path}.{name}", lines)
        return found


_AT = re.compile(r" - at `(?P<path>\$.*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")


def _parted(message: str) -> tuple[str, str]:
    """(path, text) of msgspec's message."""
    found = _AT.search(message)
    path = "$" if found is None else found["path"]
    text = message if found is None else message[: found.start()]
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        return f"{path}.{unknown['key']}", f"there is no key {unknown['key']!r}"
    return path, text


def _told(source: str, lines: dict[str, int], path: str, text: str) -> str:
    key = path
    while path not in lines and path != "$":
        # What is missing has no line; its parent has.
        path = path[: max(path.rfind("."), path.rfind("["))]
    return f"{source}, line {lines.get(path, 1)}, {key.removeprefix('$.')}: {text}"
