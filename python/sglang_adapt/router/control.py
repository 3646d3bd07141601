"""Stock control requests (flush cache, server info, profile, ...): to all engines, one merged answer back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


class ControlFanOut:
    """Collects the engines' answers to control requests.

    The tokenizer manager keeps one request of a kind open at a time (sglang/srt/managers/communicator.py), so an
    answer belongs to the open request of its kind. An engine that dies is not waited for. A request that came when no
    engine was up is kept and asked of the next one that comes up; one on which every engine has died ends with a
    failure, because it may be what they died of.

    Args:
        reply_tags: request tag to answer tag, for the kinds that are answered.
        merge: answers by engine to one answer.
        failure: the answer, by answer tag and reason, to a request that cannot be answered.
        answer: sends one answer to the tokenizer manager.
    """

    def __init__(
        self,
        reply_tags: dict[bytes, bytes],
        merge: Callable[[dict[str, bytes]], bytes],
        failure: Callable[[bytes, str], bytes],
        answer: Callable[[bytes], None],
    ) -> None:
        self._reply_tags = reply_tags
        self._merge = merge
        self._failure = failure
        self._answer = answer
        self._lost: dict[bytes, list[str]] = {}
        self._order: dict[bytes, list[str]] = {}
        self._waiting: dict[bytes, set[str]] = {}
        self._replies: dict[bytes, dict[str, bytes]] = {}
        self._asked: dict[bytes, bytes] = {}

    def open(self, tag: bytes, request: bytes, engines: Iterable[str]) -> None:
        """A request of kind `tag` was sent to `engines`, the preferred ones first."""
        reply = self._reply_tags.get(tag)
        if reply is None:
            return
        self._order[reply] = list(engines)
        self._waiting[reply] = set(self._order[reply])
        self._replies[reply] = {}
        self._lost[reply] = []
        self._asked[reply] = request

    def reply(self, engine: str, tag: bytes, data: bytes) -> None:
        """An engine's answer; the last one of a request sends the merged answer."""
        waiting = self._waiting.get(tag)
        if waiting is None or engine not in waiting:
            logger.warning("%s answered %s, which nobody asked of it; dropped", engine, tag.decode())
            return
        waiting.remove(engine)
        self._replies[tag][engine] = data
        self._finish(tag)

    def engine_lost(self, engine: str, why: str) -> None:
        """An engine died: answer what only it still owed."""
        for tag, waiting in list(self._waiting.items()):
            if engine in waiting:
                waiting.remove(engine)
                self._lost[tag].append(why)
                self._finish(tag)

    def engine_up(self, engine: str) -> list[bytes]:
        """The requests that came when no engine was up; they are now this engine's to answer."""
        orphans = [tag for tag, waiting in self._waiting.items() if not waiting and not self._replies[tag]]
        for tag in orphans:
            self._waiting[tag].add(engine)
            self._order[tag] = [engine]
        return [self._asked[tag] for tag in orphans]

    def _finish(self, tag: bytes) -> None:
        replies = self._replies[tag]
        if self._waiting[tag]:
            return
        if not replies:
            self._answer(self._failure(tag, " | ".join(self._lost[tag])))
            self._forget(tag)
            return
        in_order = {engine: replies[engine] for engine in self._order[tag] if engine in replies}
        self._forget(tag)
        self._answer(self._merge(in_order))

    def _forget(self, tag: bytes) -> None:
        del self._order[tag], self._waiting[tag], self._replies[tag], self._asked[tag], self._lost[tag]
