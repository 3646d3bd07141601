"""Simulated beside measured: what was simulated is found to be right, and what differs to be wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trace_files import write_trace

import compare_goodput
from bench_goodput import Load, add_load_flags, parse_tier, requests_of
from sglang_adapt.core.ablation import Ablation, Scheduler
from sglang_adapt.core.layout import parse_layout
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, TpProfile
from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible
from sglang_adapt.simulate.check import CheckError, MeasuredRun, Sent, arrivals_of, check
from sglang_adapt.simulate.cli import main
from sglang_adapt.simulate.hardware import Shape, of_profile
from sglang_adapt.simulate.load import poisson, with_tiers
from sglang_adapt.simulate.systems import System, run

PROFILE = Profile(
    ProfileKey("m", "float32", "g", "0.5.17", "2.11.0", "torch_native"),
    (
        TpProfile(
            1,
            # With one prefix or context only, any other one would seem to cost seconds.
            tuple(
                PrefillPoint(tokens, prefix, 12 + 0.06 * tokens) for tokens in (1, 512, 4096) for prefix in (0, 8192)
            ),
            tuple(DecodePoint(batch, context, 6 + 0.6 * batch) for batch in (1, 8, 64) for context in (1, 10**6)),
        ),
    ),
)
CONFIG = SloConfig(
    (Tier("strict", 400.0, 30.0, when_infeasible=WhenInfeasible.REJECT), Tier("loose", 2000.0, 80.0)), "loose"
)
ENGINES = {"chunk": 2048, "page": 1, "requests": 64, "kv_tokens": 20000}


def measured(
    folder: Path, layout: str = "tp1@0,tp1@1", engines: dict[str, int] | None = ENGINES, **changed: Any
) -> Path:
    """A result as `compare_goodput.py` writes it, of engines that are exactly as the profile says."""
    options = argparse.Namespace(
        tier=[parse_tier("strict:1:400:30"), parse_tier("loose:1:2000:80")],
        trace=[],
        rate=20.0,
        seconds=6.0,
        input=128,
        output=48,
        count=200,
        divide=1,
        longest=1 << 30,
        seed=0,
        reject=["strict"],
        weight={},
    )
    arrivals = with_tiers(poisson(40.0, 6.0, 128, 48, 0), {"strict": 1.0, "loose": 1.0}, 0)
    hardware = of_profile(PROFILE, "p", (1,), Shape(**ENGINES), 0)
    systems: dict[str, Any] = {}
    for kind in ("static", "stock"):
        system = System(hardware, 2, parse_layout("tp1@0,tp1@1", (1,), 2), admission=kind == "static")
        found = run(system, arrivals, CONFIG)
        runs = [{"load": "Poisson", "times": 2.0, "seconds": 6.0, "repeat": 0, "tiers": found.judged}]
        systems[f"{kind}:tp1"] = {"kind": kind, "layout": layout, "runs": runs}
    systems["static:tp1"]["engines"] = engines
    result = {
        "gpus": 2,
        "load": compare_goodput.load_of(options),
        "profile": msgspec.to_builtins(PROFILE),
        "systems": systems,
        **changed,
    }
    path = folder / "measured.json"
    path.write_text(json.dumps({name: value for name, value in result.items() if value is not None}))
    return path


def test_what_is_as_the_profile_says_has_no_error(tmp_path: Path) -> None:
    text, result = check(measured(tmp_path))
    assert {one["system"] for one in result["figures"]} == {"static:tp1", "stock:tp1"}
    assert result["summary"]["worst_goodput"] == 0.0 and result["summary"]["worst_percentile"] < 1e-9
    assert result["summary"]["right"] == result["summary"]["of"] > 30
    assert "goodput is off by at most 0%" in text


def test_what_was_switched_off_is_switched_off_in_the_simulation(tmp_path: Path) -> None:
    path = measured(tmp_path)
    known = json.loads(path.read_text())
    arrivals = with_tiers(poisson(40.0, 6.0, 128, 48, 0), {"strict": 1.0, "loose": 1.0}, 0)
    hardware = of_profile(PROFILE, "p", (1,), Shape(**ENGINES), 0)
    layout, off = parse_layout("tp1@0,tp1@1", (1,), 2), Ablation(Scheduler.BATCH_RULE)
    found = run(System(hardware, 2, layout, ablation=off), arrivals, CONFIG)
    (like_it,) = known["systems"]["static:tp1"]["runs"]
    assert found.judged != like_it["tiers"]
    runs = [{**like_it, "tiers": found.judged}]
    known["systems"]["ablation:3:tp1"] = {
        "kind": "ablation",
        "layout": str(layout),
        "ablation": off.flags,
        "runs": runs,
    }
    path.write_text(json.dumps(known))
    _, result = check(path)
    assert "ablation:3:tp1" in {one["system"] for one in result["figures"]}
    assert result["summary"]["worst_goodput"] == 0.0


def test_slower_engines_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measured(tmp_path)
    known = json.loads(path.read_text())
    for one in known["systems"]["stock:tp1"]["runs"][0]["tiers"].values():
        one["goodput_rps"] *= 0.5
        one["ttft_ms_p50"] *= 2
    path.write_text(json.dumps(known))
    assert main(["--check", str(path), "--json", str(tmp_path / "out.json")]) == 0
    assert "goodput is off by at most 100%" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    wrong = {(one["system"], one["figure"]) for one in result["figures"] if abs(one["error"]) > 0.2}
    assert wrong == {("stock:tp1", "goodput_rps"), ("stock:tp1", "ttft_ms_p50")}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"engines": None}, "no system of ours"),
        ({"profile": None}, "no system of ours"),
        ({"layout": ""}, "no run"),
        ({"gpus": 1}, "static:tp1: "),
        ({"layout": "two"}, "two"),
        ({"profile": {"key": 1}}, "no result"),
    ],
)
def test_what_cannot_be_compared_is_told(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    path = measured(tmp_path, **changed)
    with pytest.raises(CheckError, match=says):
        check(path)


def test_a_window_of_a_trace_is_the_load_that_was_sent(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.csv", ((700 * number, 10 + number, 5 + number % 3) for number in range(40)))
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    command = ["--tier", "strict:1:400:30", "--trace", str(trace), "--seconds", "5", "--longest", "25"]
    options = parser.parse_args(command)
    options.reject, options.weight = [], {}
    load = msgspec.convert(compare_goodput.load_of(options), Sent)
    for times in (1.0, 2.0):
        mine = arrivals_of(load, MeasuredRun("t", times, 5.0, {}))
        theirs = requests_of(Load("t", times, trace), options)
        assert [(one.at_ms, one.prompt, one.output) for one in mine] == [
            (pytest.approx(1e3 * one.arrival_s), one.input_tokens, one.output_tokens) for one in theirs
        ]
    assert 8 < len(theirs) < 16
