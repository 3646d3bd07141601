"""Tiers: named service classes with latency targets, and what one request asks of them.

The words of requests are those of `Terms`; how a file of tiers is read is in `slo_file.py`. Everything is plain data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Final

import msgspec

SERVICE_TIERS: Final = ("default", "flex", "scale", "priority")
"""OpenAI's values of `service_tier` that a tier can be mapped from; `auto` is always the default tier."""
AUTO: Final = "auto"
MAX_TIERS: Final = 16
"""Tiers are labels of metrics, so there are few."""
MAX_TARGET_MS: Final = 3_600_000.0
"""No target is above an hour."""


class WhenInfeasible(StrEnum):
    """What becomes of a request whose targets no engine can meet now.

    BEST_EFFORT: it is served behind those that can be met.
    REJECT: it gets a 429 with the time after which it is worth coming again.
    """

    BEST_EFFORT = "best_effort"
    REJECT = "reject"


_TierName = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_-]{0,31}$")]
_TargetMs = Annotated[float, msgspec.Meta(gt=0, le=MAX_TARGET_MS)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_QueueLimit = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_WaitS = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One service class.

    Attributes:
        name: lower-case letters, digits, `-` and `_`; also a value of `service_tier` and a label of metrics.
        ttft_ms: target of the time from arrival to the first token; None for a background tier.
        tpot_ms: target of the mean time between later tokens; None for a background tier.
        weight: what a request that meets its targets is worth beside those of other tiers.
        service_tiers: OpenAI's values of `service_tier` that mean this tier.
        when_infeasible: what becomes of a request that cannot meet its targets.
        queue_limit: requests of this tier that may wait for their first token; more get a 429.
        background: work without targets, which fills what the others leave.
    """

    name: _TierName
    ttft_ms: _TargetMs | None = None
    tpot_ms: _TargetMs | None = None
    weight: _Weight = 1.0
    service_tiers: tuple[str, ...] = ()
    when_infeasible: WhenInfeasible = WhenInfeasible.BEST_EFFORT
    queue_limit: _QueueLimit = 1024
    background: bool = False


class SloConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiers of a deployment.

    Attributes:
        tiers: at least one.
        default: the tier of requests that name none.
        background_wait_s: background work that has waited this long goes ahead of everything that came after that.
    """

    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=MAX_TIERS)]
    default: str
    background_wait_s: _WaitS = 30.0

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises KeyError."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def tier_of(self, value: str | None) -> Tier | None:
        """What a request's `service_tier` (or header) means; None if nothing."""
        if value is None or value == AUTO:
            return self.tier(self.default)
        for tier in self.tiers:
            if value == tier.name or value in tier.service_tiers:
                return tier
        return self.tier(self.default) if value == "default" else None

    @property
    def valid_values(self) -> tuple[str, ...]:
        """Every value of `service_tier` that is understood."""
        values = [AUTO, "default"]
        for tier in self.tiers:
            values += [tier.name, *tier.service_tiers]
        return tuple(dict.fromkeys(values))


BUILT_IN: Final = SloConfig(
    default="standard",
    tiers=(
        Tier(name="interactive", ttft_ms=500.0, tpot_ms=25.0, weight=2.0, service_tiers=("priority", "scale")),
        Tier(name="standard", ttft_ms=2000.0, tpot_ms=50.0, service_tiers=("default",)),
        Tier(name="background", weight=0.25, service_tiers=("flex",), background=True, queue_limit=100_000),
    ),
)
"""The tiers that are used where no file is given."""


def config_faults(config: SloConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with tiers that are well formed one by one: (path such as `$.tiers[1].name`, text)."""
    names: dict[str, int] = {}
    mapped: dict[str, str] = {}
    for at, tier in enumerate(config.tiers):
        path = f"$.tiers[{at}]"
        if tier.name == AUTO:
            yield f"{path}.name", "auto always means the default tier; take another name"
        if tier.name in names:
            yield f"{path}.name", f"tier {tier.name} is there already, as number {names[tier.name] + 1}; remove one"
        names.setdefault(tier.name, at)
        for number, value in enumerate(tier.service_tiers):
            where = f"{path}.service_tiers[{number}]"
            if value not in SERVICE_TIERS:
                yield where, f"{value!r} is not a service_tier of OpenAI's; give some of {', '.join(SERVICE_TIERS)}"
            elif mapped.get(value, tier.name) != tier.name:
                yield where, f"{value} means tier {mapped[value]} already; give it to one of them only"
            mapped.setdefault(value, tier.name)
        for key, target in (("ttft_ms", tier.ttft_ms), ("tpot_ms", tier.tpot_ms)):
            if tier.background and target is not None:
                yield f"{path}.{key}", f"tier {tier.name} is background work, which has no targets; remove one of both"
            if not tier.background and target is None:
                yield f"{path}.{key}", f"tier {tier.name} needs a target in ms, or background: true"
        if tier.background and tier.when_infeasible is WhenInfeasible.REJECT:
            yield f"{path}.when_infeasible", f"tier {tier.name} is background work, which has no targets to miss"
    for value, owner in mapped.items():
        if value in names and owner != value:
            yield (
                f"$.tiers[{names[value]}].name",
                f"{value} is a tier and means tier {owner}; rename it or map it to it",
            )
    if config.default not in names:
        yield "$.default", f"there is no tier {config.default!r}; give one of {', '.join(names)}"


class Terms(msgspec.Struct, frozen=True):
    """What one request asks for.

    Attributes:
        tier: name of its tier.
        ttft_ms: its target, its own or its tier's; None for background work.
        tpot_ms: likewise.
        reject: it would rather be refused than be late.
        background: work without targets.
    """

    tier: str
    ttft_ms: float | None
    tpot_ms: float | None
    reject: bool = False
    background: bool = False


class TermsError(ValueError):
    """A request asks for a tier or a target that cannot be; the text says what can.

    Attributes:
        code: `unknown_tier` or `bad_target`.
        param: the field or header.
    """

    def __init__(self, code: str, param: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


TIER_HEADER: Final = "x-adapt-tier"
TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
BODY_FIELD: Final = "service_tier"


def request_terms(
    config: SloConfig,
    service_tier: object = None,
    tier_header: str | None = None,
    ttft_header: str | None = None,
    tpot_header: str | None = None,
) -> Terms:
    """What a request asks for.

    Args:
        config: the tiers.
        service_tier: the body's field, of any type; None if it has none.
        tier_header: `x-adapt-tier`, which wins over the body's.
        ttft_header: `x-slo-ttft-ms`.
        tpot_header: `x-slo-tpot-ms`.

    Raises:
        TermsError: an unknown tier, or a target that is no positive number of milliseconds or not for this tier.
    """
    param, value = (BODY_FIELD, service_tier) if tier_header is None else (TIER_HEADER, tier_header)
    tier = config.tier_of(value) if value is None or isinstance(value, str) else None
    if tier is None:
        valid = ", ".join(config.valid_values)
        raise TermsError("unknown_tier", param, f"{param} {_shown(value)} is not a tier; give one of {valid}")
    ttft_ms = _target(TTFT_HEADER, ttft_header, tier, tier.ttft_ms)
    tpot_ms = _target(TPOT_HEADER, tpot_header, tier, tier.tpot_ms)
    reject = tier.when_infeasible is WhenInfeasible.REJECT
    return Terms(tier.name, ttft_ms, tpot_ms, reject, tier.background)


_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def _target(name: str, text: str | None, tier: Tier, otherwise: float | None) -> float | None:
    if text is None:
        return otherwise
    if tier.background:
        raise TermsError(
            "bad_target", name, f"{name} is given, but tier {tier.name} is background work without targets"
        )
    stripped = text.strip()
    value = float(stripped) if _NUMBER.fullmatch(stripped, 0) and stripped.isascii() else math.nan
    if not 0 < value <= MAX_TARGET_MS:
        limit = f"{MAX_TARGET_MS:.0f}"
        raise TermsError(
            "bad_target", name, f"{name} {_shown(text)} is not a target; give milliseconds, above 0 and up to {limit}"
        )
    return value


def _shown(value: object) -> str:
    """A client's value as it may stand in an answer."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
