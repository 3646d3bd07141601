"""Seeded sampling: a row's draw depends on that row alone, and follows the distribution."""

from __future__ import annotations

import pytest
import torch

from sglang_adapt.upstream.seeds import draw

VOCABULARY = 8


def filters(rows: int, top_k: int = VOCABULARY, top_p: float = 1.0, min_p: float = 0.0) -> tuple[torch.Tensor, ...]:
    return torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)


def some_probs(rows: int) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)), dim=-1)


def test_a_row_alone_draws_what_it_draws_among_others() -> None:
    probs, seeds, positions = some_probs(50), torch.arange(50) - 20, torch.arange(50) % 7
    together = draw(probs, seeds, positions, *filters(50))
    alone = [draw(probs[[row]], seeds[[row]], positions[[row]], *filters(1)).item() for row in range(50)]
    assert together.tolist() == alone


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_draws_follow_the_distribution(vary: str) -> None:
    """A draw a seed, or a draw a position, of one distribution: every frequency within five standard errors."""
    count = 20_000
    probs = some_probs(1)
    varied, fixed = torch.arange(count), torch.full((count,), 3)
    seeds, positions = (varied, fixed) if vary == "seeds" else (fixed, varied)
    drawn = draw(probs.expand(count, -1), seeds, positions, *filters(count))
    frequency = torch.bincount(drawn, minlength=VOCABULARY) / count
    error = torch.sqrt(probs[0] * (1 - probs[0]) / count)
    assert ((frequency - probs[0]).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("limits", "left"), [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 0.65}, 2), ({"min_p": 0.3}, 3)]
)
def test_filters_leave_what_they_should(limits: dict[str, float], left: int) -> None:
    probs = torch.tensor([0.05, 0.5, 0.02, 0.2, 0.15, 0.04, 0.03, 0.01])
    count = 2_000
    drawn = draw(probs.expand(count, -1), torch.arange(count), torch.zeros(count), *filters(count, **limits))
    assert set(drawn.tolist()) == {1, 3, 4} if left == 3 else set(drawn.tolist()) == set([1, 3][:left])
