"""Takes docs/images/board.png: the panels of the Grafana board over a burst on virtual GPUs, without Grafana.

A real Prometheus scrapes the server and evaluates the board's own queries; matplotlib draws them where the board has
them. So the picture shows what the queries give, and not how Grafana draws it. Needs Prometheus (`apt install
prometheus`) and the test extra (matplotlib). About two minutes:

    python scripts/board_picture.py
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))

import page_screenshots  # noqa: E402
from server import Server, free_port  # noqa: E402

MONITORING = ROOT / "docker" / "monitoring"
BOARD = MONITORING / "grafana" / "boards" / "sglang_adapt.json"
RATE_INTERVAL = "15s"
"""`$__rate_interval` as Grafana would have it, for a scrape each second: short bursts are to be seen."""
COLUMNS = 24
"""Of a Grafana board."""
SUFFIXES = {"s": " s", "reqps": " req/s", "Bps": " B/s", "percentunit": "", "short": ""}


@dataclass(frozen=True)
class Line:
    """One series of a panel: its name in the legend, times in s from the start, and values."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "board.png", help="the picture")
    parser.add_argument("--seconds", type=float, default=90.0, help="of load (default: 90)")
    args = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("there is no Prometheus here; apt install prometheus")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "tiers.yaml"
        config.write_text(page_screenshots.TIERS)
        flags = ["--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "1,2", "--enable-metrics", "--adapt-policy", "auto"]
        flags += ["--adapt-slo-config", str(config)]
        with Server("board", "sglang_adapt.launch_server", flags, folder / "log") as server:
            with prometheus(server.url, folder) as source:
                began = time.time()
                bursts(server.url, args.seconds)
                ended = time.time()
                version = httpx.get(f"{source}/api/v1/status/buildinfo").json()["data"]["version"]
                board = json.loads(BOARD.read_text())
                drawn = [(panel, lines_of(source, panel, began, ended)) for panel in panels_of(board)]
                marks = switches_of(source, board, began, ended)
    title = (
        f"The panels of docker/monitoring/grafana/boards/{BOARD.name}, evaluated by Prometheus {version}\n"
        f"over {args.seconds:.0f} s of bursts on 4 virtual GPUs, and drawn by scripts/board_picture.py (not by Grafana)"
    )
    draw(drawn, marks, title, args.output)


@contextmanager
def prometheus(server: str, folder: Path) -> Iterator[str]:
    """URL of a Prometheus that scrapes a server each second, by the config that is shipped."""
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("server:30000", server.removeprefix("http://")).replace("5s", "1s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not _scrapes(f"http://{address}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Prometheus does not scrape:\n{(folder / 'prometheus.log').read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(20)


def _scrapes(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": "sglang_adapt:engine_up"}, timeout=20)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and bool(answer.json()["data"]["result"])


def bursts(url: str, seconds: float) -> None:
    """Load of three tiers with bursts; after a third of the time an operator goes over to wide engines for a while."""
    stop = threading.Event()
    with ThreadPoolExecutor(40) as clients:
        load = clients.submit(page_screenshots.load, url, stop, clients)
        for order in ({"layout": "tp2@0-1,tp2@2-3"}, {"layout": "tp1@0,tp1@1,tp2@2-3"}, {"layout": "auto"}):
            stop.wait(seconds / 4)
            httpx.post(f"{url}/adapt/layout", json=order, timeout=60).raise_for_status()
        stop.wait(seconds / 4)
        stop.set()
        load.result()
        clients.shutdown(cancel_futures=True)


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, those of folded rows as well."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", ()))]


def runnable(query: str) -> str:
    """A query of the board as Prometheus takes it."""
    return query.replace("$instance", ".*").replace("$__rate_interval", RATE_INTERVAL)


def legend(form: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}` filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), form).strip()


def lines_of(source: str, panel: dict[str, Any], began: float, ended: float) -> list[Line]:
    """What Prometheus says to the queries of a panel, each second."""
    return [
        line
        for target in panel.get("targets", ())
        for line in _ask(source, target["expr"], target.get("legendFormat", ""), began, ended)
    ]


def _ask(source: str, query: str, form: str, began: float, ended: float) -> list[Line]:
    asked = {"query": runnable(query), "start": str(began), "end": str(ended), "step": "1"}
    answer = httpx.get(f"{source}/api/v1/query_range", params=asked, timeout=60)
    if answer.status_code != 200:
        raise RuntimeError(f"{query}: {answer.text}")
    lines = []
    for series in answer.json()["data"]["result"]:
        points = [(at - began, float(value)) for at, value in series["values"]]
        known = [(at, value) for at, value in points if math.isfinite(value)]
        if known:
            lines.append(Line(legend(form, series["metric"]), *zip(*known, strict=True)))
    return lines


def switches_of(source: str, board: dict[str, Any], began: float, ended: float) -> list[float]:
    """When the board's annotation begins to show each switch, in s."""
    (annotation,) = board["annotations"]["list"]
    lines = _ask(source, annotation["expr"], annotation["titleFormat"], began, ended)
    starts = set()
    for line in lines:
        starts |= {at for before, at in zip([-9.0, *line.times], line.times, strict=False) if at - before > 1.5}
    return sorted(starts)


def draw(drawn: Sequence[tuple[dict[str, Any], list[Line]]], marks: Sequence[float], title: str, output: Path) -> None:
    """Write the picture. Raises ValueError for a kind of panel that it does not know."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in drawn) + 2
    figure = pyplot.figure(figsize=(15, 0.4 * height), dpi=90, facecolor="white")
    figure.text(0.01, 1 - 0.4 / height, title, fontsize=11, va="top", weight="bold")
    kinds = {"timeseries": _timeseries, "state-timeline": _states, "stat": _stat}
    for panel, lines in drawn:
        place = panel["gridPos"]
        top = 1 - (place["y"] + 2) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.5 / height, panel["title"], fontsize=11, va="center", color="#1f4e79")
            continue
        if panel["type"] not in kinds:
            raise ValueError(f"panel {panel['title']}: how to draw {panel['type']} is not known; add it here")
        # Room for the title above, for the axis and, with lines, for the legend.
        wide = place["w"] / COLUMNS
        plot = wide - (0.06 if panel["type"] == "stat" else 0.06 + 0.28 * wide)
        box = (place["x"] / COLUMNS + 0.045, top - (place["h"] - 1.0) / height, plot, (place["h"] - 2.1) / height)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], fontsize=9, loc="left")
        kinds[panel["type"]](axes, panel, lines)
        if panel["type"] == "timeseries":
            for at in marks:
                axes.axvline(at, color="#e08214", linewidth=0.7, linestyle="--")
        if not lines:
            axes.text(0.5, 0.5, "nothing happened", transform=axes.transAxes, ha="center", fontsize=8, color="#6b7280")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def _timeseries(axes: Any, panel: dict[str, Any], lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["custom"]["stacking"]["mode"] == "normal" and lines:
        times = sorted({at for line in lines for at in line.times})
        found = [dict(zip(line.times, line.values, strict=True)) for line in lines]
        axes.stackplot(times, [[one.get(at, 0.0) for at in times] for one in found], labels=[one.name for one in lines])
    else:
        for line in lines:
            axes.plot(line.times, line.values, label=line.name, linewidth=1.2)
    axes.set_ylim(bottom=defaults.get("min"), top=1.05 * defaults["max"] if "max" in defaults else None)
    axes.set_ylabel(SUFFIXES[defaults["unit"]].strip(), fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(linewidth=0.3)
    if lines:
        # What is always 0 comes last, and not all of it.
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(lines)), key=lambda at: -max(lines[at].values))[:14]
        # Long names stand in the plot, where they do not reach into the next one.
        inside = max(len(label) for label in labels) > 35
        axes.legend(
            [handles[at] for at in order],
            [labels[at] for at in order],
            fontsize=6,
            loc="upper left",
            bbox_to_anchor=(0.0, 1.02) if inside else (1.0, 1.04),
            frameon=False,
            handlelength=1.2,
        )


def _states(axes: Any, panel: dict[str, Any], lines: Sequence[Line]) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    shown = {float(value): option for value, option in mapping["options"].items()}
    for row, line in enumerate(lines):
        for value, option in shown.items():
            spans = [(at, 1.0) for at, seen in zip(line.times, line.values, strict=True) if seen == value]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=option["color"], label=option["text"] if not row else None)
    axes.set_yticks(range(len(lines)), [line.name for line in lines], fontsize=7)
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.04), frameon=False)


def _stat(axes: Any, panel: dict[str, Any], lines: Sequence[Line]) -> None:
    axes.set_axis_off()
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for at, line in enumerate(lines):
        value = line.values[-1]
        text = f"{value:.0%}" if unit == "percentunit" else f"{value:.3g}{SUFFIXES[unit]}"
        place = (at + 0.5) / len(lines)
        axes.text(place, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=15, color="#1f4e79")
        axes.text(place, 0.05, line.name, transform=axes.transAxes, ha="center", fontsize=7)


if __name__ == "__main__":
    main()
