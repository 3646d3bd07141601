"""Writes the list of measurements in docs/results.md anew from benchmark/results/*.json: card, date, versions, command.

python scripts/results_list.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- list of files: scripts/results_list.py -->", "<!-- end of the list -->"


def facts(data: Any) -> Iterator[dict[str, Any]]:
    """Each part of a result file that says when it was measured."""
    if isinstance(data, dict):
        if "date" in data and "command" in data:
            yield data
            return
        for value in data.values():
            yield from facts(value)


def cards_of(fact: dict[str, Any], path: Path) -> str:
    """What it was measured on, e.g. "2 x NVIDIA H200"."""
    if path.name.startswith("simulate_"):
        return "simulated"
    cards = fact.get("cards") or fact.get("card", "not told")
    if not isinstance(cards, list):
        cards = [cards]
    if len(cards) == 1:
        cards = cards * int(fact.get("gpus", 1))
    return ", ".join(f"{cards.count(card)} x {card}" for card in sorted(set(map(str, cards))))


def entry(path: Path) -> str:
    """One result file as an item of the list."""
    lines = [f"- `{path.name}`"]
    found = list(facts(json.loads(path.read_text())))
    if not found:
        lines.append("  card, date and command were not kept by this early run")
    for fact in found:
        versions = ", ".join(f"{name} {version}" for name, version in fact.get("versions", {}).items())
        parts = [str(fact["date"])[:10], cards_of(fact, path), versions, f"`{' '.join(str(fact['command']).split())}`"]
        lines.append("  " + "; ".join(part for part in parts if part))
    return "\n".join(lines)


def listed() -> str:
    """All of the list, with its markers."""
    files = sorted((ROOT / "benchmark" / "results").glob("*.json"))
    return "\n".join((BEGIN, "", *map(entry, files), "", END))


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + listed() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
