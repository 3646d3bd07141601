"""Engines in simulated time that run some batches sequence-parallel, as a profile of both ways has them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from sglang_adapt.core.layout import EngineSpec, uniform_layout
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, SequenceProfile, TpProfile
from sglang_adapt.core.slo import SloConfig, Tier
from sglang_adapt.simulate.cli import main
from sglang_adapt.simulate.engine import Request, SimulatedEngine
from sglang_adapt.simulate.hardware import Hardware, HardwareError, Shape, of_profile
from sglang_adapt.simulate.load import Arrival
from sglang_adapt.simulate.systems import System, run

KEY = ProfileKey("m", "bfloat16", "H100", "0", "0", "fa3")
TOKENS = (16, 256, 1024, 4096)


def points(*ms: float) -> tuple[PrefillPoint, ...]:
    return tuple(PrefillPoint(tokens, 0, time) for tokens, time in zip(TOKENS, ms, strict=True))


def steps(*ms: float) -> tuple[DecodePoint, ...]:
    return tuple(DecodePoint(batch, batch * 100, time) for batch, time in zip((1, 512), ms, strict=True))


def profile(base_tp: int = 1) -> Profile:
    wide = base_tp * 2
    sequence = SequenceProfile(points(8, 12, 30, 100), steps(9, 60), base_tp)
    narrow = TpProfile(base_tp, points(8, 20, 80, 320), steps(8, 50))
    return Profile(KEY, (narrow, TpProfile(wide, points(4, 10, 40, 160), steps(3, 40), sequence)))


def hardware(sp: str | int | None, base_tp: int = 1) -> Hardware:
    sizes = (base_tp, 2 * base_tp)
    return of_profile(profile(base_tp), "p.json", sizes, Shape(kv_tokens=100_000, sp=sp), 1)


def first_ms(speed: Hardware, tp: int, *prompts: int) -> float:
    """When an engine has read prompts that come at once."""
    engine = SimulatedEngine(EngineSpec(0, tp), speed.times[tp], speed.bounds[tp], speed.kv_tokens[tp])
    engine.paused = True
    requests = [
        Request(number, f"r{number}", Arrival(0, prompt, 2, "a"), unread=prompt)
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request, 0.0)
    engine.paused = False
    engine.start(0.0)
    while math.isnan(requests[0].first_ms):
        now_ms = engine.due_ms
        engine.finish()
        engine.start(now_ms)
    assert len({request.first_ms for request in requests}) == 1
    return requests[0].first_ms


@pytest.mark.parametrize(
    ("sp", "prompts", "ms"),
    [
        ("auto", [1024], 30),
        ("auto", [256], 10),
        # What counts is the batch.
        ("auto", [512] * 4, 30 + 70 / 3),
        (4096, [1024], 40),
        (4096, [4096], 100),
        (None, [4096], 160),
        (0, [16], 8),
    ],
)
def test_prompts_take_what_their_batch_takes_in_its_way(sp: str | int | None, prompts: list[int], ms: float) -> None:
    assert first_ms(hardware(sp), 2, *prompts) == pytest.approx(ms)
    assert first_ms(hardware(sp, base_tp=2), 4, *prompts) == pytest.approx(ms)
    assert first_ms(hardware(sp), 1, 1024) == pytest.approx(80)


def test_decode_steps_are_those_of_their_way() -> None:
    assert hardware("auto").times[2].decode_ms(1, 100) == 3
    assert hardware(0).times[2].decode_ms(1, 100) == 9


def test_a_load_meets_targets_by_it_that_it_misses_without() -> None:
    config = SloConfig((Tier("a", 120, 50),), "a")
    arrivals = [Arrival(1000.0 * number, 4096, 4, "a") for number in range(10)]
    for sp, good in (("auto", 10), (None, 0)):
        for admission in (True, False):
            found = run(System(hardware(sp), 2, uniform_layout(2, 2), admission), arrivals, config)
            assert found.judged["total"]["good"] == good, (sp, admission)


def test_what_it_is_of_says_so() -> None:
    assert hardware(None).source == "p.json: m on H100"
    assert "TP 2: batches of 1024 tokens and more run sequence-parallel" in hardware("auto").source
    assert "2 ways by tokens and 2 ways by weights" in hardware("auto", base_tp=2).source


def test_what_a_profile_does_not_have_is_not_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = profile(base_tp=2)
    file = tmp_path / "p.json"
    file.write_bytes(msgspec.json.encode(profile()))
    tensor = Profile(KEY, tuple(TpProfile(size.tp, size.prefill, size.decode) for size in both.sizes))
    for sp in ("auto", 0):
        shape = Shape(kv_tokens=100_000, sp=sp)
        with pytest.raises(HardwareError, match=f"--sp {sp}: t: of TP 4 it has tensor-parallel batches only"):
            of_profile(tensor, "t", (2, 4), shape, 1)
        one = Profile(KEY, (TpProfile(1, points(1, 2, 3, 4), steps(1, 2)), *both.sizes))
        with pytest.raises(HardwareError, match="where TP 2 is the smallest size, not TP 1"):
            of_profile(one, "t", (1, 4), shape, 1)
    load = ["--rate", "5", "--seconds", "2", "--tier", "a:1:400:50", "--quiet"]
    for flags, says in (
        (["--sp", "0"], "--sp 0: times of sequence-parallel batches are not reckoned; give a --profile"),
        (["--sp", "often"], "give auto, off, or from how many tokens on"),
    ):
        with pytest.raises(SystemExit):
            main([*load, *flags])
        assert says in capsys.readouterr().err
    assert main([*load, "--profile", str(file), "--kv-tokens", "100000", "--gpus", "2", "--sp", "auto"]) == 0
    assert "TP 2: batches of 1024 tokens and more run sequence-parallel" in capsys.readouterr().out
