"""What goes where in memory before anything is loaded: rows, a verdict, and how large the KV may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_GB = 10**9


@dataclass(frozen=True)
class Charge:
    """Something that takes memory, whatever the size of the KV.

    Attributes:
        what: e.g. "weights" or "tp2@0-1".
        nbytes: how much.
        assumed: why the figure is not sure, e.g. "assumed from TP 2 of ..."; empty if it is measured or exact.
    """

    what: str
    nbytes: int
    assumed: str = ""


@dataclass(frozen=True)
class Place:
    """One memory: a GPU's, or the host's for all virtual GPUs.

    Attributes:
        name: e.g. "GPU 0 (NVIDIA H100 80GB HBM3)".
        free_bytes: what may be used of it.
        charges: what is put there besides KV.
        kv_bytes_per_token: bytes there for each token of `--max-total-tokens`, of all that has KV there together.
    """

    name: str
    free_bytes: int
    charges: tuple[Charge, ...]
    kv_bytes_per_token: int

    @property
    def fixed_bytes(self) -> int:
        return sum(charge.nbytes for charge in self.charges)

    def tokens_for(self, share: float) -> int:
        """How many tokens fit into `share` of what the charges leave."""
        return max(0, int((self.free_bytes - self.fixed_bytes) * share) // self.kv_bytes_per_token)


@dataclass(frozen=True)
class MemoryPlan:
    """A plan for all places of a deployment.

    Attributes:
        places: at least one.
        tokens: KV tokens, given or reckoned; None if stock sglang sizes its pool itself, from what it finds free.
        given: `tokens` was asked for.
        share: of what the charges leave, as much as may be KV; the rest is for what is only needed while serving.
        page: `tokens` as reckoned here is a multiple of it.
        least: fewer tokens than these are of no use.
    """

    places: tuple[Place, ...]
    tokens: int | None
    given: bool
    share: float
    page: int
    least: int

    @property
    def tokens_that_fit(self) -> int:
        """The most tokens that leave the spare share everywhere; 0 if there is no room for as many as are needed."""
        tokens = min(place.tokens_for(self.share) for place in self.places) // self.page * self.page
        return tokens if tokens >= self.least else 0

    @property
    def short_places(self) -> tuple[Place, ...]:
        """Those that cannot hold what is to go there."""
        tokens = self.least if self.tokens is None else self.tokens
        return tuple(
            place for place in self.places if place.fixed_bytes + tokens * place.kv_bytes_per_token > place.free_bytes
        )

    @property
    def fits(self) -> bool:
        return not self.short_places and (self.tokens is None or self.tokens > 0)

    @property
    def has_assumed(self) -> bool:
        """Something in it is neither measured nor exact."""
        return any(charge.assumed for place in self.places for charge in place.charges)


def plan_memory(
    places: Sequence[Place], tokens: int | None, share: float, page: int, least: int, leave_to_stock: bool = False
) -> MemoryPlan:
    """Make the plan.

    Args:
        places: where things go.
        tokens: KV tokens that were asked for; None to use what is left.
        share: of what the charges leave, as much as KV may take where `tokens` is None; 0 < share <= 1.
        page: tokens a page.
        least: fewer tokens are of no use where `tokens` is None.
        leave_to_stock: with `tokens` None, stock sglang sizes the KV itself.

    Raises:
        ValueError: no place, or a share or page out of range.
    """
    if not places or not 0 < share <= 1 or page < 1:
        raise ValueError(f"{len(places)} places, a share of {share} and pages of {page} tokens make no plan")
    plan = MemoryPlan(tuple(places), tokens, tokens is not None, share, page, least)
    if tokens is not None or leave_to_stock:
        return plan
    return replace(plan, tokens=plan.tokens_that_fit)


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The plan in words: a line a place, and one for each kind of figure that is assumed."""
    lines = [_line(plan, place) for place in plan.places]
    assumed = {charge.assumed: charge for place in plan.places for charge in place.charges if charge.assumed}
    lines += [f"* {why}" for why in sorted(assumed)]
    if not plan.given and plan.tokens is not None:
        lines.append(
            f"--max-total-tokens is not given: {plan.tokens} is {plan.share:.2f} of what the fullest GPU leaves"
        )
    return lines


def plan_fault(plan: MemoryPlan, fewer: Mapping[tuple[int, ...], MemoryPlan]) -> str | None:
    """Why the plan cannot be carried out, with what to lower and to which value; None if it can.

    Args:
        plan: the plan.
        fewer: plans for fewer TP sizes, with any number of KV tokens, best first.
    """
    if plan.fits:
        return None
    place = max(plan.short_places or plan.places, key=lambda place: place.fixed_bytes - place.free_bytes)
    needed = place.fixed_bytes + (plan.tokens or 0) * place.kv_bytes_per_token
    text = (
        f"{place.name} has {_gb(place.free_bytes)} GB free, and {_gb(needed)} GB are to go there: {_parts(plan, place)}"
    )
    if plan.tokens_that_fit > 0:
        return f"{text}. Lower --max-total-tokens to {plan.tokens_that_fit}"
    ways = [
        f"give --adapt-tp-sizes {','.join(map(str, sizes))}, which leaves room for {other.tokens_that_fit} tokens"
        for sizes, other in fewer.items()
        if other.tokens_that_fit > 0
    ][:1]
    if not ways:
        ways = ["use GPUs with more free memory, or more of them with larger --adapt-tp-sizes, or a smaller model"]
    return f"{text}. That leaves no room for KV, whatever --max-total-tokens: {ways[0]}"


def _line(plan: MemoryPlan, place: Place) -> str:
    kv = (plan.tokens or 0) * place.kv_bytes_per_token
    spare = place.free_bytes - place.fixed_bytes - kv
    rest = f"{_gb(spare)} spare" if plan.tokens is not None else f"{_gb(spare)} for KV as stock sizes it, and spare"
    return f"{place.name}: {_gb(place.free_bytes)} GB free = {_parts(plan, place)} + {rest}"


def _parts(plan: MemoryPlan, place: Place) -> str:
    parts = [f"{charge.what} {_gb(charge.nbytes)}{'*' if charge.assumed else ''}" for charge in place.charges]
    if plan.tokens is not None:
        parts.append(f"KV {_gb(plan.tokens * place.kv_bytes_per_token)} ({plan.tokens} tokens)")
    return " + ".join(parts)


def _gb(nbytes: int) -> str:
    return f"{nbytes / _GB:.2f}"
