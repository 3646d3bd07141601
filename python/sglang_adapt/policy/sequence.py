"""From how many tokens a batch runs sequence-parallel, and how fast an engine is that chooses for each batch.

Shift Parallelism (arXiv 2509.16495): tensor-parallel batches read a part of the weights each and are quicker while they
are small; sequence-parallel ones send less and are quicker when they are large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_adapt.core.profile import Profile, SequenceProfile, TpProfile
from sglang_adapt.policy.profile import MeasuredTimes, Times

AUTO = "auto"
"""In place of a threshold: what the profile says."""


class NoSequenceProfileError(ValueError):
    """The profile does not say how fast sequence-parallel batches are; the text says how to measure them."""


@dataclass(frozen=True, slots=True)
class ShiftedTimes:
    """Times of an engine whose batches of `threshold` tokens and more run sequence-parallel.

    A prompt that just misses the threshold is as quick as one that meets it, if that is less: so times never fall as
    work grows.
    """

    tensor: Times
    sequence: Times
    threshold: int

    @property
    def latency_ms(self) -> float:
        return self.tensor.latency_ms

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        if tokens >= self.threshold:
            return self.sequence.prefill_ms(tokens, prefix)
        return min(self.tensor.prefill_ms(tokens, prefix), self.sequence.prefill_ms(self.threshold, prefix))

    def decode_ms(self, batch: float, context: float) -> float:
        if batch >= self.threshold:
            return self.sequence.decode_ms(batch, context)
        return min(self.tensor.decode_ms(batch, context), self.sequence.decode_ms(max(1, self.threshold), context))


def measured_times(size: TpProfile, threshold: int | None = None, base_tp: int = 1) -> Times:
    """The times of a TP size in a profile, for engines with this threshold; None: all batches run tensor-parallel.

    If nothing was measured of sequence-parallel batches on the weights as at TP size `base_tp`, they count as no
    quicker.
    """
    tensor = MeasuredTimes(size)
    if threshold is None or size.sequence is None or size.sequence.base_tp != base_tp:
        return tensor
    sequence = MeasuredTimes(TpProfile(size.tp, size.sequence.prefill, size.sequence.decode), tensor.latency_ms)
    return ShiftedTimes(tensor, sequence, threshold)


def require_sequence(size: TpProfile, base_tp: int) -> SequenceProfile:
    """What was measured of sequence-parallel batches on the weights as at TP size `base_tp`.

    Raises:
        NoSequenceProfileError: nothing.
    """
    if size.sequence is None:
        raise NoSequenceProfileError(f"of TP {size.tp} it has tensor-parallel batches only")
    if size.sequence.base_tp != base_tp:
        raise NoSequenceProfileError(
            f"of TP {size.tp} it has sequence-parallel batches where TP {size.sequence.base_tp} is the smallest size, "
            f"not TP {base_tp}"
        )
    return size.sequence


def best_threshold(size: TpProfile, base_tp: int = 1) -> int | None:
    """The smallest measured batch from which on sequence-parallel ones were quicker, or None if the largest was not.

    Prompts say so, those without a cached beginning. Decode steps of more requests than that must not have been slower:
    the threshold is then above them.

    Raises:
        NoSequenceProfileError: as `require_sequence`.
    """
    measured = require_sequence(size, base_tp)
    tensor = {point.tokens: point.ms for point in size.prefill if point.prefix == 0}
    sequence = {point.tokens: point.ms for point in measured.prefill if point.prefix == 0}
    threshold = None
    for tokens in sorted(tensor.keys() & sequence.keys(), reverse=True):
        if sequence[tokens] >= tensor[tokens]:
            break
        threshold = tokens
    if threshold is None:
        return None
    steps = {(point.batch, point.context): point.ms for point in measured.decode}
    slower = [
        point.batch for point in size.decode if point.ms <= steps.get((point.batch, point.context), float("-inf"))
    ]
    return max(threshold, max(slower, default=0) + 1)


def thresholds(asked: str | int | None, tp_sizes: tuple[int, ...], profile: Profile | None) -> Mapping[int, int]:
    """The threshold of each TP size that has one. The smallest has none: a rank has no larger part of the weights.

    Args:
        asked: tokens, `AUTO`, or None for no sequence parallelism.
        tp_sizes: of the engines, ascending.
        profile: as measured, if there is one.

    Raises:
        NoSequenceProfileError: `AUTO` without measurements.
    """
    base_tp, *wide = tp_sizes
    if asked is None:
        return {}
    if asked != AUTO:
        return {tp: int(asked) for tp in wide}
    if profile is None:
        raise NoSequenceProfileError("there is no profile")
    best = {tp: best_threshold(profile.size(tp), base_tp) for tp in wide}
    return {tp: tokens for tp, tokens in best.items() if tokens is not None}


def sequence_lines(asked: str | int | None, tp_sizes: tuple[int, ...], chosen: Mapping[int, int]) -> list[str]:
    """What the start says of each TP size, if anything was asked for."""
    if asked is None:
        return []
    base_tp, *wide = tp_sizes
    narrow = [] if base_tp == 1 else [f"TP {base_tp}: all batches run tensor-parallel: it is the smallest TP size"]
    return narrow + [f"TP {tp}: {_which(chosen.get(tp), tp, base_tp)}" for tp in wide]


def _which(threshold: int | None, tp: int, base_tp: int) -> str:
    if threshold is None:
        return "all batches run tensor-parallel: by the profile no size of batch is quicker otherwise"
    which = "all batches" if threshold <= 1 else f"batches of {threshold} tokens and more"
    how = "" if base_tp == 1 else f", {tp // base_tp} ways by tokens and {base_tp} ways by weights"
    return f"{which} run sequence-parallel{how}"
