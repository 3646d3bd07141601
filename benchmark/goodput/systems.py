"""The systems that are compared, as they are written on the command line, and the servers each of them is made of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_adapt.core.ablation import (
    NOTHING_OFF,
    PREFIX,
    STEPS,
    Ablation,
    AblationError,
    check_tier_engines,
    engines_text,
    parse_tier_engines,
)
from sglang_adapt.core.layout import LayoutError, parse_layout

OURS, STOCK = "sglang_adapt.launch_server", "sglang.launch_server"


class Kind(StrEnum):
    """What a system is: ours with the layout following the traffic, ours with one layout, stock, stock by tier, ours
    with mechanisms switched off."""

    AUTO = "auto"
    STATIC = "static"
    STOCK = "stock"
    SPLIT = "split"
    ABLATION = "ablation"


@dataclass(frozen=True)
class Part:
    """Engines of one TP size on consecutive GPUs: `count` of `tp` from GPU `first` on."""

    tp: int
    count: int
    first: int = 0

    @property
    def layout(self) -> str:
        """As `--adapt-layout` takes it."""
        starts = range(self.first, self.first + self.count * self.tp, self.tp)
        return ",".join(
            f"tp{self.tp}@{gpu}" if self.tp == 1 else f"tp{self.tp}@{gpu}-{gpu + self.tp - 1}" for gpu in starts
        )


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        name: as it is written.
        kind: of it.
        layout: of ours with one layout, and of stock; empty for the others.
        parts: stock's engines by tier; of stock without tiers under the name "".
        ablation: what is switched off of ours.
    """

    name: str
    kind: Kind
    layout: str = ""
    parts: tuple[tuple[str, Part], ...] = ()
    ablation: Ablation = NOTHING_OFF

    @property
    def is_ours(self) -> bool:
        """It is sglang_adapt."""
        return self.kind in (Kind.AUTO, Kind.STATIC, Kind.ABLATION)

    @property
    def may_share(self) -> bool:
        """Its server differs from those of other systems of ours by its layout alone."""
        return self.kind in (Kind.AUTO, Kind.STATIC)


AUTO = System("auto", Kind.AUTO)


@dataclass(frozen=True)
class ServerPlan:
    """A server to start: its module, its flags without address, and whose requests it gets ("": everyone's)."""

    module: str
    flags: tuple[str, ...]
    tier: str = ""


@dataclass(frozen=True)
class Common:
    """What the flags of a server are made of.

    Attributes:
        gpus: that each system has.
        both: flags for ours and stock alike.
        ours: further flags for ours.
        stock: further flags for stock.
        tiers: file for `--adapt-slo-config`.
        profile: file for `--adapt-profile`.
        virtual: on virtual GPUs.
    """

    gpus: int
    both: tuple[str, ...]
    ours: tuple[str, ...]
    stock: tuple[str, ...]
    tiers: str
    profile: str
    virtual: bool


def parse_system(text: str, gpus: int, tiers: Sequence[str]) -> System:
    """A system from `auto`, `static:tpN`, `static:LAYOUT`, `stock:tpN`, `split:TIER=tpN@A-B/TIER=...` or
    `ablation:STEP:LAYOUT`.

    Raises:
        argparse.ArgumentTypeError: what is wrong, and how to write it.
    """
    kind, _, rest = text.partition(":")
    if text == "auto":
        return AUTO
    if kind == "static" and "@" in rest:
        return System(text, Kind.STATIC, rest)
    if kind in ("static", "stock") and re.fullmatch(r"tp[0-9]+", rest):
        part = _engines(int(rest[2:]), 0, gpus, text)
        return System(text, Kind(kind), part.layout, (("", part),) if kind == "stock" else ())
    if text.startswith(PREFIX):
        number, _, rest = rest.partition(":")
        return _step(text, number, rest, gpus, tiers)
    if kind == "split":
        return System(text, Kind.SPLIT, parts=_by_tier(rest, gpus, tiers, text))
    raise argparse.ArgumentTypeError(
        f"{text!r} is no system: write auto, static:tp2, static:tp1@0,tp1@1, stock:tp2, or "
        "split:TIER=tp1@0/TIER=tp1@1-3, ablation:1 to ablation:7"
    )


def _engines(tp: int, first: int, gpus: int, text: str) -> Part:
    if tp < 1 or gpus < 1 or gpus % tp:
        raise argparse.ArgumentTypeError(f"{text!r}: engines of TP {tp} do not fill {gpus} GPUs")
    return Part(tp, gpus // tp, first)


def _step(text: str, number: str, rest: str, gpus: int, tiers: Sequence[str]) -> System:
    """A step of the ablation; `rest` is its layout, where it has one that stays."""
    step = STEPS.get(number)
    if step is None:
        raise argparse.ArgumentTypeError(f"{text!r}: steps of the ablation are {', '.join(STEPS)}")
    if step.follows:
        if rest:
            raise argparse.ArgumentTypeError(f"{text!r}: the layout of this step follows the traffic, so name none")
        return System(text, Kind.ABLATION, ablation=step.ablation)
    if number in ("1", "3") and (found := re.fullmatch(r"tp([0-9]+)", rest or ("tp1" if number == "1" else ""))):
        layout = _engines(int(found[1]), 0, gpus, text).layout
        return System(text, Kind.ABLATION, layout, ablation=step.ablation)
    try:
        if number == "2" and ":prefill" in rest:
            return System(text, Kind.ABLATION, _checked(rest, gpus), ablation=step.ablation)
        if number in ("4", "5") and rest:
            own = parse_tier_engines(rest)
            layout = _checked(engines_text(own), gpus)
            check_tier_engines(own, tiers, layout.split(","))
            return System(
                text, Kind.ABLATION, layout, ablation=replace(step.ablation, tier_engines=own if step.by_tier else ())
            )
    except (AblationError, LayoutError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    raise argparse.ArgumentTypeError(
        f"{text!r}: this step has a layout of its own; write ablation:1:tp1, ablation:2:tp1@0:prefill,tp1@1:decode, "
        "ablation:3:tp2, or ablation:4:TIER=tp1@0/TIER=tp1@1,tp1@2 (5 likewise)"
    )


def _checked(layout: str, gpus: int) -> str:
    """A layout as the server will tell it. Raises LayoutError."""
    sizes = sorted({int(size) for size in re.findall(r"tp([0-9]{1,6})@", layout)})
    return str(parse_layout(layout, sizes or [1], gpus))


def _by_tier(rest: str, gpus: int, tiers: Sequence[str], text: str) -> tuple[tuple[str, Part], ...]:
    parts: dict[str, Part] = {}
    taken: set[int] = set()
    for piece in rest.split("/"):
        found = re.fullmatch(r"([^=]+)=tp([0-9]+)@([0-9]+)(?:-([0-9]+))?", piece)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r}: {piece!r} is not TIER=tpN@FIRST-LAST")
        first, last = int(found[3]), int(found[4] or found[3])
        own = set(range(first, last + 1))
        if own & taken or last >= gpus:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {piece!r} has GPUs of another tier, or beyond the {gpus} there are"
            )
        taken |= own
        parts[found[1]] = _engines(int(found[2]), first, len(own), text)
    if set(parts) != set(tiers):
        raise argparse.ArgumentTypeError(f"{text!r}: each of {', '.join(tiers)} needs its engines, and no other tier")
    return tuple(parts.items())


def servers_of(system: System, common: Common) -> list[ServerPlan]:
    """The servers of a system, to be started one after the other."""
    if system.is_ours:
        flags = [*to_profile(common).flags, "--adapt-slo-config", common.tiers, "--adapt-profile", common.profile]
        if not system.layout:
            flags += ["--adapt-policy", "auto"]
        elif system.ablation.tier_engines:
            # They are the layout.
            flags += ["--adapt-policy", "static"]
        else:
            flags += ["--adapt-policy", "static", "--adapt-layout", system.layout]
        flags += system.ablation.flags
        return [ServerPlan(OURS, tuple(flags))]
    return [ServerPlan(STOCK, _stock(part, common), tier) for tier, part in system.parts]


def to_profile(common: Common) -> ServerPlan:
    """Ours with engines of every TP size, without tiers: its profile is measured on it."""
    virtual = ("--adapt-virtual-gpus", str(common.gpus)) if common.virtual else ()
    return ServerPlan(OURS, (*common.both, *common.ours, *virtual))


def _stock(part: Part, common: Common) -> tuple[str, ...]:
    flags = [*common.both, *common.stock, "--tp-size", str(part.tp), "--sleep-on-idle"]
    if part.count > 1:
        flags += ["--dp-size", str(part.count)]
    if part.first and not common.virtual:
        flags += ["--base-gpu-id", str(part.first)]
    return tuple(flags)


def urls_of(plans: Sequence[ServerPlan], urls: Sequence[str], tiers: Sequence[str]) -> Mapping[str, str]:
    """Where each tier's requests go."""
    by_tier = dict(zip((plan.tier for plan in plans), urls, strict=True))
    return {tier: by_tier.get(tier) or by_tier[""] for tier in tiers}
