"""Numbers as people write them. Python also takes `1_0`, full-width and other digits, which are slips here."""

from __future__ import annotations

import argparse


class NotANumberError(argparse.ArgumentTypeError, ValueError):
    """A text is no number in plain digits; the message says so. As the type of a flag it is told under its name."""


def whole(text: str) -> int:
    """A whole number in the digits 0 to 9, with a sign if wanted. Raises NotANumberError."""
    try:
        return int(_plain(text))
    except ValueError:
        raise NotANumberError(f"{text!r} is not a whole number; write it in digits, e.g. 10") from None


def number(text: str) -> float:
    """A number in the digits 0 to 9, as `float` reads them; so it may be infinite. Raises NotANumberError."""
    try:
        return float(_plain(text))
    except ValueError:
        raise NotANumberError(f"{text!r} is not a number; write it in digits, e.g. 10 or 0.5") from None


def _plain(text: str) -> str:
    """The text. Raises ValueError if it has what only Python takes for a part of a number."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text
