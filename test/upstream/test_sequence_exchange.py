"""Tokens for heads and back, between ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_groups import ThreadGroup

from sglang_adapt.upstream.sequence.exchange import Exchange, TokenSlices

WIDTH = 3


def on_ranks(ranks: int, tokens: int, do: Callable[[Exchange], torch.Tensor]) -> list[torch.Tensor]:
    board, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks, timeout=20)
    exchanges = [Exchange(TokenSlices(tokens, r, ranks), ThreadGroup(r, board, barrier)) for r in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(do, exchanges))


def table(tokens: int, columns: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + tokens * columns).view(tokens, columns)


def own_rows(exchange: Exchange, whole: torch.Tensor) -> torch.Tensor:
    """A rank's rows of `[tokens, columns]`; its padding is not a number, which must not get anywhere."""
    s = exchange.slices
    padded = torch.cat([whole, torch.full((s.padding, whole.shape[1]), torch.nan)])
    return padded[s.rank * s.rows : (s.rank + 1) * s.rows].contiguous()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 13])
def test_tokens_become_heads_and_back(ranks: int, tokens: int) -> None:
    whole = table(tokens, ranks * WIDTH)
    heads = on_ranks(ranks, tokens, lambda e: e.tokens_to_heads(own_rows(e, whole)))
    for rank, got in enumerate(heads):
        assert torch.equal(got, whole[:, rank * WIDTH : (rank + 1) * WIDTH])
    rows = on_ranks(ranks, tokens, lambda e: e.heads_to_tokens(heads[e.slices.rank].T.contiguous().T))
    padded = torch.cat([whole, torch.zeros(rows[0].shape[0] * ranks - tokens, ranks * WIDTH)])
    assert torch.equal(torch.cat(rows), padded)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("tokens", "index"), [(13, [0, 6, 12]), (5, [4]), (3, [0, 1, 2]), (1, [0]), (2, [1, 0])])
def test_chosen_rows_come_together_on_every_rank(ranks: int, tokens: int, index: list[int]) -> None:
    whole = table(tokens, WIDTH)
    hidden = whole.clone()
    # What nobody asks for may be anything.
    hidden[[i for i in range(tokens) if i not in index]] = torch.inf
    chosen = torch.tensor(index)
    for got in on_ranks(ranks, tokens, lambda e: e.chosen_tokens(own_rows(e, hidden), chosen)):
        assert torch.equal(got, whole[chosen])


def test_ids_are_padded_with_one_that_every_vocabulary_has() -> None:
    ids = torch.tensor([5, 6, 7])
    assert [TokenSlices(3, rank, 2).own(ids).tolist() for rank in range(2)] == [[5, 6], [7, 0]]
