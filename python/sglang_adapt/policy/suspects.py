"""Requests that may be why engines die: which of them go on now, and whom a death is put down to.

Requests that lose an engine together go on together, and one that ends every engine would take the others with it. So a
suspect, which the next death would end, goes on alone among suspects until it has passed the point at which its
engine died: then it was not the reason, and the next one is tried.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

PAST_TOKENS = 64
"""A suspect that has given so many tokens more than were known of at its last death has passed that point: of requests
that are not streamed an engine tells every 50 tokens, and runs a step or two ahead of what it tells."""


@dataclass(frozen=True)
class Record:
    """What is known of a request.

    Attributes:
        deaths: engines that died while they ran it.
        tokens: output tokens that are known.
        died_at: how many there were when it lost its last engine.
    """

    deaths: int
    tokens: int
    died_at: int

    def is_suspect(self, limit: int) -> bool:
        """Would the next death be one more than `limit`, and end it?"""
        return self.deaths >= limit

    def is_tried(self, limit: int) -> bool:
        """Is it a suspect that has not passed its last death?"""
        return self.is_suspect(limit) and self.tokens < self.died_at + PAST_TOKENS


def charged(lost: Mapping[Key, Record], limit: int) -> list[Key]:
    """The requests of a dead engine that its death counts for: not for suspects that had passed theirs if there
    was one that had not."""
    if not any(record.is_tried(limit) for record in lost.values()):
        return list(lost)
    return [key for key, record in lost.items() if record.is_tried(limit) or not record.is_suspect(limit)]


def to_go_on(stranded: Mapping[Key, Record], limit: int, *, one_is_tried: bool) -> list[Key]:
    """Of requests that have lost their engine and could go on, those that do: all but suspects, and the first of these
    if none is tried yet."""
    suspects = [key for key, record in stranded.items() if record.is_suspect(limit)]
    held = set(suspects if one_is_tried else suspects[1:])
    return [key for key in stranded if key not in held]
