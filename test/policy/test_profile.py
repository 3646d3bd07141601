"""Times of engines: interpolated, reckoned, corrected; and the file of a profile."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adapt.core.profile import (
    DecodePoint,
    PrefillPoint,
    Profile,
    ProfileError,
    ProfileKey,
    TpProfile,
    profile_fault,
    read_profile,
    write_profile,
)
from sglang_adapt.policy.profile import (
    Corrected,
    Correction,
    MeasuredTimes,
    ModelFigures,
    ReckonedTimes,
    gpu_figures,
    shared_corrections,
)

KEY = ProfileKey("llama", "bfloat16", "NVIDIA H100 80GB HBM3", "0.5.17", "2.11.0", "fa3")
TP1 = TpProfile(1, (PrefillPoint(100, 0, 10.0), PrefillPoint(200, 0, 18.0)), (DecodePoint(1, 100, 7.0),))


def test_measured_times() -> None:
    times = MeasuredTimes(TP1)
    assert times.prefill_ms(150) == pytest.approx(14.0)
    assert times.prefill_ms(0, 50) == 0.0 == times.decode_ms(0, 0)
    assert times.decode_ms(1, 50) == 7.0 < times.decode_ms(2, 50)


def test_what_holds_nothing_up_is_latency() -> None:
    """A prompt of 100 tokens has its first token after 10 ms, and holds up what decodes by 9: 1 is on the way."""
    times = MeasuredTimes(msgspec.structs.replace(TP1, beside_ms=9.0))
    assert times.latency_ms == 1.0
    assert (times.prefill_ms(100), times.prefill_ms(200)) == pytest.approx((9.0, 17.0))
    assert MeasuredTimes(msgspec.structs.replace(TP1, beside_ms=11.0)).latency_ms == 0.0


def test_reckoned_times_are_near_what_was_measured_on_h100() -> None:
    """Llama-3.1-8B in bf16: measured 6.8 ms (batch 1), 15.6 ms (batch 128 at 1,024 tokens), 394 ms (16 x 1,024)."""
    gpu, known = gpu_figures("NVIDIA H100 80GB HBM3")
    assert known
    tp1 = ReckonedTimes(ModelFigures(1, 32, 16_060_522_496, 131_072, 2), gpu)
    assert tp1.decode_ms(1, 1024) == pytest.approx(6.8, rel=0.2)
    assert tp1.decode_ms(128, 128 * 1024) == pytest.approx(15.6, rel=0.2)
    assert tp1.prefill_ms(16 * 1024) == pytest.approx(394, rel=0.2)
    tp2 = ReckonedTimes(ModelFigures(2, 32, 8_030_261_248, 65_536, 2), gpu)
    assert tp2.decode_ms(1, 1024) == pytest.approx(4.2, rel=0.25)
    assert tp2.prefill_ms(16 * 1024) == pytest.approx(242, rel=0.25)


def test_unknown_gpu_is_said_and_slow() -> None:
    figures, known = gpu_figures("Some GPU 3000")
    assert not known and figures.bytes_per_s < gpu_figures("NVIDIA A100-SXM4-80GB")[0].bytes_per_s


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5))
@settings(deadline=None)
def test_reckoned_times_never_fall(a: float, b: float, da: float, db: float) -> None:
    times = ReckonedTimes(ModelFigures(2, 4, 10**6, 1000, 2), gpu_figures("H100")[0])
    assert times.prefill_ms(a + da, b + db) >= times.prefill_ms(a, b)
    assert times.decode_ms(a + da, b + db) >= times.decode_ms(a, b)


def test_correction_finds_the_factor_and_stays_within_bounds() -> None:
    times, correction = MeasuredTimes(TP1), Correction()
    for _ in range(200):
        predicted = Corrected(times, correction).prefill_ms(150)
        correction = correction.with_prefill(predicted, times.prefill_ms(150) * 2.5)
    assert correction.prefill == pytest.approx(2.5, rel=0.01)
    assert correction.decode == 1.0
    for _ in range(500):
        correction = correction.with_decode(1.0, 1e9)
    assert correction.decode == correction.most
    for _ in range(500):
        correction = correction.with_decode(1e9, 1.0)
    assert correction.decode == pytest.approx(1 / correction.most)


def test_one_odd_request_moves_the_correction_little() -> None:
    assert Correction().with_prefill(1.0, 1e6).prefill < 1.2
    assert Correction().with_prefill(0.0, 5.0) == Correction() == Correction().with_prefill(5.0, 0.0)
    slower, faster = Correction().with_decode(1.0, 2.0).decode, Correction().with_decode(2.0, 1.0).decode
    assert math.log(slower) > -math.log(faster) > 0


@given(
    factor=st.floats(0.25, 4.0),
    predicted=st.floats(0.1, 100.0),
    actual=st.floats(0.1, 100.0),
    which=st.sampled_from(["prefill", "decode"]),
)
def test_a_stretch_is_taken_back_no_further_than_to_the_times_themselves(
    factor: float, predicted: float, actual: float, which: str
) -> None:
    known = Correction(factor, factor)
    learn = getattr(known, f"with_{which}")
    after = learn(predicted, actual, quicker=False)
    now, freely = getattr(after, which), getattr(learn(predicted, actual), which)
    assert getattr(after, "decode" if which == "prefill" else "prefill") == factor
    assert now == (freely if actual > predicted else max(freely, min(factor, 1.0)))
    if actual < predicted:
        assert min(factor, 1.0) <= now <= factor


def test_profile_survives_its_file(tmp_path: Path) -> None:
    profile = Profile(KEY, (TP1,))
    write_profile(tmp_path / "new" / "p.json", profile)
    assert read_profile(tmp_path / "new" / "p.json") == profile
    assert profile_fault(profile, KEY, (1,)) is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "qwen"), ("gpu", "NVIDIA H200"), ("sglang", "0.5.18"), ("dtype", "float16"), ("backend", "triton")],
)
def test_profile_of_another_deployment_is_refused_by_name(field: str, value: str) -> None:
    fault = profile_fault(Profile(msgspec.structs.replace(KEY, **{field: value}), (TP1,)), KEY, (1,))
    assert fault is not None
    assert f"{field} {value!r}, which is {getattr(KEY, field)!r} here" in fault


def test_profile_without_a_tp_size_is_refused() -> None:
    assert "nothing of TP size 2, 4" in (profile_fault(Profile(KEY, (TP1,)), KEY, (1, 2, 4)) or "")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"key": 1}'])
def test_other_files_are_no_profiles(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json is not a profile"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=r"none\.json cannot be read"):
        read_profile(tmp_path / "none.json")


def test_a_size_of_which_nothing_was_seen_is_corrected_as_the_others() -> None:
    learned = {1: Correction(4.0, 2.0, 32.0), 2: Correction(9.0, 1.0, 32.0), 4: Correction(most=32.0)}
    shared = shared_corrections(learned, measured=False)
    assert shared[1] == learned[1]
    assert (shared[2].prefill, shared[2].decode) == (9.0, pytest.approx(2.0))
    assert (shared[4].prefill, shared[4].decode) == (pytest.approx(6.0), pytest.approx(2.0))
    assert shared_corrections(learned, measured=True) == learned
    assert shared_corrections({1: Correction()}, measured=False) == {1: Correction()}


def test_of_measured_times_only_what_is_quicker_is_so_for_a_size_of_which_nothing_was_seen() -> None:
    """The size that serves would look better than the others otherwise, and not be left."""
    slow = {1: Correction(1.5, 1.2), 2: Correction()}
    assert shared_corrections(slow, measured=True) == slow
    quick = {1: Correction(0.9, 0.8), 2: Correction()}
    assert shared_corrections(quick, measured=True) == {
        1: quick[1],
        2: Correction(pytest.approx(0.9), pytest.approx(0.8)),
    }
    seen = {1: Correction(0.9, 0.8), 2: Correction(1.1, 1.0)}
    assert shared_corrections(seen, measured=True)[2] == Correction(1.1, pytest.approx(0.8))
