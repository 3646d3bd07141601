"""Which engine is believed to have a prompt's beginning cached: the one that was sent a prompt with it last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_LENGTHS = (1024, 256, 64)
"""Lengths of prompts' beginnings, in tokens, by which engines are remembered."""
_REMEMBERED = 8192

Prefix = tuple[int, bytes]
"""A beginning of a prompt: its tokens, and a key of what they are."""


def prefixes_of(ids: bytes) -> tuple[Prefix, ...]:
    """Beginnings of a prompt, the longest first; `ids` are its tokens, int64, or nothing."""
    lengths = (length for length in _LENGTHS if len(ids) >= 8 * length)
    return tuple((length, blake2b(ids[: 8 * length], digest_size=16).digest()) for length in lengths)


class Prefixes:
    """The last `_REMEMBERED` beginnings that were sent."""

    def __init__(self) -> None:
        self._engines: OrderedDict[bytes, str] = OrderedDict()

    def sent(self, prefixes: Sequence[Prefix], engine: str) -> None:
        """A prompt that begins so was sent to an engine."""
        for _, key in prefixes:
            self._engines[key] = engine
            self._engines.move_to_end(key)
        while len(self._engines) > _REMEMBERED:
            self._engines.popitem(last=False)

    def cached(self, engine: str, prefixes: Sequence[Prefix]) -> int:
        """Tokens of a prompt that an engine is believed to have; `prefixes` of it, the longest first."""
        return next((length for length, key in prefixes if self._engines.get(key) == engine), 0)
