"""The rooms of this package and the floor of each: a room imports from lower floors only.

`python -m sglang_adapt.check` and test/test_floors.py hold this line. Imports inside functions count as well.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FLOORS: dict[str, int] = {
    "version": 0,
    "core": 0,
    "demo": 0,
    "policy": 1,
    "memory": 2,
    "weights": 2,
    "kv": 2,
    "upstream": 3,
    "engine": 4,
    "keeper": 4,
    "router": 5,
    "front": 6,
    "floors": 7,
    "check": 7,
    "launch_server": 7,
    "ctl": 7,
    "profile": 7,
    "simulate": 7,
}
"""Floor by room. `weights` and `kv` may use `memory`, which is on their floor: see `_NEIGHBOURS`."""

_NEIGHBOURS = {("weights", "memory"), ("kv", "memory"), ("check", "floors"), ("engine", "keeper")}
_SGLANG_ROOMS = {"upstream"}


@dataclass(frozen=True)
class FloorFault:
    """One import that breaks the rule."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def floor_faults(package: Path) -> list[FloorFault]:
    """Every import of the package at `package` that reaches up, sideways, or past `upstream` into sglang."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = relative.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        name = str(relative)
        if room not in FLOORS:
            faults.append(FloorFault(name, 1, f"room {room} has no floor in floors.py"))
            continue
        for line, module in _imports(path):
            top = module.split(".")[0]
            if top == "sglang" and room not in _SGLANG_ROOMS:
                faults.append(FloorFault(name, line, f"{room} imports {module}; only upstream may touch sglang"))
            if top != "sglang_adapt" or module == "sglang_adapt":
                continue
            other = module.split(".")[1]
            if other == room or other == "version" or (room, other) in _NEIGHBOURS:
                continue
            if FLOORS.get(other, 99) >= FLOORS[room]:
                faults.append(
                    FloorFault(
                        name, line, f"{room} (floor {FLOORS[room]}) imports {module} (floor {FLOORS.get(other)})"
                    )
                )
    return faults


def _imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            if node.module == "sglang_adapt":
                found += [(node.lineno, f"sglang_adapt.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found
