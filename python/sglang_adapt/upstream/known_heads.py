"""What a request says before its body, known by its bytes: clients say the same each time, but for the length.

Reading the head is most of what reading a request costs. A head that has been read once need not be read again: the
same bytes between two requests mean the same. Of the content-length only the digits may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Headers = Sequence[tuple[bytes, bytes]]

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})\r\n")
_MOST_HEAD = 4096
"""Bytes of the longest head that is kept."""
_MOST_KNOWN = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What a POST says before its body.

    Attributes:
        path: of the ASGI scope.
        first: headers by lower-case name; of each name the first.
    """

    path: str
    first: Mapping[bytes, bytes]


def head_of(path: str, headers: Headers) -> Head:
    """The head of an ASGI scope."""
    return Head(path, dict(reversed(headers)))


class KnownHeads:
    """See the module. Holds `_MOST_KNOWN` heads of at most `_MOST_HEAD` bytes, and begins anew when there are more."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def whole(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body of a request, if `data` is just one with a known head; to be asked between two requests."""
        cut = _cut(data)
        if cut is None:
            return None
        key, body_at, length = cut
        head = self._known.get(key)
        return None if head is None or len(data) != body_at + length else (head, data[body_at:])

    def add(self, data: bytes, head: Head, headers: Headers, body_bytes: int) -> None:
        """Remember the head of a request that has been read and accepted as HTTP.

        Args:
            data: the bytes, from between two requests on; if there is more or less in them than it, nothing is done.
            head: as it was read.
            headers: all of them.
            body_bytes: of the body that was read.
        """
        names = [name for name, _ in headers]
        cut = _cut(data)
        if cut is None or names.count(b"content-length") != 1 or b"transfer-encoding" in names:
            return
        key, body_at, length = cut
        if length != body_bytes or len(data) != body_at + length:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = head


def _cut(data: bytes) -> tuple[bytes, int, int] | None:
    """Of a request's bytes: the head without the digits of its length, where its body begins, and that length."""
    end = data.find(b"\r\n\r\n", 0, _MOST_HEAD)
    if end < 0 or (found := _LENGTH.search(data, 0, end + 2)) is None:
        return None
    start, stop = found.span(1)
    return data[:start] + data[stop:end], end + 4, int(data[start:stop])
