"""Pictures of a result of `compare_goodput.py`: goodput and percentiles against the rate, and the course of runs."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMES = ("ttft_ms", "tpot_ms")
_PERCENTILES = {"p50": "-", "p99": "--"}
_LETTER_INCHES, _MARK_INCHES = 0.075, 0.7
"""Of a legend: a letter, and the mark before a name with the space around it."""


class NoPlotsError(RuntimeError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raises NoPlotsError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPlotsError(
            "--plots needs matplotlib, which comes with the tests' tools: uv sync, or pip install matplotlib"
        )


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all pictures of a result into a folder, as PNG; returns their paths.

    Args:
        result: as `compare_goodput.py` writes it.
        folder: is made if it is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for load in dict.fromkeys(run["load"] for system in result["systems"].values() for run in system["runs"]):
        made.append(_goodput(result, load, folder / f"goodput_{load}.png"))
        made.append(_percentiles(result, load, folder / f"percentiles_{load}.png"))
        for name, system in result["systems"].items():
            for run in system["runs"]:
                if run["load"] == load and "timeline" in run and run["repeat"] == 0:
                    file = f"timeline_{_as_file(name)}_{load}_{run['times']:g}x.png"
                    made.append(_timeline(result, name, run, folder / file))
    return made


def series(result: Mapping[str, Any], system: str, load: str, tier: str, figure: str) -> dict[float, list[float]]:
    """The values of a figure by multiple of the rate, one a repeat; without those that are None."""
    found: dict[float, list[float]] = {}
    for run in result["systems"][system]["runs"]:
        value = run["tiers"][tier][figure]
        if run["load"] == load and value is not None:
            found.setdefault(run["times"], []).append(value)
    return dict(sorted(found.items()))


def rates(result: Mapping[str, Any], load: str) -> dict[float, float]:
    """Requests a second that were sent of a load, by multiple of the rate."""
    return {
        run["times"]: run["tiers"]["total"]["sent"] / run["seconds"]
        for system in result["systems"].values()
        for run in system["runs"]
        if run["load"] == load
    }


def _line(axes: Any, rate: Mapping[float, float], values: Mapping[float, list[float]], **style: Any) -> None:
    """Means, with a band from the lowest to the highest where there are repeats."""
    at = [rate[times] for times in values]
    (line,) = axes.plot(at, [statistics.fmean(found) for found in values.values()], marker="o", markersize=3, **style)
    if any(len(found) > 1 for found in values.values()):
        low, high = [min(found) for found in values.values()], [max(found) for found in values.values()]
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _goodput(result: Mapping[str, Any], load: str, path: Path) -> Path:
    from matplotlib import pyplot

    tiers = ["total", *(tier["name"] for tier in result["load"]["tiers"])]
    rate = rates(result, load)
    figure, all_axes = pyplot.subplots(1, len(tiers), figsize=(5 * len(tiers), 4), squeeze=False, layout="constrained")
    for axes, tier in zip(all_axes[0], tiers, strict=True):
        for color, system in enumerate(result["systems"]):
            values = series(result, system, load, tier, "goodput_rps")
            _line(axes, rate, values, color=f"C{color}", label=system)
        axes.set(
            title=f"{load}: {tier}", xlabel="requests/s sent, all tiers", ylabel="goodput, requests/s", ylim=(0, None)
        )
        axes.grid(alpha=0.3)
    _legend(figure, all_axes[0][0])
    return _save(figure, result, path)


def _percentiles(result: Mapping[str, Any], load: str, path: Path) -> Path:
    from matplotlib import pyplot

    tiers = result["load"]["tiers"]
    rate = rates(result, load)
    figure, all_axes = pyplot.subplots(2, len(tiers), figsize=(5 * len(tiers), 7), squeeze=False, layout="constrained")
    for column, tier in enumerate(tiers):
        for axes, what in zip(all_axes[:, column], _TIMES, strict=True):
            for color, system in enumerate(result["systems"]):
                for percentile, style in _PERCENTILES.items():
                    values = series(result, system, load, tier["name"], f"{what}_{percentile}")
                    # Colours are systems, styles percentiles: each is named once.
                    label = system if percentile == "p50" else None
                    _line(axes, rate, values, color=f"C{color}", linestyle=style, label=label)
            for percentile, style in _PERCENTILES.items():
                axes.plot([], [], color="gray", linestyle=style, label=percentile)
            axes.axhline(tier[what], color="black", linewidth=1, label="target")
            name = what.removesuffix("_ms").upper()
            axes.set(
                title=f"{load}: {tier['name']}", xlabel="requests/s sent, all tiers", ylabel=f"{name}, ms", yscale="log"
            )
            axes.grid(alpha=0.3)
    _legend(figure, all_axes[0][0])
    return _save(figure, result, path)


def _timeline(result: Mapping[str, Any], system: str, run: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    line = run["timeline"]
    figure, (axes, below) = pyplot.subplots(
        2, 1, figsize=(10, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    seconds = range(len(line["sent"]))
    axes.step(seconds, line["sent"], where="post", color="gray", label="sent")
    axes.step(seconds, line["good"], where="post", color="C0", label="good, by arrival")
    axes.set(title=f"{system}, {run['load']} at {run['times']:g}x", ylabel="requests/s", ylim=(0, None))
    axes.legend(fontsize="small")
    names = list(dict.fromkeys(layout for _, layout in line["layouts"]))
    at = [second for second, _ in line["layouts"]]
    which = [names.index(layout) for _, layout in line["layouts"]]
    below.step([*at, max(len(line["sent"]), *at)], [*which, which[-1]], where="post", color="C1")
    below.set(xlabel="seconds", yticks=range(len(names)), yticklabels=names)
    for each in (axes, below):
        each.grid(alpha=0.3)
    return _save(figure, result, path)


def _legend(figure: Any, axes: Any) -> None:
    """One for all parts, below them, in as many columns as the longest name leaves room for."""
    lines, labels = axes.get_legend_handles_labels()
    room = figure.get_figwidth() / (_LETTER_INCHES * max(map(len, labels)) + _MARK_INCHES)
    figure.legend(lines, labels, loc="outside lower center", ncols=max(1, min(4, int(room))), fontsize="small")


def _save(figure: Any, result: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    environment = result["environment"]
    cards = ", ".join(sorted(set(environment["cards"])))
    figure.suptitle(
        f"{cards}; {str(environment['date'])[:10]}; sglang {environment['versions']['sglang']}", fontsize="small"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _as_file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)
