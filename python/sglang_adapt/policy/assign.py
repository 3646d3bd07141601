"""GPUs to tiers, and TP sizes to GPUs.

`greedy` is Nitsum's weighted greedy (3.3.1): again and again the tier and TP size with the highest product of weight,
gain per GPU and unmet load gets a group of GPUs. What is left when all load is met makes engines wider. `place` turns
numbers of engines into a layout of aligned groups that leaves running engines where they are, if it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from sglang_adapt.core.layout import EngineSpec, Layout, Role
from sglang_adapt.policy.worth import Counts, Row

FILLED = 0.8
"""Engines are planned to be this full, so that a rise of the load finds room until the next plan."""


def greedy(rows: Sequence[Row], sizes: Sequence[int], gpus: int) -> dict[str, Counter[int]]:
    """Engines for each tier: by tier, how many of each TP size. All GPUs are given, unless there is no tier.

    Args:
        rows: tiers with a load.
        sizes: TP sizes, ascending; each divides the next and the GPUs.
        gpus: of the deployment.
    """
    own: dict[str, Counter[int]] = {row.tier: Counter() for row in rows}
    unmet = {row.tier: row.offered_rps for row in rows}
    left = gpus
    by_tier = {row.tier: row for row in rows}
    # A tier's best group changes only with its unmet load, or when too few GPUs are left for it.
    best = {row.tier: _best(row, unmet[row.tier], sizes, left) for row in rows}
    while left and best:
        score, _, tier, tp = max(best.values())
        if score <= 0:
            break
        row = by_tier[tier]
        own[tier][tp] += 1
        left -= tp
        unmet[tier] -= min(unmet[tier], FILLED * row.estimates[tp].capacity_rps)
        best[tier] = _best(row, unmet[tier], sizes, left)
        if left < sizes[-1]:
            best |= {other: _best(by_tier[other], unmet[other], sizes, left) for other in best if best[other][3] > left}
    _spread(rows, own, sizes, left)
    return own


def _best(row: Row, unmet: float, sizes: Sequence[int], left: int) -> tuple[float, float, str, int]:
    """(score, weight, tier, TP size) of the group that a tier should get next; of equal ones the narrowest."""
    best, chosen = 0.0, sizes[0]
    for tp in sizes:
        if tp <= left:
            gain = min(FILLED * row.estimates[tp].capacity_rps, unmet)
            score = row.weight * gain / tp * unmet
            if score > best:
                best, chosen = score, tp
    return best, row.weight, row.tier, chosen


def _spread(rows: Sequence[Row], own: dict[str, Counter[int]], sizes: Sequence[int], left: int) -> None:
    """Give GPUs that no load needs to the tiers with most load for each GPU."""
    if not rows:
        return
    held = {row.tier: sum(tp * count for tp, count in own[row.tier].items()) for row in rows}
    for _ in range(left // sizes[0]):
        row = max(rows, key=lambda row: (row.weight * row.offered_rps / (held[row.tier] + sizes[0]), row.tier))
        own[row.tier][sizes[0]] += 1
        held[row.tier] += sizes[0]


def composed(tp: int, sizes: Sequence[int], gpus: int) -> Counter[int]:
    """As many engines of TP size `tp` as fit, and of the narrower sizes for what is left."""
    counts: Counter[int] = Counter()
    for size in sorted((size for size in sizes if size <= tp), reverse=True):
        counts[size], gpus = divmod(gpus, size)
    return +counts


def with_one(tp: int, rest: int, sizes: Sequence[int], gpus: int) -> Counter[int]:
    """One engine of TP size `tp`, and the other GPUs at `rest`."""
    return Counter({tp: 1}) + composed(rest, sizes, gpus - tp)


def count(layout: Layout) -> Counter[int]:
    """Engines of a layout by TP size."""
    return Counter([engine.tp for engine in layout.engines])


def place(counts: Counts, gpus: int, current: Layout, busy: Mapping[str, float], bound: Collection[str] = ()) -> Layout:
    """Aligned groups for these engines.

    The widest are placed first, so what is left is made of whole groups for the narrower ones. An engine that serves
    stays if it can; else the group is taken whose engines have the least to move.

    Args:
        counts: engines by TP size, of sizes that each divide the next; together exactly the GPUs.
        gpus: of the deployment.
        current: the layout that serves.
        busy: bytes of KV on its engines, by name.
        bound: engines that stay before any other, because of what they have.
    """
    if sum(tp * number for tp, number in counts.items()) != gpus:
        raise ValueError(f"{dict(counts)} are not {gpus} GPUs")
    there = set(current.engines)
    stay = {engine for engine in current.engines if engine.name in bound} if bound else frozenset()
    load = [0.0] * gpus
    for engine in current.engines:
        if busy:
            first, tp = engine.first_gpu, engine.tp
            load[first : first + tp] = [busy.get(engine.name, 0.0) / tp] * tp
    free = [True] * gpus
    engines: list[EngineSpec] = []
    for tp in sorted((tp for tp, number in counts.items() if number), reverse=True):
        groups = [EngineSpec(first, tp) for first in range(0, gpus, tp) if free[first]]
        if len(groups) > counts[tp]:
            groups.sort(
                key=lambda group: (
                    group not in stay,
                    group not in there,
                    sum(load[gpu] for gpu in group.gpus),
                    group.first_gpu,
                )
            )
        for group in groups[: counts[tp]]:
            engines.append(group)
            free[group.first_gpu : group.first_gpu + tp] = [False] * tp
    return Layout(tuple(sorted(engines)))


def promises(
    tiers: Mapping[str, Sequence[str]], known: Sequence[str], up: Collection[str]
) -> dict[str, frozenset[str]]:
    """Tiers whose requests are promised their targets, by engine.

    Args:
        tiers: that each engine of the layout is there for, by its name.
        known: all tiers. One that is on no engine that is up, as nobody asked for it or its engines have died, is
            promised on all.
        up: engines that are up, by name.
    """
    somewhere = {tier for engine, own in tiers.items() if engine in up for tier in own}
    rest = frozenset(known) - somewhere
    return {engine: frozenset(own) | rest for engine, own in tiers.items()}


Can = Callable[[Row, int, Role], bool]
"""Can an engine of a TP size keep, in a role, what of a tier's targets is its part?"""


def _as_mixed(row: Row, tp: int, role: Role) -> bool:
    return tp in row.sizes


def tiers_of(layout: Layout, rows: Sequence[Row], can: Can = _as_mixed) -> dict[str, tuple[str, ...]]:
    """The tiers that each engine is there for, by name of the engine.

    Each tier has all engines on which its targets can be met, in their roles, or, if there are none, all: of those that
    read and of those that decode, each for itself. That a strict tier finds its share of them free is admission's
    business (`reserve.guards`): engines of its own would be too few or too many as soon as the load is another one than
    was planned for. An engine on which no tier meets its targets is there for all.
    """
    roles = layout.roles or (Role.MIXED,) * len(layout.engines)
    kind_of = [(engine.tp, role) for engine, role in zip(layout.engines, roles, strict=True)]
    kinds = set(kind_of)
    able = {kind: {row.tier for row in rows if can(row, *kind)} for kind in kinds}
    # What only reads is no help to a tier that nothing decodes, nor the other way round.
    somewhere = {role: {tier for (_, own), tiers in able.items() if own is role for tier in tiers} for role in Role}
    every = tuple(row.tier for row in rows)

    def served(tier: str, tp: int, role: Role) -> bool:
        apart = tier in somewhere[Role.PREFILL] & somewhere[Role.DECODE]
        nowhere = not apart and tier not in somewhere[Role.MIXED]
        return nowhere or (tier in able[tp, role] and (role is Role.MIXED or apart))

    of_kind = {kind: tuple(tier for tier in every if served(tier, *kind)) or every for kind in kinds}
    return {engine.name: of_kind[kind] for engine, kind in zip(layout.engines, kind_of, strict=True)}
