"""What stock refuses of a command line, as one error: it prints all its flags, or raises what its libraries raise."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

_TEXT_CHARACTERS = 600
_MODEL_LIBRARIES = {"transformers", "huggingface_hub"}


class StockSettingsError(ValueError):
    """Stock does not take these settings; the text names the flag or model, the reason and the way out."""


@contextmanager
def parser_told() -> Iterator[None]:
    """Within it, stock's parser raises `StockSettingsError` instead of printing four hundred lines of usage to exit."""
    parser: Any = argparse.ArgumentParser
    original = parser.error
    parser.error = _refuse
    try:
        yield
    finally:
        parser.error = original


@contextmanager
def refusals_told(flag: str, model: str | None) -> Iterator[None]:
    """Within it, what stock refuses of settings or of a model is raised as `StockSettingsError`.

    Stock raises what it or the libraries that read the model come upon. What is none of these kinds is a fault of a
    program and stays what it is.

    Args:
        flag: that says which model.
        model: its value, a folder or a name; None if it is not known.
    """
    try:
        yield
    except StockSettingsError:
        raise
    except AttributeError as error:
        # Stock looks a level up among the names of this module.
        if error.obj is not logging:
            raise
        level = str(error.name).lower()
        raise StockSettingsError(f"--log-level {level}: give debug, info, warning, error or critical") from error
    except (ValueError, OSError, AssertionError, ImportError, RuntimeError) as error:
        logger.debug("where stock refuses:", exc_info=error)
        raise StockSettingsError(_told(error, flag, model)) from error


def named_model(argv: Sequence[str]) -> str | None:
    """The model that a command line names, the last one as stock takes it; None where only its config file does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model", dest="model")
    try:
        named: str | None = parser.parse_known_args(list(argv))[0].model
    except argparse.ArgumentError:
        return None
    return named


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


def _told(error: Exception, flag: str, model: str | None) -> str:
    said = " ".join(str(error).split())[:_TEXT_CHARACTERS] or type(error).__name__
    if model is None or _MODEL_LIBRARIES.isdisjoint(_packages(error.__traceback__)):
        return f"stock sglang does not take these settings ({type(error).__name__}): {said}"
    if model.startswith(("/", ".")) and not Path(model).exists():
        said = "there is no such folder"
    return f"{flag} {model}: {said.removesuffix('.')}; give a folder with a model, or its name on Hugging Face"


def _packages(traceback: TracebackType | None) -> Iterator[str]:
    """The top-level packages that an exception came through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        traceback = traceback.tb_next
