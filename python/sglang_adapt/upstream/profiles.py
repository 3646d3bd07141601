"""Profiles of several engines at once: each in files of its own."""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import Patch

_engine = ""


class EngineInNamesOfProfiles(Patch):
    """Puts the engine's name into the names of its traces; stock's name the rank alone, which engines share.

    Source: sglang/srt/managers/scheduler_components/profiler_manager.py.
    """

    target = "sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager._init_profile"
    kind = "after"

    @staticmethod
    def hook(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if result is None or result.success:
            asked = getattr(self, "profile_prefix", "")
            self.profile_prefix = f"{asked}-{_engine}" if asked else _engine


def name_profiles(engine: str) -> None:
    """Say which engine this process's rank belongs to."""
    global _engine
    _engine = engine
