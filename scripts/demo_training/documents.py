"""The two plain shapes of training text: a running document and a dictionary entry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A heading and the paragraphs below it, each one line without markup."""

    source: str
    heading: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class WordEntry:
    """One word with its first meaning; `example` is a sentence with the word, or empty."""

    word: str
    kind: str
    category: str
    meaning: str
    example: str
