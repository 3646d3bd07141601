"""Times between and beyond what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adapt.policy.grid import OUTSIDE_MARGIN, Grid

sizes = st.integers(0, 5000)
points = st.lists(st.tuples(sizes, sizes, st.integers(1, 10_000)), min_size=1, max_size=12)


@given(points, sizes, sizes, sizes, sizes)
@settings(deadline=None)
def test_grid_never_falls(known: list[tuple[int, int, int]], x: int, y: int, dx: int, dy: int) -> None:
    grid = Grid(known)
    assert grid.at(x + dx, y + dy) >= grid.at(x, y) - 1e-6 * grid.at(x, y)


@given(points)
@settings(deadline=None)
def test_grid_is_never_below_what_was_measured(known: list[tuple[int, int, int]]) -> None:
    grid = Grid(known)
    for x, y, ms in known:
        assert grid.at(x, y) >= ms - 1e-9


def test_grid_between_below_and_above() -> None:
    grid = Grid([(10, 0, 10.0), (20, 0, 30.0), (40, 0, 50.0)])
    assert grid.at(15, 0) == pytest.approx(20.0)
    assert grid.at(1, 0) == 10.0
    # The trend has 1.2 ms a token: the first step of 2 and the last of 1 are both within it.
    assert grid.at(50, 0) == pytest.approx(50.0 + 10 * 1.2 * OUTSIDE_MARGIN, rel=0.01)
    assert Grid([(10, 5, 10.0)]).at(20, 5) == pytest.approx(10.0 + 10 * OUTSIDE_MARGIN)
    # Nothing is known of the second size: a token of it costs what one of the first does.
    assert Grid([(10, 0, 10.0), (20, 0, 20.0)]).at(20, 8) == pytest.approx(20.0 + 8 * OUTSIDE_MARGIN)


def test_cells_that_were_not_measured_are_as_the_trend_has_them_and_not_faster_than_smaller_ones() -> None:
    grid = Grid([(1, 100, 5.0), (8, 800, 9.0), (8, 8000, 20.0)])
    assert 5.0 < grid.at(1, 8000) <= 20.0
    assert grid.at(8, 100) <= 9.0
    assert Grid([(4, 10, 9.0), (8, 10, 5.0), (8, 20, 5.0)]).at(8, 20) == 9.0


@given(st.floats(0.0, 0.2), st.floats(0.0, 0.002), st.lists(st.floats(0.95, 1.05), min_size=15, max_size=15))
@settings(deadline=None)
def test_scatter_says_nothing_of_what_lies_beyond(a_request: float, a_token: float, scatter: list[float]) -> None:
    """Places as a profile has them: two totals of tokens that are near to each other, of very different batches."""

    def real(batch: float, tokens: float) -> float:
        return 5.0 + a_request * batch + a_token * tokens

    places = [(batch, batch * each) for each in (88, 536, 4120) for batch in (1, 4, 16, 64, 128)]
    grid = Grid((x, y, real(x, y) * noise) for (x, y), noise in zip(places, scatter, strict=True))
    for batch, tokens in [(256, 100_000), (64, 1_000_000), (512, 600_000)]:
        assert 0.8 * real(batch, tokens) < grid.at(batch, tokens) < 1.5 * real(batch, tokens)
