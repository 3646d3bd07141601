"""Queries of board and alerts over made-up series, by promtool; and the picture of the board."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring import BOARD, MONITORING, ROOT, runnable

sys.path.insert(0, str(ROOT / "scripts"))

SWITCHES = 'sglang_adapt:switches_total{instance="a", from="x", to="y", reason="load", outcome="broken_off"}'


def check(folder: Path, tests: dict[str, Any]) -> None:
    """Let promtool evaluate rules or queries over series of a value each 15 s."""
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    said = {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "15s", "tests": [tests]}
    (folder / "tests.yml").write_text(yaml.safe_dump(said))
    command = [binary, "test", "rules", str(folder / "tests.yml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("values", ["_x7 1x60", "0x7 1x60", "4x7 5x60"])
def test_the_first_switch_that_fails_is_told_as_well(tmp_path: Path, values: str) -> None:
    """At 2 min; and no more at 13 min, when it is long ago."""
    fires = {
        "exp_labels": {"severity": "ticket", "instance": "a", "reason": "load"},
        "exp_annotations": {"summary": "a: something failed in a switch of layout; GET /adapt/layout has the failures"},
    }
    before = {"eval_time": "1m", "alertname": "AdaptSwitchBroken", "exp_alerts": []}
    if values.startswith("4"):
        # Prometheus has just begun, and cannot know that these are old.
        before["exp_alerts"] = [fires]
    tests = {
        "interval": "15s",
        "input_series": [{"series": SWITCHES, "values": values}],
        "alert_rule_test": [
            before,
            {"eval_time": "3m", "alertname": "AdaptSwitchBroken", "exp_alerts": [fires]},
            {"eval_time": "13m", "alertname": "AdaptSwitchBroken", "exp_alerts": []},
        ],
    }
    check(tmp_path, tests)


UP = 'sglang_adapt:engine_up{instance="a", engine="tp1@0"}'
ACTIVE = 'sglang_adapt:active_layout{instance="a", engine="tp1@0"}'
GOOD = 'sglang_adapt:goodput_requests_total{instance="a", tier="chat"}'
ALL = 'sglang_adapt:admission_total{instance="a", tier="chat", outcome="feasible"}'
ALERTS: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "AdaptServerDown": ({'up{job="sglang_adapt", instance="a"}': "1x20 0x60"}, {"job": "sglang_adapt"}, "page"),
    "AdaptNoEngine": ({UP: "1x20 0x60", ACTIVE: "1x80"}, {}, "page"),
    "AdaptEngineDown": ({UP: "1x20 0x60"}, {"engine": "tp1@0"}, "ticket"),
    "AdaptEngineRestarts": (
        {'sglang_adapt:engine_restarts_total{instance="a", engine="tp1@0"}': "0x20 1x3 2x3 3x54"},
        {"engine": "tp1@0"},
        "ticket",
    ),
    "AdaptTierMissesTargets": ({GOOD: "0+9x20 180+1x60", ALL: "0+9x80"}, {"tier": "chat"}, "ticket"),
}
"""By alert: series, of which something goes wrong after 5 min; the labels that it has beside `instance`; severity."""


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_when_it_should_and_not_before(alert: str, tmp_path: Path) -> None:
    series, labels, severity = ALERTS[alert]
    (rule,) = (
        rule
        for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == alert
    )
    summary = rule["annotations"]["summary"]
    for name, value in {"instance": "a", **labels}.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    fires = {
        "exp_labels": {"severity": severity, "instance": "a", **labels},
        "exp_annotations": {"summary": summary.replace("{{ $value | humanizePercentage }}", "11.11%")},
    }
    tests = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "4m", "alertname": alert, "exp_alerts": []},
            {"eval_time": "16m", "alertname": alert, "exp_alerts": [fires]},
        ],
    }
    check(tmp_path, tests)


def test_every_alert_is_tested() -> None:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == {*ALERTS, "AdaptSwitchBroken"}


def test_the_board_marks_the_first_switch(tmp_path: Path) -> None:
    annotation = json.loads(BOARD.read_text())["annotations"]["list"][0]["expr"]
    labels = '{from="x", to="y", reason="load"}'
    tests = {
        "interval": "5s",
        "input_series": [{"series": SWITCHES, "values": "_x5 1x60"}],
        "promql_expr_test": [
            {"expr": runnable(annotation), "eval_time": "20s", "exp_samples": []},
            {"expr": runnable(annotation), "eval_time": "35s", "exp_samples": [{"labels": labels, "value": 1}]},
            {"expr": runnable(annotation), "eval_time": "60s", "exp_samples": []},
        ],
    }
    check(tmp_path, tests)


def test_every_panel_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the test extra)")
    import board_picture

    panels = board_picture.panels_of(json.loads(BOARD.read_text()))
    line = board_picture.Line("a", [0.0, 1.0], [0.0, 1.0])
    for lines in ([line, line], []):
        board_picture.draw([(panel, lines) for panel in panels], [0.5], "title", tmp_path / "board.png")
        assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="how to draw piechart is not known"):
        board_picture.draw([({**panels[1], "type": "piechart"}, [])], [], "title", tmp_path / "board.png")


def test_the_picture_has_the_boards_names() -> None:
    board_picture = pytest.importorskip("board_picture")
    assert board_picture.legend("{{from}} to {{to}}: {{none}}", {"from": "a", "to": "b"}) == "a to b:"
    queries = [
        target["expr"]
        for panel in board_picture.panels_of(json.loads(BOARD.read_text()))
        for target in panel.get("targets", ())
    ]
    assert len(queries) > 25
    assert not any("$" in board_picture.runnable(query) for query in queries)
    assert re.search(r"!\[[^\]]*by Prometheus[^\]]*\]\(images/board\.png\)", (ROOT / "docs/operating.md").read_text())
