"""A room imports from lower floors only, and the check that says so can fail."""

from __future__ import annotations

from pathlib import Path

import sglang_adapt
from sglang_adapt.floors import floor_faults


def test_the_package_keeps_its_floors() -> None:
    assert floor_faults(Path(sglang_adapt.__file__).parent) == []


def test_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "router").mkdir()
    (tmp_path / "attic").mkdir()
    (tmp_path / "core" / "a.py").write_text("def f():\n    from sglang_adapt.router import router\n")
    (tmp_path / "router" / "b.py").write_text("import sglang.srt\nfrom sglang_adapt import launch_server\n")
    (tmp_path / "attic" / "c.py").write_text("")
    faults = [str(fault) for fault in floor_faults(tmp_path)]
    assert any("core/a.py:2: core (floor 0) imports sglang_adapt.router" in fault for fault in faults)
    assert any("router imports sglang.srt; only upstream" in fault for fault in faults)
    assert any("imports sglang_adapt.launch_server" in fault for fault in faults)
    assert any("room attic has no floor" in fault for fault in faults)
    assert len(faults) == 4
