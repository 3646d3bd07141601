"""From what the processes measured to a table and a JSON file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kv_bench.cases import Case


@dataclass(frozen=True)
class Measured:
    """One process's report of one measurement."""

    gpu: int
    section: str
    key: Any
    values: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A measurement over all GPUs: the slowest time, the most bytes over one GPU's link in one direction.

    Attributes:
        what: the section, or a variant of it.
        direction, page_tokens, gb_per_gpu: the case.
        ms: device time of the slowest GPU (host time where the section says so).
        link_gb: the most GB that one GPU sends to, or gets from, the others.
        gbps: `link_gb` over `ms`.
        of_limit: `gbps` over that of plain copies by all GPUs at once.
        wrong: words that were not as they must be, over all GPUs; None where nothing was checked.
        more: further values, the worst over the GPUs.
    """

    what: str
    direction: str
    page_tokens: int
    gb_per_gpu: float
    ms: float
    link_gb: float
    gbps: float
    of_limit: float | None
    wrong: int | None
    more: dict[str, float]


def limits(measured: Iterable[Measured]) -> dict[str, float]:
    """GB/s of the plain copies: `one_way` by one GPU alone, `all` of the slowest with all at once."""
    rates: dict[str, float] = {}
    for item in measured:
        if item.section == "limit":
            rate = item.values["bytes"] / item.values["ms"] / 1e6
            rates[item.key] = min(rate, rates.get(item.key, rate))
    return rates


def rows(measured: list[Measured]) -> list[Row]:
    """Join the processes' reports of each measurement."""
    limit = limits(measured).get("all")
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for item in measured:
        if "ms" in item.values and item.section != "limit":
            groups.setdefault((item.section, item.key), []).append(item.values)
    return [_row(section, key, values, limit) for (section, key), values in groups.items()]


def _row(section: str, key: Any, values: list[dict[str, Any]], limit: float | None) -> Row:
    case = key if isinstance(key, Case) else None
    ms = max(value["ms"] for value in values)
    link = max(max(value["out"], value["in"]) for value in values)
    gbps = link / ms / 1e6
    more = {
        name: max(value[name] for value in values)
        for name in ("wall_ms", "plan_ms", "calls", "slowdown", "local")
        if all(name in value for value in values)
    }
    return Row(
        section if case is not None else f"{section} {key}",
        case.direction if case else "",
        case.page_tokens if case else 0,
        case.bytes_per_gpu / 1e9 if case else 0.0,
        ms,
        link / 1e9,
        gbps,
        gbps / limit if limit else None,
        sum(value["wrong"] for value in values) if all("wrong" in value for value in values) else None,
        more,
    )


def table(found: Iterable[Row]) -> str:
    """The rows as text, aligned."""
    head = (
        f"{'what':20s} {'way':>5s} {'page':>5s} {'GB/GPU':>7s} {'ms':>10s} {'link GB':>8s} {'GB/s':>7s} {'of all':>6s}"
    )
    lines = [f"{head}  exact"]
    for row in found:
        of_limit = "" if row.of_limit is None else f"{row.of_limit:.3f}"
        exact = "" if row.wrong is None else "yes" if row.wrong == 0 else f"NO, {row.wrong} words"
        more = " ".join(f"{name}={value:.3g}" for name, value in row.more.items() if name != "local")
        lines.append(
            f"{row.what:20s} {row.direction:>5s} {row.page_tokens:5d} {row.gb_per_gpu:7.3g} {row.ms:10.3f} "
            f"{row.link_gb:8.3f} {row.gbps:7.1f} {of_limit:>6s}  {exact} {more}"
        )
    return "\n".join(lines)


def as_json(found: Iterable[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in found]
