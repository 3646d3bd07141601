"""Tiers and profiles that a deployment refuses when it starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, TpProfile, write_profile
from sglang_adapt.front.settings import Settings, SettingsError, make_settings, split_argv

TIERS = "default: a\ntiers:\n  - {name: a, ttft_ms: 300, tpot_ms: TPOT}\n"


def settings(*argv: str) -> Settings:
    return make_settings(argv, "/nowhere", "forkserver")


def test_without_the_flag_there_are_no_tiers() -> None:
    made = settings().tiers
    assert made.config is None and made.key.gpu == "virtual GPU" and made.key.dtype == "float32"


def test_built_in_tiers_and_reckoned_times() -> None:
    made = settings("--adapt-slo-config", "built-in").tiers
    assert made.config is not None and made.config.default == "standard"
    assert made.speed_source.startswith("reckoned from the model's size and what virtual GPU does")
    assert made.times(1).prefill_ms(100) > made.times(1).prefill_ms(10) > 0
    assert made.times(2).decode_ms(1, 10) > 0


def test_a_planner_needs_times_and_several_tp_sizes() -> None:
    assert settings().tiers.figures == ()
    made = settings("--adapt-policy", "auto")
    assert made.tiers.config is None and made.tiers.times(2).decode_ms(1, 10) > 0
    assert (made.config.policy, made.config.interval_s) == ("auto", 1.0)
    with pytest.raises(SettingsError, match="--adapt-policy auto needs engines of several TP sizes"):
        settings("--adapt-policy", "auto", "--adapt-tp-sizes", "1")
    with pytest.raises(SettingsError, match=r"--adapt-interval 0\.0: give 0\.05 to 3600"):
        split_argv(["--adapt-interval", "0"])


def test_bad_tiers_do_not_start(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(TIERS.replace("TPOT", "0.01"))
    with pytest.raises(SettingsError, match=r"tier a: tpot_ms 0\.01 cannot be met by any engine here"):
        settings("--adapt-slo-config", str(file))
    file.write_text(TIERS.replace("TPOT", "10") + "  - {name: a, background: true}\n")
    with pytest.raises(SettingsError, match=r"line 4, tiers\[1\]\.name: tier a is there already"):
        settings("--adapt-slo-config", str(file))
    with pytest.raises(SettingsError, match=r"none\.yaml cannot be read"):
        settings("--adapt-slo-config", str(tmp_path / "none.yaml"))


def test_a_request_log_needs_tiers() -> None:
    with pytest.raises(SettingsError, match="give --adapt-slo-config as well"):
        split_argv(["--adapt-request-log", "x"])


def test_a_profile_of_here_is_used_and_another_refused(tmp_path: Path) -> None:
    file, key = tmp_path / "p.json", settings().tiers.key
    sizes = tuple(TpProfile(tp, (PrefillPoint(1, 0, 5.0),), (DecodePoint(1, 1, 3.0),)) for tp in (1, 2))
    write_profile(file, Profile(key, sizes))
    made = settings("--adapt-slo-config", "built-in", "--adapt-profile", str(file)).tiers
    assert made.floors_ms() == (5.0, 3.0) and made.speed_source == f"measured: {file}"
    write_profile(file, Profile(msgspec.structs.replace(key, gpu="NVIDIA H100"), sizes))
    with pytest.raises(SettingsError, match="gpu 'NVIDIA H100', which is 'virtual GPU' here"):
        settings("--adapt-profile", str(file))
    write_profile(file, Profile(key, sizes[:1]))
    with pytest.raises(SettingsError, match="nothing of TP size 2"):
        settings("--adapt-profile", str(file))
