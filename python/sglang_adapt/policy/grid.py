"""A time that depends on two sizes, from a few measurements: between them interpolated, beyond them by their trend."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import nnls

OUTSIDE_MARGIN = 1.25
"""Beyond the largest measured size, time grows this much faster than the trend of all that was measured."""

Term = tuple[int, int]
"""A product of powers of both sizes: of the first, of the second."""


class Grid:
    """A function of two sizes from scattered points, made monotone upwards.

    A trend, a sum of `terms` and a constant, none of them below 0, is fitted to the points (least squares of relative
    errors). A cell that was not measured is as the trend has it, within what was measured of smaller and larger ones.
    Where points contradict monotony, the larger time counts. Between cells it is bilinear; below them the time of the
    smallest; above them it goes on as the trend does or, if that is less, by the steepest slope of neighbours, with
    `OUTSIDE_MARGIN`. A size of which one value alone was measured has no trend: the time grows in proportion to it, or,
    if that value is 0, as it does with the other size.

    So a step up between near neighbours, which scatter alone can make steep, says nothing of what lies beyond, nor does
    a trend that bends upwards because small sizes cost all the same.

    Args:
        points: (x, y, ms), at least one; x and y not negative, ms above 0.
        terms: of the trend, beside the constant.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]], terms: Sequence[Term] = ((1, 0), (0, 1))) -> None:
        known: dict[tuple[float, float], float] = {}
        for x, y, ms in points:
            known[x, y] = max(ms, known.get((x, y), 0.0))
        if not known:
            raise ValueError("a grid needs at least one point")
        self._xs = sorted({x for x, _ in known})
        self._ys = sorted({y for _, y in known})
        varied = (len(self._xs) > 1, len(self._ys) > 1)
        self._trend = _fitted(known, [(i * varied[0], j * varied[1]) for i, j in terms])
        cells = [[self._cell(known, x, y) for y in self._ys] for x in self._xs]
        for i, row in enumerate(cells):
            for j in range(len(row)):
                row[j] = max(row[j], row[j - 1] if j else 0.0, cells[i - 1][j] if i else 0.0)
        self._patches = _patches(self._xs, self._ys, cells)
        self._lone = (
            0.0 if varied[0] else cells[-1][-1] / (self._xs[0] or max(self._ys[-1], 1.0)),
            0.0 if varied[1] else cells[-1][-1] / (self._ys[0] or max(self._xs[-1], 1.0)),
        )
        columns = [[row[j] for row in cells] for j in range(len(self._ys))]
        self._steepest = (
            max(_steepest(self._xs, column) for column in columns) + self._lone[0],
            max(_steepest(self._ys, row) for row in cells) + self._lone[1],
        )

    def at(self, x: float, y: float) -> float:
        """The time at a place; never less than at a place that is smaller in both."""
        # In one piece: a plan for many GPUs asks some hundred times.
        xs, ys = self._xs, self._ys
        x_from, x_width, y_from, y_width, low, low_rise, high, high_rise = self._patches[bisect_right(xs, x)][
            bisect_right(ys, y)
        ]
        v = (y - y_from) / y_width
        value = low + v * low_rise
        value += (x - x_from) / x_width * ((high + v * high_rise) - value)
        most_x, most_y = xs[-1], ys[-1]
        if x > most_x or y > most_y:
            x, y = max(x, xs[0]), max(y, ys[0])
            inside_x, inside_y = min(x, most_x), min(y, most_y)
            over_x, over_y = x - inside_x, y - inside_y
            trend = self._trend_at(x, y) - self._trend_at(inside_x, inside_y)
            trend += over_x * self._lone[0] + over_y * self._lone[1]
            value += OUTSIDE_MARGIN * min(trend, over_x * self._steepest[0] + over_y * self._steepest[1])
        return value

    def _trend_at(self, x: float, y: float) -> float:
        value = 0.0
        for (i, j), factor in self._trend:
            value += factor * x**i * y**j
        return value

    def _cell(self, known: dict[tuple[float, float], float], x: float, y: float) -> float:
        if (x, y) in known:
            return known[x, y]
        larger = min((ms for (a, b), ms in known.items() if a >= x and b >= y), default=float("inf"))
        smaller = max((ms for (a, b), ms in known.items() if a <= x and b <= y), default=0.0)
        return max(smaller, min(larger, self._trend_at(x, y)))


def _fitted(known: dict[tuple[float, float], float], terms: Sequence[Term]) -> list[tuple[Term, float]]:
    """The terms whose factors are above 0, the constant among them."""
    every: list[Term] = list(dict.fromkeys([(0, 0), *terms]))
    places, times = np.array(list(known), dtype=float), np.array(list(known.values()))
    columns = np.stack([places[:, 0] ** i * places[:, 1] ** j / times for i, j in every], axis=1)
    scale = np.maximum(columns.max(axis=0), 1e-300)
    factors, _ = nnls(columns / scale, np.ones(len(times)))
    return [(term, float(factor)) for term, factor in zip(every, factors / scale, strict=True) if factor > 0]


_Patch = tuple[float, float, float, float, float, float, float, float]
"""Between four neighbours: from where and how wide in x, the same in y; the value at the smallest x and y and its rise
over y, and the same at the larger x."""


def _patches(xs: Sequence[float], ys: Sequence[float], cells: Sequence[Sequence[float]]) -> list[list[_Patch]]:
    """By how many x and how many y are not above a place: what is interpolated there.

    A patch that lies outside is infinitely wide, so that its value is that of the nearest measured size.
    """
    across, along = _steps(xs), _steps(ys)
    return [
        [
            (
                x,
                width,
                y,
                height,
                cells[i][j],
                cells[i][up] - cells[i][j],
                cells[right][j],
                cells[right][up] - cells[right][j],
            )
            for j, up, y, height in along
        ]
        for i, right, x, width in across
    ]


def _steps(axis: Sequence[float]) -> list[tuple[int, int, float, float]]:
    """(index, next index, value, distance to the next) from below the first value to above the last one."""
    last = len(axis) - 1
    inside = [(at, at + 1, axis[at], axis[at + 1] - axis[at]) for at in range(last)]
    return [(0, 0, axis[0], math.inf), *inside, (last, last, axis[last], math.inf)]


def _steepest(axis: Sequence[float], values: Sequence[float]) -> float:
    return max(((values[i] - values[i - 1]) / (axis[i] - axis[i - 1]) for i in range(1, len(axis))), default=0.0)
