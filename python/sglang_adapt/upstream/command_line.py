"""What stock refuses of a command line, as one error: it prints all its flags, or raises what its libraries raise."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_TEXT_CHARACTERS = 600
_MODEL_LIBRARIES = {"transformers", "huggingface_hub"}


class StockSettingsError(ValueError):
    """Stock does not take these settings; the text names the flag or model, the reason and the way out."""


@contextmanager
def refusals_told(argv: Sequence[str]) -> Iterator[None]:
    """Within it, what stock's parser and its checks of settings refuse is raised as `StockSettingsError`.

    The parser would print four hundred lines of usage and exit. The checks raise what they or libraries that read the
    model come upon; what is none of these kinds is a fault of a program and stays what it is.

    Args:
        argv: the command line that is parsed.
    """
    parser: Any = argparse.ArgumentParser
    original = parser.error
    parser.error = _refuse
    try:
        yield
    except StockSettingsError:
        raise
    except (ValueError, OSError, AssertionError, ImportError, RuntimeError) as error:
        raise StockSettingsError(_told(error, _model(argv))) from error
    finally:
        parser.error = original


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if unknown is None:
        raise StockSettingsError(f"{message}; --help tells of all flags")
    word = unknown[1].split("=")[0]
    if not word.startswith("-"):
        raise StockSettingsError(f"{word!r} belongs to no flag; --help tells of all flags")
    near = difflib.get_close_matches(word, parser._option_string_actions, n=3, cutoff=0.75)
    meant = f"; did you mean {' or '.join(near)}?" if near else "; --help tells of all flags"
    raise StockSettingsError(f"{word} is not a flag{meant}")


def _told(error: Exception, model: str | None) -> str:
    said = " ".join(str(error).split())[:_TEXT_CHARACTERS] or type(error).__name__
    if model is None or _MODEL_LIBRARIES.isdisjoint(_packages(error.__traceback__)):
        return f"stock sglang does not take these settings ({type(error).__name__}): {said}"
    if model.startswith(("/", ".")) and not Path(model).exists():
        said = "there is no such folder"
    return f"--model-path {model}: {said.removesuffix('.')}; give a folder with a model, or its name on Hugging Face"


def _packages(traceback: TracebackType | None) -> Iterator[str]:
    """The top-level packages that an exception came through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        traceback = traceback.tb_next


def _model(argv: Sequence[str]) -> str | None:
    """The model that a command line names, the last one as stock takes it; None where only its config file does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model", dest="model")
    try:
        named: str | None = parser.parse_known_args(list(argv))[0].model
    except argparse.ArgumentError:
        return None
    return named
