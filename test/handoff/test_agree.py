"""What all ranks begin together: nothing is under way where one of them has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.upstream.handoff import agree

ALONE = SimpleNamespace(ps=SimpleNamespace(tp_size=1))


def begun(waited: list[str]) -> Any:
    return SimpleNamespace(wait=lambda: waited.append("a"))


def test_what_was_begun_is_waited_for_later() -> None:
    waited: list[str] = []
    copy = agree.start_on_all_ranks(ALONE, "copy", lambda: begun(waited))
    assert waited == []
    copy.wait()
    assert waited == ["a"]


def test_what_fails_here_is_raised() -> None:
    def start() -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        agree.start_on_all_ranks(ALONE, "copy", start)


def test_if_another_rank_fails_this_one_has_ended_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(agree, "true_on_all_ranks", lambda scheduler, mine: False)
    with pytest.raises(agree.OtherRankFailedError, match="failed to copy"):
        agree.start_on_all_ranks(ALONE, "copy", lambda: begun(waited))
    assert waited == ["a"]
