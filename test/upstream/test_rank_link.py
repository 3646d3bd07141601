"""What the ranks of an engine tell one another. How they are connected is tested with engines, test/handoff."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from sglang_adapt.upstream.rank_link import RankLink

RANKS = 3


@pytest.fixture
def ends() -> Iterator[tuple[list[Connection], list[Connection]]]:
    """Rank 0's ends and those of the other ranks."""
    pairs = [Pipe() for _ in range(RANKS - 1)]
    yield [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.fixture
def on_all(ends: tuple[list[Connection], list[Connection]]) -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with each rank's link and number, all at once; returns what they return."""
    links = [RankLink(ends[0], None), *(RankLink((), end) for end in ends[1])]
    with ThreadPoolExecutor(RANKS) as pool:
        yield lambda function: list(pool.map(function, links, range(RANKS)))


def test_messages_reach_all_ranks_in_order(on_all: Callable[..., list[Any]]) -> None:
    """Also none at all, and ones larger than a socket's buffer."""
    sent: list[list[Any]] = [[], ["a", {"b": 1}], [b"x" * 5_000_000], []]

    def run(link: RankLink, rank: int) -> list[Any]:
        return [link.broadcast(content if rank == 0 else None) for content in sent]

    assert on_all(run) == [sent] * RANKS


def test_rank_0_gets_what_each_rank_says(on_all: Callable[..., list[Any]]) -> None:
    large = 3_000_000
    assert on_all(lambda link, rank: link.gather(bytes([rank]) * large)) == [
        [bytes([rank]) * large for rank in range(RANKS)],
        None,
        None,
    ]


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_all_ranks_know_whether_it_is_true_on_all(on_all: Callable[..., list[Any]], failing: int | None) -> None:
    assert on_all(lambda link, rank: link.all_true(rank != failing)) == [failing is None] * RANKS


def test_a_rank_that_ends_is_found_out_by_the_others(ends: tuple[list[Connection], list[Connection]]) -> None:
    ends[1][0].close()
    with pytest.raises((EOFError, OSError)):
        RankLink(ends[0], None).gather(None)
    ends[0][1].close()
    with pytest.raises((EOFError, OSError)):
        RankLink((), ends[1][1]).broadcast(None)
