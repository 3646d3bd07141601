"""How long prefill and decode take on an engine: from measurements, or reckoned, and corrected by what is seen.

Three makers of the same two figures (`Times`). `MeasuredTimes` interpolates a profile: it never falls as work grows,
and outside of what was measured it errs towards slow. `ReckonedTimes` knows only the size of the model and the GPU.
`Corrected` stretches either by what requests have really taken. The use of such tables: Nitsum, 3.3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_adapt.core.overheads import VIRTUAL_GPU
from sglang_adapt.core.profile import TpProfile

OUTSIDE_MARGIN = 1.25
"""Beyond the largest measured size, time grows this much faster than the steepest that was measured."""


class Times(Protocol):
    """Times of one engine, in ms. Neither falls when an argument grows, and the same object always says the same."""

    def __hash__(self) -> int: ...

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        """To compute `tokens` >= 0 prompt tokens behind `prefix` cached ones, with nothing else to do; 0 for none."""
        ...

    def decode_ms(self, batch: float, context: float) -> float:
        """For a step of `batch` >= 0 requests that have `context` tokens together; 0 for none."""
        ...


class Grid:
    """A function of two sizes from scattered points, made monotone upwards.

    Where several points or their order contradict monotony, the larger time counts. A cell that was not measured is the
    smallest time of a larger one, or, if there is none, the largest of a smaller one. Between cells it is bilinear;
    below them the time of the smallest; above them it goes on by the steepest slope, with `OUTSIDE_MARGIN`.

    Args:
        points: (x, y, ms), at least one; x and y not negative, ms above 0.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        known: dict[tuple[float, float], float] = {}
        for x, y, ms in points:
            known[x, y] = max(ms, known.get((x, y), 0.0))
        if not known:
            raise ValueError("a grid needs at least one point")
        self._xs = sorted({x for x, _ in known})
        self._ys = sorted({y for _, y in known})
        cells = [[_fill(known, x, y) for y in self._ys] for x in self._xs]
        for i, row in enumerate(cells):
            for j in range(len(row)):
                row[j] = max(row[j], row[j - 1] if j else 0.0, cells[i - 1][j] if i else 0.0)
        self._cells = cells
        columns = [[row[j] for row in cells] for j in range(len(self._ys))]
        self._x_slope = OUTSIDE_MARGIN * max(_steepest(self._xs, column) for column in columns)
        self._y_slope = OUTSIDE_MARGIN * max(_steepest(self._ys, row) for row in cells)

    def at(self, x: float, y: float) -> float:
        """The time at a place; never less than at a place that is smaller in both."""
        # In one piece: a plan for many GPUs asks a thousand times.
        xs, ys = self._xs, self._ys
        i, j, u, v = bisect_right(xs, x) - 1, bisect_right(ys, y) - 1, 0.0, 0.0
        if i < 0:
            i = 0
        elif i < len(xs) - 1:
            u = (x - xs[i]) / (xs[i + 1] - xs[i])
        if j < 0:
            j = 0
        elif j < len(ys) - 1:
            v = (y - ys[j]) / (ys[j + 1] - ys[j])
        row = self._cells[i]
        value = row[j] if v == 0.0 else row[j] + v * (row[j + 1] - row[j])
        if u != 0.0:
            row = self._cells[i + 1]
            value += u * ((row[j] if v == 0.0 else row[j] + v * (row[j + 1] - row[j])) - value)
        if x > xs[-1]:
            value += (x - xs[-1]) * self._x_slope
        if y > ys[-1]:
            value += (y - ys[-1]) * self._y_slope
        return value


def _fill(known: dict[tuple[float, float], float], x: float, y: float) -> float:
    if (x, y) in known:
        return known[x, y]
    larger = [ms for (a, b), ms in known.items() if a >= x and b >= y]
    return min(larger) if larger else max((ms for (a, b), ms in known.items() if a <= x and b <= y), default=0.0)


def _steepest(axis: Sequence[float], values: Sequence[float]) -> float:
    slopes = [(values[i] - values[i - 1]) / (axis[i] - axis[i - 1]) for i in range(1, len(axis))]
    # With a single place there is no slope: as if it began at 0.
    return max(slopes, default=values[0] / max(axis[0], 1.0))


class MeasuredTimes:
    """The times of a TP size in a profile."""

    def __init__(self, profile: TpProfile) -> None:
        self._prefill = Grid((point.tokens, point.prefix, point.ms) for point in profile.prefill)
        self._decode = Grid((point.batch, point.context, point.ms) for point in profile.decode)

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return self._prefill.at(tokens, prefix) if tokens > 0 else 0.0

    def decode_ms(self, batch: float, context: float) -> float:
        return self._decode.at(batch, context) if batch > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What a GPU does, as it is reached by an engine (not as on its data sheet).

    Attributes:
        flops: of matrix products, a second.
        bytes_per_s: read from its memory.
        step_ms: of an iteration beside that.
        link_ms: of one sum over the GPUs of an engine.
    """

    flops: float
    bytes_per_s: float
    step_ms: float
    link_ms: float


_GPUS: tuple[tuple[str, GpuFigures], ...] = (
    ("B200", GpuFigures(1.1e15, 5.0e12, 0.6, 0.012)),
    ("H200", GpuFigures(6.0e14, 3.4e12, 0.6, 0.012)),
    ("H100", GpuFigures(6.0e14, 2.4e12, 0.6, 0.012)),
    ("A100", GpuFigures(1.9e14, 1.4e12, 0.8, 0.015)),
    ("L40S", GpuFigures(1.8e14, 0.6e12, 0.8, 0.03)),
    (VIRTUAL_GPU, GpuFigures(1.0e10, 4.0e9, 4.0, 0.4)),
)
_UNKNOWN_GPU = GpuFigures(1.0e14, 0.8e12, 1.0, 0.03)


def gpu_figures(name: str) -> tuple[GpuFigures, bool]:
    """(figures of a GPU, whether it is known); of an unknown one those of a slow one."""
    for part, figures in _GPUS:
        if part in name:
            return figures, True
    return _UNKNOWN_GPU, False


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The size of a model at one TP size.

    Attributes:
        tp: the TP size.
        layers: of the model.
        weight_bytes: of one rank.
        kv_bytes_per_token: of one rank.
        itemsize: bytes of a weight.
    """

    tp: int
    layers: int
    weight_bytes: int
    kv_bytes_per_token: int
    itemsize: int


class ReckonedTimes:
    """A roofline: the larger of computing and reading, and the cost of a step."""

    def __init__(self, model: ModelFigures, gpu: GpuFigures) -> None:
        self._gpu = gpu
        links = 2 * model.layers * gpu.link_ms if model.tp > 1 else 0.0
        self._fixed_ms = gpu.step_ms + links
        self._token_ms = 2e3 * model.weight_bytes / model.itemsize / gpu.flops
        self._weights_ms = 1e3 * model.weight_bytes / gpu.bytes_per_s
        self._context_ms = 1e3 * model.kv_bytes_per_token / gpu.bytes_per_s

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        if tokens <= 0:
            return 0.0
        reading = self._weights_ms + self._context_ms * (prefix + tokens)
        return self._fixed_ms + max(reading, self._token_ms * tokens)

    def decode_ms(self, batch: float, context: float) -> float:
        if batch <= 0:
            return 0.0
        return self._fixed_ms + max(self._weights_ms + self._context_ms * context, self._token_ms * batch)


@dataclass(frozen=True, slots=True)
class Correction:
    """By how much the times of a TP size are stretched, learned from requests.

    Attributes:
        prefill, decode: factors.
        most: bounds of both: from `1 / most` to `most`.
    """

    prefill: float = 1.0
    decode: float = 1.0
    most: float = 4.0

    def with_prefill(self, predicted_ms: float, actual_ms: float) -> Correction:
        """After a prefill that was predicted with this correction."""
        return replace(self, prefill=self._moved(self.prefill, predicted_ms, actual_ms))

    def with_decode(self, predicted_ms: float, actual_ms: float) -> Correction:
        """After decode steps that were predicted with this correction."""
        return replace(self, decode=self._moved(self.decode, predicted_ms, actual_ms))

    def _moved(self, factor: float, predicted_ms: float, actual_ms: float) -> float:
        if predicted_ms <= 0 or actual_ms <= 0:
            return factor
        # In the logarithm, so that twice as slow and twice as fast weigh the same; one odd request moves it little.
        error = min(_SURPRISE, max(-_SURPRISE, math.log(actual_ms / predicted_ms)))
        rate = _LEARN_SLOWER if error > 0 else _LEARN_FASTER
        return min(self.most, max(1 / self.most, factor * math.exp(rate * error)))


def shared_corrections(learned: Mapping[int, Correction], *, measured: bool) -> dict[int, Correction]:
    """Corrections by TP size, of sizes of which nothing has been seen as well: those that are not in the layout.

    Args:
        learned: by TP size.
        measured: the times are those of a profile, which is right for each size until it is seen to be wrong there.
            Reckoned ones err for all sizes alike: an unseen size has the mean of the others, or it would look quick
            beside sizes that have turned out to be slow.
    """
    if measured:
        return dict(learned)

    def mean(factors: Iterable[float]) -> float:
        logs = [math.log(factor) for factor in factors if factor != 1.0]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    prefill = mean(one.prefill for one in learned.values())
    decode = mean(one.decode for one in learned.values())
    return {
        tp: replace(
            one,
            prefill=prefill if one.prefill == 1.0 else one.prefill,
            decode=decode if one.decode == 1.0 else one.decode,
        )
        for tp, one in learned.items()
    }


_SURPRISE = math.log(4.0)
_LEARN_SLOWER = 0.1
"""What took longer than predicted is believed sooner than what took less."""
_LEARN_FASTER = 0.05


@dataclass(frozen=True, slots=True)
class Corrected:
    """`Times` stretched by a `Correction`."""

    times: Times
    correction: Correction

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return self.times.prefill_ms(tokens, prefix) * self.correction.prefill

    def decode_ms(self, batch: float, context: float) -> float:
        return self.times.decode_ms(batch, context) * self.correction.decode
