"""From how many tokens on batches run sequence-parallel by a profile, and how fast engines are then."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, SequenceProfile, TpProfile
from sglang_adapt.policy.profile import MeasuredTimes, Times
from sglang_adapt.policy.sequence import (
    AUTO,
    NoSequenceProfileError,
    best_threshold,
    measured_times,
    sequence_lines,
    thresholds,
)
from sglang_adapt.policy.tiers import TierSettings

KEY = ProfileKey("m", "float32", "virtual GPU", "0", "0", "torch_native")
SIZES = (16, 256, 1024, 4096)


def prefill(*ms: float, prefix: int = 0) -> tuple[PrefillPoint, ...]:
    return tuple(PrefillPoint(tokens, prefix, time) for tokens, time in zip(SIZES, ms, strict=True))


def decode(*ms: float) -> tuple[DecodePoint, ...]:
    return tuple(DecodePoint(batch, batch * 100, time) for batch, time in zip((1, 64, 512), ms, strict=True))


def first_token_ms(times: Times, tokens: int) -> float:
    """As it was measured: the engine's time, and the latency."""
    return times.latency_ms + times.prefill_ms(tokens)


def size(
    sequence: tuple[float, ...] | None,
    steps: tuple[float, ...] = (9, 9, 99),
    tensor: tuple[float, ...] = (4, 10, 40, 160),
) -> TpProfile:
    fast = None if sequence is None else SequenceProfile(prefill(*sequence), decode(*steps))
    # Behind a cached beginning nothing is compared.
    return TpProfile(2, prefill(*tensor) + prefill(1, 1, 1, 1, prefix=64), decode(4, 5, 40), fast)


@pytest.mark.parametrize(
    ("sequence", "threshold"),
    [
        ((8, 12, 30, 100), 1024),
        ((3, 9, 30, 100), 513),
        ((3, 12, 30, 100), 1024),
        ((3, 9, 30, 160), None),
        ((9, 19, 39, 159.9), 1024),
        ((9, 19, 40, 159.9), 4096),
    ],
)
def test_the_threshold_is_where_all_larger_prompts_are_quicker(
    sequence: tuple[float, ...], threshold: int | None
) -> None:
    assert best_threshold(size(sequence)) == threshold


def test_decode_steps_that_would_be_slower_stay_below_it() -> None:
    assert best_threshold(size((3, 9, 30, 100), steps=(9, 9, 30))) == 65
    assert best_threshold(size((3, 9, 30, 100), steps=(1, 1, 1))) == 16


def test_what_is_asked_for_each_tp_size() -> None:
    profile = Profile(KEY, (TpProfile(1, prefill(8, 20, 80, 320), decode(1, 2, 3)), size((8, 12, 30, 100))))
    assert thresholds(None, (1, 2), None) == {}
    assert thresholds(0, (1, 2, 4), None) == {2: 0, 4: 0}
    assert thresholds(AUTO, (1, 2), profile) == {2: 1024}
    never = Profile(KEY, (size((9, 20, 80, 320)),))
    assert thresholds(AUTO, (1, 2), never) == {}
    assert "TP 2: all batches run tensor-parallel" in sequence_lines(AUTO, (1, 2), {})[0]
    assert sequence_lines(AUTO, (1, 2), {2: 1024}) == ["TP 2: batches of 1024 tokens and more run sequence-parallel"]
    assert sequence_lines(0, (1, 2), {2: 0}) == ["TP 2: all batches run sequence-parallel"]
    assert sequence_lines(None, (1, 2), {}) == []
    with pytest.raises(NoSequenceProfileError, match="no profile"):
        thresholds(AUTO, (1, 2), None)
    with pytest.raises(NoSequenceProfileError, match="of TP 2 it has tensor-parallel batches only"):
        thresholds(AUTO, (1, 2), Profile(KEY, (size(None),)))


def test_the_smallest_size_is_what_weights_are_cut_into() -> None:
    assert thresholds(0, (2, 4, 8), None) == {4: 0, 8: 0}
    assert sequence_lines(0, (2, 4, 8), {4: 0, 8: 0}) == [
        "TP 2: all batches run tensor-parallel: it is the smallest TP size",
        "TP 4: all batches run sequence-parallel, 2 ways by tokens and 2 ways by weights",
        "TP 8: all batches run sequence-parallel, 4 ways by tokens and 2 ways by weights",
    ]


def test_what_was_measured_with_other_shards_of_the_weights_says_nothing() -> None:
    whole = size((8, 12, 30, 100))
    assert whole.sequence is not None
    halves = replace_sequence(whole, base_tp=2)
    assert best_threshold(halves, base_tp=2) == 1024
    with pytest.raises(NoSequenceProfileError, match="where TP 1 is the smallest size, not TP 2"):
        thresholds(AUTO, (2, 4), Profile(KEY, (msgspec.structs.replace(whole, tp=4),)))
    for found in (measured_times(halves, 1024, 2), measured_times(whole, 1024)):
        assert first_token_ms(found, 4096) == pytest.approx(100)
    for found in (measured_times(halves, 1024), measured_times(whole, 1024, 2)):
        assert first_token_ms(found, 4096) == pytest.approx(160)


def replace_sequence(size: TpProfile, base_tp: int) -> TpProfile:
    assert size.sequence is not None
    return msgspec.structs.replace(size, sequence=msgspec.structs.replace(size.sequence, base_tp=base_tp))


def test_times_are_those_of_the_way_that_is_taken() -> None:
    both = size((8, 12, 30, 100))
    times, tensor = measured_times(both, 1024), MeasuredTimes(both)
    assert first_token_ms(times, 256) == first_token_ms(tensor, 256) == pytest.approx(10)
    assert [first_token_ms(times, tokens) for tokens in (1024, 4096)] == pytest.approx([30, 100])
    assert times.prefill_ms(0) == 0
    assert times.decode_ms(64, 6400) == 5
    assert measured_times(both, 64).decode_ms(64, 6400) == 9
    assert first_token_ms(measured_times(both, 0), 16) == pytest.approx(8)
    for without in (measured_times(both), measured_times(size(None), 1024)):
        assert first_token_ms(without, 4096) == pytest.approx(160)


def test_admission_and_planner_are_given_those_times() -> None:
    profile = Profile(KEY, (TpProfile(1, prefill(8, 20, 80, 320), decode(1, 2, 3)), size((8, 12, 30, 100))))
    settings = TierSettings(None, None, KEY, (1, 2), 2, profile, (), sp_tokens={2: 1024})
    assert [first_token_ms(settings.times(tp), 4096) for tp in (1, 2)] == pytest.approx([320, 100])
    assert first_token_ms(replace(settings, sp_tokens={}).times(2), 4096) == pytest.approx(160)
    halves = Profile(KEY, (replace_sequence(size((8, 12, 30, 100)), base_tp=2),))
    assert first_token_ms(replace(settings, profile=halves).times(2), 4096) == pytest.approx(160)


@pytest.mark.parametrize("threshold", [0, 1, 16, 700, 1024])
def test_times_never_fall_as_work_grows(threshold: int) -> None:
    times = measured_times(size((8, 12, 30, 100), steps=(2, 3, 30)), threshold)
    by_tokens = [times.prefill_ms(tokens) for tokens in range(0, 5000, 7)]
    by_batch = [times.decode_ms(batch, 64 * batch) for batch in range(600)]
    assert by_tokens == sorted(by_tokens)
    assert by_batch == sorted(by_batch)
