"""What an engine that prefills tells of the prompts that it is reading."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.handover import PartRead
from sglang_adapt.upstream.handoff import reading

UNIT = 64


class Source:
    """An engine of one rank whose requests lie in pages 0, 1, 2, ...

    Attributes:
        parts, staying: what it has told.
    """

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(page_size=16, chunked_req=None, enable_overlap=True, device="cuda")
        self.parts: list[PartRead] = []
        self.staying: list[str] = []

    def request(self, rid: str, tokens: int, cached: int = 0, most: int = 8) -> Any:
        return SimpleNamespace(
            rid=rid,
            origin_input_ids=[5] * tokens,
            output_ids=[],
            prefix_indices=[0] * cached,
            sampling_params=SimpleNamespace(max_new_tokens=most),
            req_pool_idx=1,
            to_finish=None,
            finished=lambda: False,
        )

    def launch(self, *ending: Any, chunked: Any = None) -> None:
        """A batch has been launched; what comes before the next."""
        self.scheduler.chunked_req = chunked
        reading.launched(self.scheduler, ending)

    def results(self) -> list[tuple[int, int]]:
        """The results of a batch are in; the parts that are told, from and to."""
        before = len(self.parts)
        reading.PartsAreTold.hook(None, self.scheduler)
        return [(part.first, part.end) for part in self.parts[before:]]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    there = Source()
    monkeypatch.setattr(reading, "pages_of", lambda scheduler, reqs, tokens: [list(range(tokens[0] // 16))])
    monkeypatch.setattr(reading, "reason_to_stay", lambda req: "a session" if req.rid == "stays" else None)
    reading.tell_parts(
        UNIT, lambda scheduler, part: there.parts.append(part), lambda scheduler, rids: there.staying.extend(rids)
    )
    yield there
    reading.tell_no_parts()


def test_a_prompt_is_told_of_and_then_its_parts(source: Source) -> None:
    req = source.request("a", 300, most=8)
    source.launch(chunked=req)
    assert source.parts == [PartRead("a", 0, 0, 301, 308, [[]])]
    assert source.results() == []
    # The second part is being computed: the first is done, less what fills no block everywhere.
    req.prefix_indices = [0] * 100
    assert source.results() == [(0, 64)]
    assert source.parts[-1].blocks == [[0, 1, 2, 3]]
    assert source.results() == []
    req.prefix_indices = [0] * 200
    source.launch(req)
    assert source.results() == [(64, 192)]
    assert source.parts[-1].blocks == [[4, 5, 6, 7, 8, 9, 10, 11]]
    # With its first token it leaves, with all that it has.
    req.output_ids, req.prefix_indices = [7], [0] * 300
    assert source.results() == []
    reading.left(source.scheduler, [req])
    assert not source.staying


def test_what_was_told_of_and_stays_is_told(source: Source) -> None:
    gone, kept, short, alone = (
        source.request(rid, tokens) for rid, tokens in (("gone", 256), ("kept", 700), ("short", 255), ("alone", 900))
    )
    source.launch(gone, kept, short, chunked=alone)
    # Short ones are not worth a word.
    assert [part.rid for part in source.parts] == ["gone", "kept", "alone"]
    reading.left(source.scheduler, [gone, short])
    assert source.staying == ["kept"]
    # Its client has gone.
    source.launch()
    reading.left(source.scheduler, [])
    assert source.staying == ["kept", "alone"]


def test_a_prompt_that_is_computed_already_is_not_told_of(source: Source) -> None:
    source.scheduler.device = "cpu"
    req, other = source.request("a", 900), source.request("b", 900)
    source.launch(req, chunked=other)
    # What is read in parts has the next part before it.
    assert [part.rid for part in source.parts] == ["b"]


def test_what_was_found_in_the_cache_goes_ahead_at_once(source: Source) -> None:
    source.launch(source.request("a", 300, cached=250))
    assert [(part.first, part.end, part.blocks) for part in source.parts] == [(0, 192, [list(range(12))])]


def test_what_will_not_be_handed_over_is_not_told_of(source: Source) -> None:
    finished, ending = source.request("finished", 500), source.request("ending", 500)
    finished.finished, ending.to_finish = lambda: True, object()
    source.launch(source.request("stays", 500), source.request("one token", 500, most=1), finished, ending)
    assert source.parts == []
    reading.left(source.scheduler, [])
    assert source.staying == []


def test_a_client_that_goes_ends_what_is_told(source: Source) -> None:
    req = source.request("a", 300)
    source.launch(chunked=req)
    req.prefix_indices, req.req_pool_idx = [0] * 128, None
    assert source.results() == []


def test_nothing_is_told_after_the_end(source: Source) -> None:
    req = source.request("a", 300)
    source.launch(chunked=req)
    reading.tell_no_parts()
    req.prefix_indices = [0] * 128
    assert source.results() == []
    source.launch(chunked=req)
    reading.left(source.scheduler, [])
    assert (len(source.parts), source.staying) == (1, [])
