"""The command: its tables and files, and faults by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_goodput
from sglang_adapt.simulate.cli import main
from sglang_adapt.simulate.load import Cut, overlaid, poisson, read_trace, repeated, with_tiers

TWO = ["--tier", "strict:1:400:15", "--tier", "loose:1:1000:30"]
SHORT = ["--rate", "10", "--seconds", "4", "--quiet", *TWO]


def trace(folder: Path, text: str = "0,100,20,x\n500,200,10,x\n2500,4000,10,x\n") -> Path:
    path = folder / "trace.csv"
    path.write_text("arrival_ms,input_tokens,output_tokens,source_class\n" + text)
    return path


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--layout", "tp3"], "--layout tp3: TP sizes here are 1, 2, 4"),
        (["--layout", "tp²"], "'tp²' is not an engine"),
        (["--tp-sizes", "1_0"], "--tp-sizes 1_0: write numbers"),
        (["--layout", "tp1@0"], "no engine uses GPU 1, 2, 3"),
        (["--gpus", "6"], "--gpus 6"),
        (["--tp-sizes", "2,3"], "--tp-sizes 2,3: each size divides the next"),
        (["--card", "Z80"], "--card Z80 is not known; give one of"),
        (["--model", "gpt"], "--model gpt is not known"),
        (["--profile", "missing.json", "--kv-tokens", "1"], "missing.json cannot be read"),
        (["--trace", "missing.csv"], "give --rate or --trace"),
        (["--reject", "fast"], "--reject fast: there is no such tier"),
        (["--tier", "fast:1"], "--tier fast:1: write name:share:ttft_ms:tpot_ms"),
        (["--rate-scale", "0"], "--rate-scale 0"),
        (["--interval", "-1"], "--interval -1"),
        (["--price", "60"], "--price 60: write MS:BYTES_PER_S"),
        (["--kv-tokens", "500", "--input", "900"], "leave such out with --longest 468"),
        (["--system", "stock"], "stock has a layout that stays"),
        (["--check", "missing.json"], "--check missing.json cannot be read"),
    ],
)
def test_faults_are_told_by_name(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SHORT, *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [("0,1\n", "trace.csv:2"), ("5,0,1,x\n", "trace.csv:2"), ("", "no request is between"), ("x,1,1,x\n", "numbers")],
)
def test_a_bad_trace_is_told_with_its_line(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", str(trace(tmp_path, text)), "--quiet", *TWO])
    assert says in capsys.readouterr().err


def test_a_trace_by_window_and_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = trace(tmp_path), tmp_path / "out.json"
    assert main(["--trace", f"strict={path}", "--window", "0:2", "--json", str(out), "--quiet", *TWO]) == 0
    result = json.loads(out.read_text())
    assert [result["tiers"][tier]["sent"] for tier in ("strict", "loose", "total")] == [2, 0, 2]
    assert result["layouts"][0] == {"at_s": 0.0, "layout": "4 x TP 1"}
    assert "goodput_rps" in capsys.readouterr().out


def test_what_is_cut_of_a_trace(tmp_path: Path) -> None:
    path = trace(tmp_path)
    assert [one.at_ms for one in read_trace(path, Cut(speed=2.0))] == [0.0, 250.0, 1250.0]
    assert [one.prompt for one in read_trace(path, Cut(start_s=0.4))] == [200, 4000]
    assert [one.prompt for one in read_trace(path, Cut(longest=300, divide=2))] == [50, 100]
    assert len(read_trace(path, Cut(count=1))) == 1


@pytest.mark.parametrize("study", ["compare", "ablation", "interval", "targets"])
def test_series_have_a_line_for_each_system(study: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SHORT, "--study", study, "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(runs)
    assert all(one["system"] in line for one, line in zip(runs, lines[1:], strict=True))


def test_the_load_is_the_one_that_is_sent_to_servers() -> None:
    """With the same seed: the same requests, and the same tiers for them."""
    import random

    tiers = [bench_goodput.parse_tier("strict:1:400:30"), bench_goodput.parse_tier("loose:3:2000:80")]
    sent = bench_goodput.poisson(20.0, 5.0, 128, 48, random.Random(3))
    drawn = random.Random(3).choices(tiers, [tier.share for tier in tiers], k=len(sent))
    ours = with_tiers(poisson(20.0, 5.0, 128, 48, 3), {"strict": 1.0, "loose": 3.0}, 3)
    assert [(one.at_ms, one.prompt, one.output, one.tier) for one in ours] == [
        (one.arrival_s * 1e3, one.input_tokens, one.output_tokens, tier.name)
        for one, tier in zip(sent, drawn, strict=True)
    ]


def test_a_load_in_a_row_keeps_its_rate() -> None:
    one = poisson(5.0, 10.0, 100, 10, 0)
    day = repeated(one, 4)
    assert len(day) == 4 * len(one)
    assert [arrival.at_ms for arrival in day] == sorted(arrival.at_ms for arrival in day)
    assert len(day) / day[-1].at_ms == pytest.approx(len(one) / one[-1].at_ms, rel=0.05)


def test_more_users_are_as_many_requests_more() -> None:
    one = poisson(5.0, 10.0, 100, 10, 0)
    three = overlaid(one, 3)
    assert len(three) == 3 * len(one) and three[-1].at_ms <= one[-1].at_ms + 1
    assert [arrival.at_ms for arrival in three] == sorted(arrival.at_ms for arrival in three)
