"""Which systems are compared, in which order, what is left of a comparison, and what is drawn of it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

import compare_goodput
from bench_goodput import parse_tier
from compare_goodput import load_of, write_tiers
from goodput import plots
from goodput.plots import draw
from goodput.schedule import OtherComparisonError, runs_done, turns
from goodput.systems import OURS, STOCK, Common, Kind, parse_system, servers_of, to_profile, urls_of
from goodput.timeline import timeline, watch_layout, watch_plans
from sglang_adapt.core.ablation import STEPS
from sglang_adapt.core.slo_file import read_slo_config

Noted = TypeVar("Noted")
TIERS = ("strict", "loose")
COMMON = Common(4, ("--both",), ("--ours",), ("--stock",), "tiers.json", "profile.json", False)


def flags(text: str, common: Common = COMMON) -> list[str]:
    return [" ".join(plan.flags) for plan in servers_of(parse_system(text, 4, TIERS), common)]


def test_systems_become_servers() -> None:
    assert flags("auto") == [
        "--both --ours --adapt-slo-config tiers.json --adapt-profile profile.json --adapt-policy auto"
    ]
    (static,) = flags("static:tp2")
    assert static.endswith("--adapt-policy static --adapt-layout tp2@0-1,tp2@2-3")
    assert flags("static:tp2@0-1,tp1@2,tp1@3")[0].endswith("--adapt-layout tp2@0-1,tp1@2,tp1@3")
    assert flags("stock:tp2") == ["--both --stock --tp-size 2 --sleep-on-idle --dp-size 2"]
    assert flags("stock:tp4") == ["--both --stock --tp-size 4 --sleep-on-idle"]
    assert flags("split:strict=tp2@0-1/loose=tp1@2-3") == [
        "--both --stock --tp-size 2 --sleep-on-idle",
        "--both --stock --tp-size 1 --sleep-on-idle --dp-size 2 --base-gpu-id 2",
    ]


BY_TIER = "strict=tp2@0-1/loose=tp1@2,tp1@3"


def test_steps_of_the_ablation_become_servers_that_differ_by_what_is_switched_off() -> None:
    common = "--both --ours --adapt-slo-config tiers.json --adapt-profile profile.json --adapt-policy "
    off = {
        "1": "static --adapt-layout tp1@0,tp1@1,tp1@2,tp1@3 --adapt-ablate-scheduler arrival",
        "1:tp2": "static --adapt-layout tp2@0-1,tp2@2-3 --adapt-ablate-scheduler arrival",
        "2:tp2@0-1:prefill,tp2@2-3:decode": "static --adapt-layout tp2@0-1:prefill,tp2@2-3:decode "
        "--adapt-ablate-scheduler arrival",
        "3:tp4": "static --adapt-layout tp4@0-3 --adapt-ablate-scheduler batch-rule",
        f"4:{BY_TIER}": f"static --adapt-ablate-scheduler batch-rule --adapt-ablate-tier-engines {BY_TIER}",
        f"5:{BY_TIER}": "static --adapt-layout tp2@0-1,tp1@2,tp1@3",
        "6": "auto --adapt-ablate-page-copies --adapt-ablate-stop-copy --adapt-ablate-reload-weights",
        "6-warm": "auto --adapt-ablate-page-copies --adapt-ablate-stop-copy",
        "7": "auto",
    }
    assert {step.split(":")[0] for step in off} == set(STEPS)
    for step, says in off.items():
        assert flags(f"ablation:{step}") == [common + says]
        system = parse_system(f"ablation:{step}", 4, TIERS)
        assert (system.kind, system.is_ours, system.may_share) == (Kind.ABLATION, True, False)


def test_each_tier_has_its_server() -> None:
    plans = servers_of(parse_system("split:loose=tp1@0/strict=tp1@1-3", 4, TIERS), COMMON)
    assert [plan.module for plan in plans] == [STOCK, STOCK]
    assert urls_of(plans, ["http://a", "http://b"], TIERS) == {"strict": "http://b", "loose": "http://a"}
    assert urls_of([to_profile(COMMON)], ["http://a"], TIERS) == dict.fromkeys(TIERS, "http://a")
    assert parse_system("auto", 4, TIERS).is_ours and to_profile(COMMON).module == OURS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stock", "is no system"),
        ("auto:tp1", "is no system"),
        ("stock:tp3", "do not fill 4 GPUs"),
        ("static:tp0", "do not fill"),
        ("split:strict=tp1@0", "each of strict, loose"),
        ("split:strict=tp1@0/loose=tp1@0-3", "GPUs of another tier"),
        ("split:strict=tp1@0/loose=tp1@1-4", "beyond the 4"),
        ("split:strict=tp2@0/loose=tp1@1-3", "do not fill 1 GPUs"),
        ("split:strict=tp1@3-2/loose=tp1@1", "do not fill"),
        ("split:strict", "is not TIER="),
        ("ablation:8", "steps of the ablation are 1, 2, 3"),
        ("ablation:2", "has a layout of its own"),
        ("ablation:2:tp1@0:prefill,tp1@1:decode", "no engine uses GPU 2"),
        ("ablation:2:tp2@0-1,tp2@2-3", "has a layout of its own"),
        ("ablation:3", "has a layout of its own"),
        ("ablation:3:tp3", "do not fill 4 GPUs"),
        ("ablation:4:strict=tp4@0-3", "tier loose is missing"),
        ("ablation:4:strict=tp2@0-1/loose=tp2@1-2", "starts at a multiple of 2"),
        ("ablation:5:strict/loose", "is not TIER=ENGINE"),
        ("ablation:7:tp1", "follows the traffic"),
    ],
)
def test_what_is_no_system_is_told(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        parse_system(text, 4, TIERS)


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, unique=True),
    st.lists(st.tuples(st.sampled_from(["code", "chat"]), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, unique=True),
    st.integers(1, 4),
    st.data(),
)
def test_all_is_measured_once_wherever_it_was_interrupted(
    systems: list[str], loads: list[tuple[str, float]], repeats: int, data: st.DataObject
) -> None:
    everything = [
        (turn.repeat, turn.system, load) for turn in turns(systems, loads, repeats, {}) for load in turn.loads
    ]
    assert len(everything) == len(set(everything)) == len(systems) * len(loads) * repeats
    firsts = [next(system for repeat, system, _ in everything if repeat == number) for number in range(repeats)]
    assert firsts == [systems[number % len(systems)] for number in range(repeats)]
    over = data.draw(st.integers(0, len(everything)))
    done: dict[str, list[dict[str, Any]]] = {}
    for repeat, system, load in everything[:over]:
        done.setdefault(system, []).append({"repeat": repeat, "load": load[0], "times": load[1]})
    rest = [(turn.repeat, turn.system, load) for turn in turns(systems, loads, repeats, done) for load in turn.loads]
    assert rest == everything[over:]


def test_another_comparison_is_not_gone_on_with() -> None:
    result = {"gpus": 2, "systems": {"auto": {"runs": [{"repeat": 0}]}}}
    assert runs_done({}, {"gpus": 2}, "f.json") == {}
    assert runs_done(result, {"gpus": 2}, "f.json") == {"auto": [{"repeat": 0}]}
    with pytest.raises(OtherComparisonError, match=r"f\.json is of another comparison: its gpus is 2.*another --json"):
        runs_done(result, {"gpus": 4}, "f.json")


def test_weights_are_the_servers_and_the_checks(tmp_path: Path) -> None:
    tiers = [parse_tier("strict:1:400:30"), parse_tier("loose:1:2000:80")]
    options = argparse.Namespace(tier=tiers, reject=["strict"], weight={"strict": 2.0})
    config = read_slo_config(str(write_tiers(options, tmp_path)))
    assert {tier.name: tier.weight for tier in config.tiers} == {"strict": 2.0, "loose": 1.0}
    sent = dict.fromkeys(("rate", "seconds", "input", "output", "count", "divide", "longest", "seed"))
    without = argparse.Namespace(tier=tiers, trace=[], reject=[], weight={}, **sent)
    assert "weight" not in load_of(without), "comparisons of before can be gone on with"
    assert load_of(argparse.Namespace(**{**vars(without), "weight": {"strict": 2.0}}))["weight"] == {"strict": 2.0}


def test_timeline() -> None:
    told = timeline([(0.0, "tp1@0")], [(0.5, {"1 x TP 1": 2.0})], [0.1, 0.9, 2.5], [True, False, True])
    assert told == {
        "layouts": [[0.0, "tp1@0"]],
        "plans": [[0.5, {"1 x TP 1": 2.0}]],
        "sent": [2, 0, 1],
        "good": [1, 0, 1],
    }


async def watched(
    watch: Callable[[str], Coroutine[Any, Any, list[tuple[float, Noted]]]], path: str, said: Sequence[Any]
) -> list[Noted]:
    """What is noted of a server that answers this at `path`, one after the other (None: an error), then the last."""
    left, over = list(said), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if not left:
            # What was said before is noted by now.
            over.set()
        one = left.pop(0) if left else said[-1]
        return web.Response(status=500) if one is None else web.json_response(one)

    app = web.Application()
    app.router.add_get(path, answer)
    async with TestServer(app) as server:
        task = asyncio.create_task(watch(str(server.make_url("")).rstrip("/")))
        await over.wait()
        task.cancel()
        return [what for _, what in await task]


def test_layouts_are_noted_when_they_change_and_when_nobody_answers() -> None:
    said = ["tp1@0,tp1@1", "tp1@0,tp1@1", None, "tp2@0-1"]
    answers = [None if one is None else {"layout": one} for one in said]
    seen = asyncio.run(watched(watch_layout, "/adapt/engines", answers))
    assert seen == ["tp1@0,tp1@1", "unknown", "tp2@0-1"]


def test_what_the_planner_thinks_is_noted_when_it_changes_and_not_when_nobody_answers() -> None:
    said = [{"1 x TP 2": 2.0}, {"1 x TP 2": 2.0}, None, {"2 x TP 1": 3.0, "1 x TP 2": 2.0}]
    answers = [
        None if one is None else {"options": [{"engines": name, "value": value} for name, value in one.items()]}
        for one in said
    ]
    seen = asyncio.run(watched(watch_plans, "/adapt/plan", answers))
    assert seen == [{"1 x TP 2": 2.0}, {"2 x TP 1": 3.0, "1 x TP 2": 2.0}]


def result() -> dict[str, Any]:
    """Two systems, two rates, two repeats; one tier of stock met nothing."""
    figures = {f"{what}_p{percent}": 12.0 for what in ("ttft_ms", "tpot_ms") for percent in (50, 90, 99)}
    one = {"sent": 40, "goodput_rps": 2.0, **figures}
    none = {"sent": 40, "goodput_rps": 0.0, **dict.fromkeys(figures)}
    line = {"layouts": [[0.0, "tp1@0,tp1@1"], [1.5, "tp2@0-1"]], "sent": [3, 2, 4], "good": [3, 1, 4]}
    all_met, loose_missed = dict.fromkeys(("total", *TIERS), one), {"total": one, "strict": one, "loose": none}
    runs = [
        {"load": "code", "times": times, "repeat": repeat, "seconds": 10.0, "tiers": all_met}
        for times in (1.0, 2.0)
        for repeat in (0, 1)
    ]
    return {
        "environment": {"date": "2026-11-28", "cards": ["none"], "versions": {"sglang": "0.5.17"}},
        "load": {"tiers": [{"name": name, "ttft_ms": 300.0, "tpot_ms": 10.0} for name in TIERS]},
        "systems": {
            "auto": {"kind": Kind.AUTO, "runs": [{**run, "timeline": line} for run in runs]},
            "stock:tp1": {
                "kind": Kind.STOCK,
                "runs": [{**run, "tiers": loose_missed} for run in runs],
            },
            f"ablation:4:{BY_TIER}": {"kind": Kind.ABLATION, "runs": [{**runs[0], "timeline": line}]},
        },
    }


def test_all_pictures_are_drawn(tmp_path: Path) -> None:
    made = draw(json.loads(json.dumps(result())), tmp_path / "plots")
    assert [path.name for path in made] == [
        "goodput_code.png",
        "percentiles_code.png",
        "timeline_auto_code_1x.png",
        "timeline_auto_code_2x.png",
        "timeline_ablation-4-strict-tp2-0-1-loose-tp1-2-tp1-3_code_1x.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in made)


def test_legends_fit_beside_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []

    def look(figure: Any, result: Any, path: Path) -> Path:
        figure.canvas.draw()
        for legend in figure.legends:
            box = legend.get_window_extent()
            if box.x0 < 0 or box.x1 > figure.bbox.width:
                cut.append(path.name)
        seen.append(len(figure.legends))
        return path

    seen: list[int] = []
    monkeypatch.setattr(plots, "_save", look)
    made = result()
    run = made["systems"]["stock:tp1"]
    made["systems"] |= {f"ablation:{number}:{BY_TIER}" + ",tp1@4" * number: run for number in range(9)}
    draw(made, tmp_path)
    assert sum(seen) == 2 and not cut


def test_overview() -> None:
    lines = compare_goodput.overview(result()).splitlines()
    assert lines[0].split() == ["load", "times", "auto", "stock:tp1", f"ablation:4:{BY_TIER}"]
    assert lines[1].split() == ["code", "1", "2.000", "2.000", "2.000"] and len(lines) == 3
    assert lines[2].split() == ["code", "2", "2.000", "2.000", "-"]
