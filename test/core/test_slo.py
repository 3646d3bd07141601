"""Tiers, their file, and what requests ask of them."""

from __future__ import annotations

import json
import math
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adapt.core.slo import BUILT_IN, SloConfig, Terms, TermsError, Tier, config_faults, request_terms
from sglang_adapt.core.slo_file import SloFileError, parse_slo_config, read_slo_config

GOOD = """\
default: loose
background_wait_s: 12
tiers:
  - name: strict
    ttft_ms: 300
    tpot_ms: 10
    weight: 4
    service_tiers: [priority]
    when_infeasible: reject
    queue_limit: 64
  - name: loose
    ttft_ms: 300.5
    tpot_ms: 20
  - name: nightly
    background: true
    service_tiers: [flex]
"""


def test_file_is_read_in_both_formats() -> None:
    config = parse_slo_config(GOOD, "tiers.yaml")
    assert [tier.name for tier in config.tiers] == ["strict", "loose", "nightly"]
    assert config.tier("strict") == Tier("strict", 300.0, 10.0, 4.0, ("priority",), "reject", 64)  # type: ignore[arg-type]
    assert (config.default, config.background_wait_s) == ("loose", 12.0)
    for text in (json.dumps(yaml.safe_load(GOOD)), json.dumps(yaml.safe_load(GOOD), indent="\t")):
        assert parse_slo_config(text, "tiers.json") == config


def test_built_in_tiers_have_no_fault() -> None:
    assert list(config_faults(BUILT_IN)) == []
    assert len(BUILT_IN.tiers) == 3
    assert read_slo_config("built-in") is BUILT_IN


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ttft_ms: 300\n", "ttft_ms: fast\n", "line 5, tiers[0].ttft_ms: Expected `float | null`, got `str`"),
        ("ttft_ms: 300\n", "ttft_ms: -1\n", "line 5, tiers[0].ttft_ms: Expected `float` > 0"),
        ("ttft_ms: 300\n", "ttft_ms: .nan\n", "line 5, tiers[0].ttft_ms"),
        ("ttft_ms: 300\n", "ttft_ms: .inf\n", "line 5, tiers[0].ttft_ms"),
        ("    ttft_ms: 300\n", "", "line 4, tiers[0].ttft_ms: tier strict needs a target"),
        ("weight: 4", "wieght: 4", "line 7, tiers[0].wieght: there is no key 'wieght'"),
        ("weight: 4", "weight: 0", "line 7, tiers[0].weight"),
        ("weight: 4", "tpot_ms: 4", "line 7: key tpot_ms is given twice"),
        ("[priority]", "[gold]", "line 8, tiers[0].service_tiers[0]: 'gold' is not a service_tier"),
        ("[flex]", "[priority]", "line 16, tiers[2].service_tiers[0]: priority means tier strict already"),
        ("queue_limit: 64", "queue_limit: 0", "line 10, tiers[0].queue_limit"),
        ("reject", "defer", "line 9, tiers[0].when_infeasible: Invalid enum value 'defer'"),
        ("name: loose", "name: strict", "line 11, tiers[1].name: tier strict is there already, as number 1"),
        ("name: loose", "name: Loose", "line 11, tiers[1].name"),
        ("name: loose", "name: auto", "line 11, tiers[1].name: auto always means"),
        ("name: loose", "name: priority", "line 11, tiers[1].name: priority is a tier and means tier strict"),
        ("default: loose", "default: losse", "line 1, default: there is no tier 'losse'; give one of strict, loose"),
        ("default: loose\n", "", "line 1, $: Object missing required field `default`"),
        ("background: true", "background: true\n    ttft_ms: 3", "line 16, tiers[2].ttft_ms: tier nightly is"),
        ("background_wait_s: 12", "background_wait_s: 0", "line 2, background_wait_s"),
        ("tiers:", "tiers: [", "line "),
        ("tiers:", "1: 2\ntiers:", "line 3: 1 is not a key"),
    ],
)
def test_bad_file_is_refused_with_line_and_key(old: str, new: str, told: str) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises(SloFileError) as error:
        parse_slo_config(GOOD.replace(old, new, 1), "tiers.yaml")
    assert str(error.value).startswith("tiers.yaml") and told in str(error.value), error.value


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "tiers: []\ndefault: a", "{", "a: &x 1\nb: *y", "!!python/x 1"]
)
def test_other_things_are_refused(text: str) -> None:
    with pytest.raises(SloFileError, match=r"tiers\.yaml"):
        parse_slo_config(text, "tiers.yaml")


def test_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(SloFileError, match=r"none\.yaml cannot be read"):
        read_slo_config(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"default: \xe4")
    with pytest.raises(SloFileError, match="not UTF-8"):
        read_slo_config(str(tmp_path / "latin.yaml"))


CONFIG = parse_slo_config(GOOD, "tiers.yaml")


@pytest.mark.parametrize(
    ("value", "header", "tier"),
    [
        (None, None, "loose"),
        ("auto", None, "loose"),
        ("default", None, "loose"),
        ("priority", None, "strict"),
        ("strict", None, "strict"),
        ("flex", None, "nightly"),
        ("flex", "strict", "strict"),
        ([1], "strict", "strict"),
    ],
)
def test_tier_of_a_request(value: object, header: str | None, tier: str) -> None:
    assert request_terms(CONFIG, value, header).tier == tier


def test_own_targets_override_the_tiers() -> None:
    terms = request_terms(CONFIG, "priority", None, "250.5", " 8 ")
    assert terms == Terms("strict", 250.5, 8.0, reject=True)
    assert request_terms(CONFIG, None, None, None, "8") == Terms("loose", 300.5, 8.0)
    assert request_terms(CONFIG, "flex") == Terms("nightly", None, None, background=True)


@pytest.mark.parametrize("value", ["gold", "", "scale", 3, ["strict"], {"a": 1}, "x" * 10_000, True])
def test_unknown_tier_is_refused_with_the_valid_ones(value: object) -> None:
    with pytest.raises(TermsError, match="give one of auto, default, strict, priority, loose, nightly, flex") as error:
        request_terms(CONFIG, value)
    assert (error.value.code, error.value.param) == ("unknown_tier", "service_tier")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "text", ["-1", "0", "", "fast", "nan", "inf", "1e3", "1_0", "٣", "3600001", "+5", "0x10", "5 5"]
)
def test_malformed_target_is_refused(text: str) -> None:
    with pytest.raises(TermsError, match="milliseconds, above 0") as error:
        request_terms(CONFIG, None, None, text)
    assert (error.value.code, error.value.param) == ("bad_target", "x-slo-ttft-ms")


def test_target_of_background_work_is_refused() -> None:
    with pytest.raises(TermsError, match="background work without targets"):
        request_terms(CONFIG, "flex", None, None, "10")


names = st.text("abz0_-", max_size=4).map(lambda rest: f"t{rest}")
targets = st.integers(1, 3_600_000_000).map(lambda us: us / 1000)


@st.composite
def configs(draw: st.DrawFn) -> SloConfig:
    free = ["default", "flex", "scale", "priority"]
    taken = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    tiers = []
    for name in taken:
        mine = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        free = [value for value in free if value not in mine]
        background = draw(st.booleans())
        tiers.append(
            Tier(
                name,
                None if background else draw(targets),
                None if background else draw(targets),
                service_tiers=tuple(mine),
                background=background,
            )
        )
    return SloConfig(tuple(tiers), draw(st.sampled_from(taken)))


@given(configs())
@settings(deadline=None, max_examples=60)
def test_every_sound_config_survives_its_file(config: SloConfig) -> None:
    import msgspec

    assert list(config_faults(config)) == []
    for encode in (msgspec.json.encode, msgspec.yaml.encode):
        assert parse_slo_config(encode(config).decode(), "f") == config


@given(configs(), st.none() | st.text(max_size=12) | st.sampled_from(["auto", "default", "flex", "scale", "priority"]))
@settings(deadline=None, max_examples=60)
def test_a_value_means_one_tier_or_is_refused(config: SloConfig, value: str | None) -> None:
    valid = value is None or value in config.valid_values
    try:
        terms = request_terms(config, value)
    except TermsError:
        assert not valid
        return
    assert valid
    tier = config.tier(terms.tier)
    assert (terms.ttft_ms, terms.tpot_ms, terms.background) == (tier.ttft_ms, tier.tpot_ms, tier.background)


@given(st.text(max_size=20))
@settings(deadline=None, max_examples=60)
def test_a_target_is_a_positive_number_or_refused(text: str) -> None:
    try:
        terms = request_terms(CONFIG, None, None, text)
    except TermsError:
        return
    assert terms.ttft_ms is not None and 0 < terms.ttft_ms <= 3_600_000 and math.isfinite(terms.ttft_ms)


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=60)
def test_no_text_breaks_the_reader(text: str) -> None:
    with pytest.raises(SloFileError):
        parse_slo_config(text, "f")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "tiers.yaml")
    with pytest.raises(SloFileError, match=r"tiers\.yaml is not a regular file"):
        read_slo_config(str(tmp_path / "tiers.yaml"))
