"""The board, the alerts, and what their queries need of a server's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docker" / "monitoring"
BOARD = MONITORING / "grafana" / "boards" / "sglang_adapt.json"

_SELECTOR = re.compile(r"(sglang(?:_adapt)?:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_BY = re.compile(r"\bby \(([^)]*)\)")
SCRAPED = frozenset(("instance", "job"))
"""Labels that Prometheus adds."""


def board_queries() -> list[str]:
    """Every query of the board: panels, variables, annotations."""
    board = json.loads(BOARD.read_text())
    return [
        *_exprs(board),
        *(entry["query"]["query"] for entry in board["templating"]["list"] if entry["type"] == "query"),
    ]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def _exprs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for value in node.values():
            yield from _exprs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _exprs(value)


def needs(query: str) -> dict[str, set[str]]:
    """The series that a query reads, and the labels that each must have."""
    grouped = {label.strip() for labels in _BY.findall(query) for label in labels.split(",")}
    found: dict[str, set[str]] = {}
    for name, matchers in _SELECTOR.findall(query):
        found.setdefault(name, set()).update(grouped - SCRAPED, set(_MATCHER.findall(matchers)) - SCRAPED)
    return found


def runnable(query: str) -> str:
    """A query of the board as Prometheus takes it, Grafana's variables filled in."""
    return query.replace("$instance", ".*").replace("$__rate_interval", "1m")
