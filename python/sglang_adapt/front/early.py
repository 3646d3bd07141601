"""Refusals that are known when a request's last byte has come: told without a task, and without stock's layers.

What decides is the gate, as for all others: here only a refusal that it remembers is told again. Stock's layers in
front of ours check the API key and count; so a request is refused here only if one of the same path and key has come
through them before, and is counted as they count.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_adapt.front.gate import Gate
from sglang_adapt.upstream.early_answers import EarlyAnswer
from sglang_adapt.upstream.http_counts import early_counter
from sglang_adapt.upstream.known_heads import Head, Headers, head_of

_MOST_KNOWN = 1024
"""Paths and keys that are remembered; servers have few."""


class EarlyRefusals:
    """See the module; an `Answerer` of `upstream/early_answers.py`.

    Args:
        gate: which remembers refusals.
        counts: stock counts HTTP requests (`--enable-metrics`).
    """

    def __init__(self, gate: Gate, counts: bool) -> None:
        self._gate = gate
        self._counts = counts
        self._let_in: set[tuple[str, bytes | None]] = set()
        self._admits: Callable[[], bool] = lambda: False

    def begin(self, admits: Callable[[], bool]) -> None:
        """From now on; `admits` tells whether the server takes new work at all."""
        self._admits = admits

    def came_in(self, path: str, headers: Headers) -> None:
        """A request of this path and key has passed stock's layers."""
        if len(self._let_in) >= _MOST_KNOWN:
            self._let_in.clear()
        self._let_in.add(_path_and_key(head_of(path, headers)))

    @property
    def active(self) -> bool:
        """Whether any refusal is remembered."""
        return self._gate.refuses

    def answer(self, head: Head, body: bytes | bytearray) -> EarlyAnswer | None:
        """The refusal of a request, or None if it has to come in."""
        if _path_and_key(head) not in self._let_in or not self._admits():
            return None
        refusal = self._gate.refused_already(head.first, body)
        if refusal is None:
            return None
        if self._counts:
            early_counter(head.path, refusal.status)()
        return refusal.told(head.path)


def _path_and_key(head: Head) -> tuple[str, bytes | None]:
    return head.path, head.first.get(b"authorization")
