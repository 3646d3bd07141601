"""Which mechanisms are switched off for a measurement, and the steps that add them one after the other.

The steps are those of Nitsum, 4.2.1, in its order. Server, simulator and `benchmark/compare_goodput.py` go by this one
value, so a step is the same thing in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class AblationError(ValueError):
    """Mechanisms that cannot be switched off like this; the text names the flag and says what would do."""


class Scheduler(StrEnum):
    """Who gets which engine, and when.

    SLO: admission, placement, reserve and limits of iterations by the tiers' targets.
    BATCH_RULE: a request goes to the engine with the least load if it is predicted to meet its own targets there, and
        waits for room if not; nobody is refused, no room is left for a tier to come, no iteration is limited.
    ARRIVAL: every request goes at once to the engine with the least load; tiers are accounted for only.
    """

    SLO = "slo"
    BATCH_RULE = "batch-rule"
    ARRIVAL = "arrival"


TierEngines = tuple[tuple[str, tuple[str, ...]], ...]
"""(tier, names of the engines that its requests have, and that no other tier has)."""


@dataclass(frozen=True)
class Ablation:
    """What is switched off; by default nothing.

    Attributes:
        scheduler: that places requests; anything but SLO needs tiers to account for.
        tier_engines: each tier has engines of its own; empty: all tiers share all engines.
        page_copies: KV is copied page by page and plane by plane, instead of with one launch for all.
        stop_copy: a switch copies no KV before it pauses requests.
        reload_weights: engines that enter a layout read their part of the checkpoint again while requests are paused.
    """

    scheduler: Scheduler = Scheduler.SLO
    tier_engines: TierEngines = ()
    page_copies: bool = False
    stop_copy: bool = False
    reload_weights: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """As the command line of the server, and of the simulator, takes it."""
        said = [] if self.scheduler is Scheduler.SLO else ["--adapt-ablate-scheduler", self.scheduler.value]
        if self.tier_engines:
            said += ["--adapt-ablate-tier-engines", tier_engines_text(self.tier_engines)]
        for flag, is_off in (
            ("--adapt-ablate-page-copies", self.page_copies),
            ("--adapt-ablate-stop-copy", self.stop_copy),
            ("--adapt-ablate-reload-weights", self.reload_weights),
        ):
            said += [flag] if is_off else []
        return tuple(said)

    def __str__(self) -> str:
        """What is off, in words; empty if nothing is."""
        said = {
            Scheduler.SLO: [],
            Scheduler.BATCH_RULE: ["the scheduler but for its batch rule"],
            Scheduler.ARRIVAL: ["the scheduler: requests go on as they come, tiers are accounted for only"],
        }[self.scheduler]
        if self.tier_engines:
            said = [*said, f"sharing engines between tiers ({tier_engines_text(self.tier_engines)})"]
        for what, is_off in (
            ("copying KV with one launch: a copy a page", self.page_copies),
            ("copying KV before a switch pauses requests", self.stop_copy),
            ("keeping weights: engines that enter a layout read them again", self.reload_weights),
        ):
            said = [*said, what] if is_off else said
        return "; ".join(said)


NOTHING_OFF = Ablation()


def parse_tier_engines(text: str) -> TierEngines:
    """From `strict=tp2@0-1/loose=tp1@2,tp1@3`; whether there are such tiers and engines is not looked at.

    Raises:
        AblationError: another form, a tier twice, or an engine of two tiers.
    """
    found: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for part in text.split("/"):
        tier, equals, engines = part.partition("=")
        names = tuple(name.strip() for name in engines.split(","))
        if not equals or not tier or not all(names):
            raise AblationError(
                f"--adapt-ablate-tier-engines {text}: {part!r} is not TIER=ENGINE,...; write e.g. "
                "strict=tp2@0-1/loose=tp1@2,tp1@3"
            )
        if tier in found:
            raise AblationError(f"--adapt-ablate-tier-engines {text}: tier {tier} is there twice; name it once")
        for name in names:
            if name in owner:
                raise AblationError(
                    f"--adapt-ablate-tier-engines {text}: engine {name} is of {owner[name]} and of {tier}; "
                    "give it to one"
                )
            owner[name] = tier
        found[tier] = names
    return tuple(found.items())


def tier_engines_text(tier_engines: TierEngines) -> str:
    """As `parse_tier_engines` reads it."""
    return "/".join(f"{tier}={','.join(engines)}" for tier, engines in tier_engines)


def engines_text(tier_engines: TierEngines) -> str:
    """The layout that the engines of all tiers are, as `core.layout.parse_layout` reads it."""
    return ",".join(name for _, own in tier_engines for name in own)


def check_tier_engines(tier_engines: TierEngines, tiers: Sequence[str], engines: Sequence[str]) -> None:
    """Raises AblationError unless every tier has engines of the layout, and every engine of it a tier."""
    named = [name for _, own in tier_engines for name in own]
    unlike = (
        ("tier", sorted({tier for tier, _ in tier_engines} ^ set(tiers)), tiers),
        ("engine", sorted(set(named) ^ set(engines)), engines),
    )
    for kind, wrong, known in unlike:
        if wrong:
            raise AblationError(
                f"--adapt-ablate-tier-engines {tier_engines_text(tier_engines)}: {kind} {wrong[0]} is missing or not "
                f"known; name each {kind} once, there are {', '.join(known)}"
            )


@dataclass(frozen=True)
class Step:
    """A step of the ablation.

    Attributes:
        what: it has, in words.
        ablation: what is switched off; without the engines of each tier, which depend on the deployment.
        follows: the layout follows the traffic.
        by_tier: each tier has engines of its own.
    """

    what: str
    ablation: Ablation
    follows: bool = False
    by_tier: bool = False


STEPS: Mapping[str, Step] = {
    "1": Step("static, the smallest TP size", Ablation(Scheduler.ARRIVAL)),
    "2": Step("fixed prefill and decode engines", Ablation(Scheduler.ARRIVAL)),
    "3": Step("batch rule, best static TP size", Ablation(Scheduler.BATCH_RULE)),
    "4": Step("batch rule, a TP size for each tier", Ablation(Scheduler.BATCH_RULE), by_tier=True),
    "5": Step("+ scheduler by targets, on the layout of step 4", Ablation()),
    "6": Step(
        "+ dynamic TP, weights read again, a copy a page",
        Ablation(page_copies=True, stop_copy=True, reload_weights=True),
        follows=True,
    ),
    "6-warm": Step(
        "+ dynamic TP, weights kept, a copy a page", Ablation(page_copies=True, stop_copy=True), follows=True
    ),
    "7": Step("full", Ablation(), follows=True),
}
"""By number; 6 in two parts, because weights without a checkpoint cannot be read again."""

PREFIX = "ablation:"
"""Before a step's number in the name of a system."""
