"""The steps of the ablation in simulated time: each switches off what the server's flag does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulations import TIERS, both_tiers, hardware

from sglang_adapt.core.ablation import STEPS, Ablation, Scheduler
from sglang_adapt.core.layout import parse_layout, uniform_layout
from sglang_adapt.policy.price import Price
from sglang_adapt.simulate import study
from sglang_adapt.simulate.cli import main
from sglang_adapt.simulate.engine import Request
from sglang_adapt.simulate.routing import ByTiers
from sglang_adapt.simulate.systems import PAGE_COPIES_BYTES_PER_S, System, best_tier_engines, priced, run

HEAVY = both_tiers(90.0, 8.0)
ARRIVAL = Ablation(Scheduler.ARRIVAL)
BATCH_RULE = Ablation(Scheduler.BATCH_RULE)
SHORT = ("--rate", "20", "--seconds", "3", "--tier", "strict:1:300:10", "--tier", "loose:1:1000:20", "--quiet")


def static(ablation: Ablation, layout: str = "tp1@0,tp1@1,tp1@2,tp1@3") -> System:
    return System(hardware(), 4, parse_layout(layout, (1, 2), 4), ablation=ablation)


def test_by_arrival_goes_as_stock_does() -> None:
    stock = run(System(hardware(), 4, uniform_layout(1, 4), admission=False), HEAVY, TIERS)
    ours = run(static(ARRIVAL), HEAVY, TIERS)
    assert ours.judged["total"]["refused"] == 0
    assert ours.attainment == pytest.approx(stock.attainment, abs=0.02)


def test_the_batch_rule_lies_between_and_refuses_nobody() -> None:
    good = [run(static(one), HEAVY, TIERS) for one in (ARRIVAL, BATCH_RULE, Ablation())]
    assert [one.judged["total"]["refused"] for one in good][:2] == [0, 0]
    assert good[2].judged["total"]["refused"]
    assert good[0].goodput_rps < good[1].goodput_rps < good[2].goodput_rps


def test_each_tier_stays_on_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, str]] = set()
    send = ByTiers._send

    def noted(self: ByTiers, request: Request, name: str) -> None:
        seen.add((request.arrival.tier, name))
        send(self, request, name)

    monkeypatch.setattr(ByTiers, "_send", noted)
    own = (("strict", ("tp2@0-1",)), ("loose", ("tp1@2", "tp1@3")))
    for scheduler in Scheduler:
        seen.clear()
        found = run(static(Ablation(scheduler, own), "tp2@0-1,tp1@2,tp1@3"), HEAVY, TIERS)
        assert seen == {("strict", "tp2@0-1"), ("loose", "tp1@2"), ("loose", "tp1@3")}
        assert all(one.refused or one.done for one in found.requests)


def test_the_best_engines_of_each_tier_fill_the_gpus() -> None:
    own = best_tier_engines(static(BATCH_RULE), both_tiers(30.0, 5.0), TIERS)
    assert {tier for tier, _ in own} == {"strict", "loose"}
    layout = parse_layout(",".join(name for _, engines in own for name in engines), (1, 2), 4)
    assert len(layout.engines) == sum(len(engines) for _, engines in own)


def test_what_is_switched_off_of_switches_is_paid_for() -> None:
    price = Price(60.0, 3e11)
    assert priced(price, Ablation(stop_copy=True)) == price
    assert priced(price, Ablation(page_copies=True)) == Price(60.0, PAGE_COPIES_BYTES_PER_S)
    assert priced(price, Ablation(reload_weights=True), 8.0) == Price(8000.0, 3e11)


def test_steps_have_the_names_and_flags_of_the_server(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SHORT, "--study", "ablation", "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [one["system"] for one in runs] == [f"ablation:{number}" for number in STEPS]
    for one, (number, step) in zip(runs, STEPS.items(), strict=True):
        own = one["notes"].partition(": ")[2] if number == "4" else ""
        flags = [*step.ablation.flags, *(["--adapt-ablate-tier-engines", own] if own else [])]
        assert one.get("flags", []) == flags
        assert one["notes"].startswith(step.what)
    assert runs[3]["layouts"] == runs[4]["layouts"]


def test_step_six_pays_for_its_switches() -> None:
    burst = [*both_tiers(4.0, 10.0), *(replace(one, at_ms=one.at_ms + 10_000) for one in both_tiers(45.0, 10.0))]
    setting = study.Setting(hardware(), 4, tuple(burst), TIERS, 1.0, Price(60.0, 3e11), reload_s=5.0)
    runs = {one["system"]: one for one in study.ablation(setting, lambda line: None)[1]["runs"]}
    pauses = {
        step: [one["pause_ms"] for one in runs[f"ablation:{step}"]["layouts"] if "pause_ms" in one]
        for step in ("6", "6-warm", "7")
    }
    assert all(pauses.values())
    assert min(pauses["6"]) >= 5000.0 > max(pauses["6-warm"])


def test_flags_of_the_server_switch_off_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    own = ["--adapt-ablate-tier-engines", "strict=tp2@0-1/loose=tp1@2,tp1@3"]
    assert main([*SHORT, "--adapt-ablate-scheduler", "arrival", *own, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["flags"] == ["--adapt-ablate-scheduler", "arrival", *own]
    for argv, says in (
        ([*own, "--layout", "tp1"], "leave --layout out"),
        (["--adapt-ablate-page-copies", "--system", "stock", "--layout", "tp1"], "leave --system stock out"),
        (["--adapt-ablate-tier-engines", "strict=tp4@0-3"], "tier loose is missing"),
        (["--reload", "-1"], "--reload -1"),
    ):
        with pytest.raises(SystemExit):
            main([*SHORT, *argv])
        assert says in capsys.readouterr().err
