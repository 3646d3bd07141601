"""What the flags of `cli.py` mean: load, tiers, engines and layout, each fault by the name of its flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Sequence
from itertools import pairwise
from pathlib import Path

from sglang_adapt.core.digits import number, whole
from sglang_adapt.core.layout import Layout, parse_layout, uniform_layout
from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible
from sglang_adapt.core.slo_file import read_slo_config
from sglang_adapt.policy.price import GPU_PRICE, Price
from sglang_adapt.simulate.hardware import MODELS, Hardware, Shape, measured, reckoned
from sglang_adapt.simulate.load import (
    Arrival,
    Cut,
    Phase,
    merged,
    of_tier,
    phased,
    poisson,
    read_trace,
    repeated,
    with_tiers,
)
from sglang_adapt.simulate.study import Setting, scaled

AUTO = "auto"


class FlagError(ValueError):
    """A flag cannot be used; the text names it."""


def setting_of(options: argparse.Namespace) -> Setting:
    """All of a run but its layout. Raises FlagError, or what its parts raise."""
    config, shares = _tiers(options)
    hardware = _hardware(options)
    if options.gpus < 1 or any(options.gpus % tp for tp in hardware.tp_sizes):
        raise FlagError(f"--gpus {options.gpus}: give a multiple of the TP sizes {_list(hardware.tp_sizes)}")
    if not options.interval > 0:
        raise FlagError(f"--interval {options.interval:g}: give seconds above 0")
    arrivals = _arrivals(options, config, shares)
    longest = hardware.request_tokens
    too_long = next((one for one in arrivals if one.prompt + one.output > longest), None)
    if too_long is not None:
        raise FlagError(
            f"--trace: the request at {too_long.at_ms / 1e3:.3f} s has {too_long.prompt + too_long.output} tokens, and "
            f"engines here hold {longest}; leave such out with --longest {longest}"
        )
    if not options.reload >= 0:
        raise FlagError(f"--reload {options.reload:g}: give seconds, 0 or more")
    return Setting(
        hardware,
        options.gpus,
        tuple(arrivals),
        config,
        options.interval,
        hardware.price,
        options.reload,
        options.adapt_roles == "auto",
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    sizes = tuple(sorted(_numbers("--tp-sizes", options.tp_sizes))) if options.tp_sizes else None
    shape = Shape(options.chunk, options.page, options.requests, options.kv_tokens, options.sp)
    price = GPU_PRICE
    if options.price is not None:
        try:
            price = Price(*(number(part) for part in options.price.split(":")))
        except (TypeError, ValueError):
            raise FlagError(f"--price {options.price}: write MS:BYTES_PER_S") from None
        if price.fixed_ms < 0 or not price.bytes_per_s > 0:
            raise FlagError(f"--price {options.price}: both are above 0")
    if options.profile is not None:
        known = MODELS.get(options.model)
        if known is None:
            raise FlagError(f"--model {options.model} is not known; give one of {', '.join(MODELS)} of like KV")
        return measured(options.profile, sizes, shape, known.token_bytes, price)
    if options.link is not None and not options.link > 0:
        raise FlagError(f"--link {options.link:g}: give a number above 0")
    return reckoned(options.model, options.card, sizes or (1, 2, 4), shape, price, options.link)


def _tiers(options: argparse.Namespace) -> tuple[SloConfig, dict[str, float]]:
    if (options.tiers is None) == (not options.tier):
        raise FlagError("give --tiers or --tier")
    if not options.target_scale > 0:
        raise FlagError(f"--target-scale {options.target_scale:g}: give a number above 0")
    shares: dict[str, float] = {}
    if options.tiers is not None:
        config = read_slo_config(options.tiers)
        shares = {tier.name: 1.0 for tier in config.tiers} if not options.share else {}
        for part in options.share:
            name, _, share = part.partition(":")
            shares[name] = _above_0(f"--share {part}", share)
    else:
        tiers = []
        for text in options.tier:
            parts = text.split(":")
            if len(parts) != 4:
                raise FlagError(f"--tier {text}: write name:share:ttft_ms:tpot_ms")
            shares[parts[0]], ttft, tpot = (_above_0(f"--tier {text}", part) for part in parts[1:])
            reject = WhenInfeasible.REJECT if parts[0] in options.reject else WhenInfeasible.BEST_EFFORT
            tiers.append(Tier(parts[0], ttft, tpot, when_infeasible=reject))
        config = SloConfig(tuple(tiers), tiers[-1].name)
    names = {tier.name for tier in config.tiers}
    for flag, given in (("--reject", options.reject), ("--share", shares)):
        unknown = sorted(set(given) - names)
        if unknown:
            raise FlagError(f"{flag} {unknown[0]}: there is no such tier; there are {', '.join(sorted(names))}")
    return scaled(config, options.target_scale), shares


def _arrivals(options: argparse.Namespace, config: SloConfig, shares: dict[str, float]) -> list[Arrival]:
    if (options.rate is None) == (not options.trace):
        raise FlagError("give --rate or --trace")
    for flag in ("rate_scale", "divide", "seconds", "input", "output"):
        _above_0(f"--{flag.replace('_', '-')} {getattr(options, flag)}", getattr(options, flag))
    if options.rate is not None:
        rate = _above_0(f"--rate {options.rate}", options.rate) * options.rate_scale
        return with_tiers(
            poisson(rate, options.seconds, options.input, options.output, options.seed), shares, options.seed
        )
    start, end = _window(options.window)
    cut = Cut(start, end, options.count, options.divide, options.longest or 1 << 60, options.rate_scale)
    names = {tier.name for tier in config.tiers}
    loads = []
    for text in options.trace:
        tier, equals, path = text.partition("=")
        if equals and tier not in names:
            raise FlagError(f"--trace {text}: there is no tier {tier}; there are {', '.join(sorted(names))}")
        arrivals = read_trace(Path(path if equals else text), cut)
        loads.append(of_tier(arrivals, tier) if equals else with_tiers(arrivals, shares, options.seed))
    if options.repeat < 1:
        raise FlagError(f"--repeat {options.repeat}: give a number above 0")
    if options.phase:
        phases = [_phase(text, options.rate_scale, names) for text in options.phase]
        return phased(merged(loads), phases, options.seconds, options.seed)
    return repeated(merged(loads), options.repeat)


def _phase(text: str, scale: float, names: Container[str]) -> Phase:
    seconds, _, rest = text.partition(":")
    rates = {}
    for part in rest.split(","):
        tier, equals, rate = part.partition("=")
        if not equals or tier not in names:
            raise FlagError(f"--phase {text}: write SECONDS:TIER=RATE,..., of tiers that there are")
        rates[tier] = scale * _above_0(f"--phase {text}", rate)
    return Phase(_above_0(f"--phase {text}", seconds), rates)


def _window(text: str) -> tuple[float, float]:
    if not text:
        return 0.0, float("inf")
    try:
        start, end = (number(part) for part in text.split(":"))
    except ValueError:
        raise FlagError(f"--window {text}: write START:END, in seconds") from None
    if not 0 <= start < end:
        raise FlagError(f"--window {text}: the end comes after the start, which is 0 or later")
    return start, end


def layout_of(text: str, setting: Setting) -> Layout:
    """A layout; `auto` begins at the smallest TP size."""
    sizes, gpus = setting.hardware.tp_sizes, setting.gpus
    if text == AUTO:
        return uniform_layout(sizes[0], gpus)
    if re.fullmatch("tp[0-9]+", text):
        tp = int(text[2:])
        if tp not in sizes:
            raise FlagError(f"--layout {text}: TP sizes here are {_list(sizes)}")
        return uniform_layout(tp, gpus)
    return parse_layout(text, sizes, gpus)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [whole(part) for part in text.split(",")]
    except ValueError:
        raise FlagError(f"{flag} {text}: write numbers with commas between them") from None
    numbers.sort()
    nested = all(large % small == 0 for small, large in pairwise(numbers))
    if numbers[0] < 1 or len(set(numbers)) != len(numbers) or not nested:
        raise FlagError(f"{flag} {text}: each size divides the next, and none is there twice")
    return numbers


def _above_0(what: str, value: object) -> float:
    try:
        above = number(str(value))
    except ValueError:
        above = 0.0
    if not 0 < above < float("inf"):
        raise FlagError(f"{what}: give a number above 0")
    return above


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
