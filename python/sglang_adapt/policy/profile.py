"""How long prefill and decode take on an engine: from measurements, or reckoned, and corrected by what is seen.

Three makers of the same two figures (`Times`). `MeasuredTimes` interpolates a profile: it never falls as work grows,
and outside of what was measured it errs towards slow. `ReckonedTimes` knows only the size of the model and the GPU.
`Corrected` stretches either by what requests have really taken. The use of such tables: Nitsum, 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_adapt.core.overheads import VIRTUAL_GPU
from sglang_adapt.core.profile import TpProfile
from sglang_adapt.policy.grid import Grid

_PREFILL_TERMS = ((1, 0), (2, 0), (1, 1), (0, 1))
"""New tokens, their attention to each other, to those before them, and reading those."""
_RATE_TOKENS = 4096
"""Up to here attention is a small part of a prompt's time, so that the time for each token is that of any batch."""
_DECODE_TERMS = ((1, 0), (0, 1))
"""Requests, and the tokens whose keys and values are read."""


class Times(Protocol):
    """Times of one engine, in ms. Neither falls when an argument grows, and the same object always says the same."""

    def __hash__(self) -> int: ...

    @property
    def latency_ms(self) -> float:
        """What a first token takes beside the engine's own time: the way there and back, in which others are served."""
        ...

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        """An engine's time to compute `tokens` >= 0 prompt tokens behind `prefix` cached ones; 0 for none."""
        ...

    def decode_ms(self, batch: float, context: float) -> float:
        """For a step of `batch` >= 0 requests that have `context` tokens together; 0 for none."""
        ...


class MeasuredTimes:
    """The times of a TP size in a profile.

    A profile has the time to the first token of a prompt that is alone. Of it the engine itself is busy with the
    smallest prompt for as long as that holds up what decodes beside it, or, if that was not measured, about as long as
    with a decode step of as many requests. The rest is latency, the same for all prompts. No prompt is believed to be
    read at a higher rate than the largest one of at most `_RATE_TOKENS`.

    Args:
        profile: of the TP size.
        latency_ms: if it is known from elsewhere, as for other batches of the same engines.
    """

    def __init__(self, profile: TpProfile, latency_ms: float | None = None) -> None:
        self._prefill = Grid(((point.tokens, point.prefix, point.ms) for point in profile.prefill), _PREFILL_TERMS)
        self._decode = Grid(((point.batch, point.context, point.ms) for point in profile.decode), _DECODE_TERMS)
        smallest = min((point.prefix, point.tokens, point.ms) for point in profile.prefill)
        first = [point.tokens for point in profile.prefill if point.prefix == smallest[0]]
        largest = max((tokens for tokens in first if tokens <= _RATE_TOKENS), default=smallest[1])
        busy_ms = profile.beside_ms or self._decode.at(smallest[1], smallest[1])
        self._latency_ms = max(0.0, smallest[2] - busy_ms) if latency_ms is None else latency_ms
        self._token_ms = (self._prefill.at(largest, smallest[0]) - self._latency_ms) / max(1, largest)

    @property
    def latency_ms(self) -> float:
        return self._latency_ms

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        if tokens <= 0:
            return 0.0
        return max(self._prefill.at(tokens, prefix) - self._latency_ms, self._token_ms * tokens)

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

    latency_ms = 0.0

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

    def with_prefill(self, predicted_ms: float, actual_ms: float, *, quicker: bool = True) -> Correction:
        """After a prefill that was predicted with this correction.

        Args:
            quicker: times may come out shorter than they are without correction; else at most a stretch is taken back.
        """
        return replace(self, prefill=self._moved(self.prefill, predicted_ms, actual_ms, quicker))

    def with_decode(self, predicted_ms: float, actual_ms: float, *, quicker: bool = True) -> Correction:
        """After decode steps that were predicted with this correction; `quicker` as of `with_prefill`."""
        return replace(self, decode=self._moved(self.decode, predicted_ms, actual_ms, quicker))

    def _moved(self, factor: float, predicted_ms: float, actual_ms: float, quicker: bool) -> float:
        if predicted_ms <= 0 or actual_ms <= 0:
            return factor
        # In the logarithm, so that twice as slow and twice as fast weigh the same; one odd request moves it little.
        error = min(_SURPRISE, max(-_SURPRISE, math.log(actual_ms / predicted_ms)))
        rate = _LEARN_SLOWER if error > 0 else _LEARN_FASTER
        least = 1 / self.most if quicker or error > 0 else min(factor, 1.0)
        return min(self.most, max(least, factor * math.exp(rate * error)))


def shared_corrections(learned: Mapping[int, Correction], *, measured: bool) -> dict[int, Correction]:
    """Corrections by TP size, of sizes of which nothing has been seen as well: those that are not in the layout.

    Args:
        learned: by TP size.
        measured: the times are those of a profile, which is right for each size until it is seen to be slower there.
            Reckoned ones err for all sizes alike: an unseen size has the mean of the others, or it would look quick
            beside sizes that have turned out to be slow. What has turned out to be quicker is so for all sizes of
            either: the machine is, or forecasts leave the same out, and the size that serves would look best.
    """

    def mean(factors: Iterable[float]) -> float:
        logs = [math.log(factor) for factor in factors if factor != 1.0]
        found = math.exp(sum(logs) / len(logs)) if logs else 1.0
        return min(1.0, found) if measured else found

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

    @property
    def latency_ms(self) -> float:
        return self.times.latency_ms

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return self.times.prefill_ms(tokens, prefix) * self.correction.prefill

    def decode_ms(self, batch: float, context: float) -> float:
        return self.times.decode_ms(batch, context) * self.correction.decode
