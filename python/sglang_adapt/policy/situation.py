"""What the planner is told and what it says: a situation and a plan, with what one plan hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.division import Division
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.price import Bill, Price, Running
from sglang_adapt.policy.stages import HANDOVER_MS
from sglang_adapt.policy.worth import Counts, Row, Worth

CALM = 3
"""Windows in a row, at most, that a layout has to be wanted if the one that serves carries the load as well."""


class Trigger(StrEnum):
    """Why the layout is changed.

    LOAD: another one carries more, or answers sooner.
    PRIORITY: a tier has requests whose targets only another one meets.
    LONG_CONTEXT: a request is there that only another one can hold.
    OPERATOR: somebody asked for it.
    """

    LOAD = "load"
    PRIORITY = "priority"
    LONG_CONTEXT = "long_context"
    OPERATOR = "operator"


@dataclass(frozen=True)
class History:
    """What one plan hands to the next.

    Attributes:
        waited: by tier, windows with requests and without an engine that meets their targets.
        wanted: the layout that was wanted last.
        windows: how often in a row it was.
        longest: tokens of the longest request that was there last which not every engine holds; 0 if that is long ago.
        since: windows since then.
    """

    waited: Mapping[str, int] = field(default_factory=dict)
    wanted: str = ""
    windows: int = 0
    longest: int = 0
    since: int = 0


@dataclass(frozen=True)
class Situation:
    """All that a plan depends on.

    Attributes:
        demands: by tier; a deployment without tiers has one.
        speeds: of each TP size, ascending.
        gpus: of the deployment.
        layout: that serves.
        running: what its engines have, by name.
        price: of a switch.
        longest_tokens: of the longest request that is there and that not every engine holds; 0 if there is none.
        horizon_s: time over which a gain counts, or for which it has been missed, if that is longer.
        window_s: time from one plan to the next.
        history: of the plan before.
        asked: somebody has asked for something since the start; before that no layout is known to be better.
        calm: windows in a row that a layout has to be wanted if the one that serves carries the load as well.
        handover_ms: that a request takes from an engine that has read it to one that decodes.
        steady: about as many requests end as arrive, so that lengths of outputs are known; else no roles are given.
        gives_roles: engines may be given roles; else they keep those that they have for as long as these carry as much.
    """

    demands: tuple[Demand, ...]
    speeds: tuple[Speed, ...]
    gpus: int
    layout: Layout
    running: Mapping[str, Running]
    price: Price
    longest_tokens: int = 0
    horizon_s: float = 5.0
    window_s: float = 1.0
    history: History = History()
    asked: bool = True
    calm: int = CALM
    handover_ms: float = HANDOVER_MS
    steady: bool = True
    gives_roles: bool = True


@dataclass(frozen=True)
class Option:
    """A layout that was compared.

    Attributes:
        counts: engines by TP size.
        worth: what they are worth.
        division: what they do, if not all are mixed.
        ends_rps: requests that end within their targets, with what chance takes of them; None if it was not reckoned.
    """

    counts: Counts
    worth: Worth
    division: Division | None = None
    ends_rps: float | None = None

    @property
    def engines(self) -> Division:
        return Division(self.counts) if self.division is None else self.division

    def __str__(self) -> str:
        return str(self.engines)


@dataclass(frozen=True)
class Roles:
    """The best of the divisions that were compared, against the best of layouts with mixed engines.

    Attributes:
        engines: of the division; empty if none was compared.
        roles_rps, mixed_rps: requests that end within their targets, with what chance takes of them.
        chosen: the division is the best of all.
        reason: in words.
    """

    engines: str
    roles_rps: float
    mixed_rps: float
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decision.

    Attributes:
        layout: that should serve next; the one that serves, unless `move`.
        move: switch now.
        wanted: the best layout, whether or not it is worth a switch now.
        trigger: why; None if nothing better is known.
        reason: in words, also for staying.
        tiers: by engine of `wanted`, the tiers that it is there for.
        serving: the same, by engine of `layout`.
        strategy: how the switch treats what runs.
        rows: the table of estimates.
        options: all that was compared, the best first.
        bill: of a switch to `wanted`.
        history: for the next plan.
        roles: whether engines in roles would carry more than mixed ones, and why; None if nobody asks for anything, or
            if engines have no roles and are not to be given any.
    """

    layout: Layout
    move: bool
    wanted: Layout
    trigger: Trigger | None
    reason: str
    tiers: Mapping[str, tuple[str, ...]]
    serving: Mapping[str, tuple[str, ...]]
    strategy: Strategy
    rows: tuple[Row, ...]
    options: tuple[Option, ...]
    bill: Bill
    history: History
    roles: Roles | None = None
