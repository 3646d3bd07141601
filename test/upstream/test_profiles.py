"""Traces of engines that profile at once do not share their files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_adapt.upstream.profiles import EngineInNamesOfProfiles, name_profiles


@pytest.mark.parametrize(("asked", "named"), [("", "tp1@0"), ("mine", "mine-tp1@0")])
def test_the_engine_is_in_the_name_of_its_trace(asked: str, named: str) -> None:
    name_profiles("tp1@0")
    manager = SimpleNamespace(profile_prefix=asked)
    EngineInNamesOfProfiles.hook(SimpleNamespace(success=True), manager)
    assert manager.profile_prefix == named


def test_a_refused_profile_leaves_the_running_one_as_it_is() -> None:
    name_profiles("tp1@0")
    manager = SimpleNamespace(profile_prefix="tp1@0")
    EngineInNamesOfProfiles.hook(SimpleNamespace(success=False), manager)
    assert manager.profile_prefix == "tp1@0"
