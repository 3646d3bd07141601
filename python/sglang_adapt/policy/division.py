"""Engines that read prompts and engines that decode them, how many of each, and what they are worth against mixed ones.

As many GPUs read as the tiers' prompts need beside what their outputs need (Nitsum, 3.3.1: both rates in balance), in
whole engines, each kind of one TP size. Tiers share the engines, the tightest goes first, as in `policy.worth`.

Compared are rates of requests that end within their targets, with what chance takes of them (`policy.chance`): a
prompt waits for others anywhere; beside prompts, on mixed engines, a short answer may meet more of them than the mean;
where only tokens are decoded, the number of requests may be above its mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_adapt.core.layout import EngineSpec, Layout, Role
from sglang_adapt.policy.admission import guarded_by_ms
from sglang_adapt.policy.chance import admitted_rps, kept_share, steady_batch
from sglang_adapt.policy.efficiency import Estimate, Speed
from sglang_adapt.policy.limits import SAFETY, chunk_tokens
from sglang_adapt.policy.reserve import FILL
from sglang_adapt.policy.stages import Decoding, Reading, decoding, reading
from sglang_adapt.policy.worth import QUICK, Appraiser, Counts, Row, Worth, tpot_ms_of

_TRIED = 2
"""Divisions that are valued, of all that balance; the others carry less by the means."""
_SPARE = 1.2
"""Engines that decode are planned to have so much more than they are asked for: what finds no room there is decoded
where it was read, and holds up prompts, so a division is not worth what it decodes at most."""
_LET_IN = (1.0, 0.93, 0.86, 0.8)
"""Parts of a load of which admission may find the one that most is kept of."""


@dataclass(frozen=True)
class Division:
    """Engines by TP size, and by what they do."""

    mixed: Counts = field(default_factory=dict)
    reads: Counts = field(default_factory=dict)
    decodes: Counts = field(default_factory=dict)

    @property
    def counts(self) -> Counter[int]:
        return Counter(self.mixed) + Counter(self.reads) + Counter(self.decodes)

    @property
    def prompts(self) -> Counts:
        """Those that read prompts."""
        return Counter(self.mixed) + Counter(self.reads) if self.reads else self.mixed

    @property
    def has_roles(self) -> bool:
        return bool(self.reads or self.decodes)

    def __str__(self) -> str:
        parts = ((self.mixed, ""), (self.reads, " prefill"), (self.decodes, " decode"))
        return " + ".join(
            f"{number} x TP {tp}{role}" for counts, role in parts for tp, number in sorted(counts.items(), reverse=True)
        )


def division_of(layout: Layout) -> Division:
    """How a layout is divided."""
    if not layout.roles:
        return Division(Counter([engine.tp for engine in layout.engines]))
    by_role: dict[Role, Counter[int]] = {role: Counter() for role in Role}
    for spec, role in zip(layout.engines, layout.roles, strict=True):
        by_role[role][spec.tp] += 1
    return Division(by_role[Role.MIXED], by_role[Role.PREFILL], by_role[Role.DECODE])


def with_roles(layout: Layout, division: Division, current: Layout, busy: Mapping[str, float]) -> Layout:
    """Roles for a layout's engines: one that reads now goes on, then those read that have the least to decode.

    Args:
        layout: of engines as they are in the division, which has no mixed ones.
        division: how many of each TP size read.
        current: the layout that serves, with its roles.
        busy: bytes of KV on its engines, by name.
    """
    now = current.role_of if current.roles else {}
    reads: set[EngineSpec] = set()
    for tp, number in division.reads.items():
        own = [engine for engine in layout.engines if engine.tp == tp]
        own.sort(
            key=lambda one: (now.get(one) is not Role.PREFILL, now.get(one) is Role.DECODE, busy.get(one.name, 0.0))
        )
        reads |= set(own[:number])
    return Layout(layout.engines, tuple(Role.PREFILL if one in reads else Role.DECODE for one in layout.engines))


class Divider:
    """Values divisions under one demand.

    Args:
        rows: the tiers that are asked for.
        speeds: by TP size.
        appraiser: of the same, for what mixed engines do.
        handover_ms: that a hand-over takes.
    """

    def __init__(
        self, rows: Sequence[Row], speeds: Mapping[int, Speed], appraiser: Appraiser, handover_ms: float
    ) -> None:
        self._rows = rows
        self._speeds = speeds
        self._appraiser = appraiser
        self._handover_ms = handover_ms
        self._readings: dict[tuple[str, int], Reading | None] = {}
        self._decodings: dict[tuple[str, int], Decoding | None] = {}
        self._tightest: dict[int, float] = {}

    def can(self, row: Row, tp: int, role: Role) -> bool:
        """Can an engine of this size and role keep what of a tier's targets is its part?"""
        if role is Role.PREFILL:
            return self._reading(row, tp) is not None
        if role is Role.DECODE:
            return self._decoding(row, tp) is not None
        return row.estimates[tp].capacity_rps > 0

    def meets(self, row: Row, division: Division) -> bool:
        """Are there engines on which the tier's targets can be met: a mixed one, or one that reads and one that
        decodes?"""
        if any(row.estimates[tp].capacity_rps > 0 for tp, number in division.mixed.items() if number):
            return True
        return any(self._reading(row, tp) for tp in division.reads) and any(
            self._decoding(row, tp) for tp in division.decodes
        )

    def best(self, gpus: int, holds_tokens: int) -> list[Division]:
        """Those that may be worth most, of engines of one TP size that read and of one that decode.

        Args:
            gpus: of the deployment.
            holds_tokens: that an engine which reads has to hold.
        """
        found: list[tuple[float, int, int, int]] = []
        to_decode = {tp: self._gpus_to_decode(tp) for tp in self._speeds}
        for tp_reads in self._speeds:
            if self._speeds[tp_reads].request_tokens < holds_tokens:
                continue
            needs = self._gpus_to_read(tp_reads)
            for tp_decodes, needed in to_decode.items() if needs else ():
                unit = max(tp_reads, tp_decodes)
                if not needed or 2 * unit > gpus:
                    continue
                ideal = gpus * needs / (needs + needed) / unit
                for units in {math.floor(ideal), math.ceil(ideal)}:
                    own = unit * min(max(units, 1), gpus // unit - 1)
                    found.append((min(own / needs, (gpus - own) / needed), tp_reads, tp_decodes, own))
        # Of equal ones the widest, which are the quickest.
        chosen = sorted(set(found), reverse=True)[:_TRIED]
        return [
            Division({}, {tp_reads: own // tp_reads}, {tp_decodes: (gpus - own) // tp_decodes})
            for _, tp_reads, tp_decodes, own in chosen
        ]

    def worth(self, division: Division) -> Worth:
        """Value a division, with or without roles, with what chance takes."""
        mixed, reads, decodes = (
            {tp: float(number) for tp, number in counts.items() if number}
            for counts in (division.mixed, division.reads, division.decodes)
        )
        takers = sum(decodes.values())
        given = []
        for row in self._appraiser.order:
            own = [(tp, self._appraiser.on(row, tp, division.mixed), free) for tp, free in mixed.items()]
            read = [(tp, reader, free) for tp, free in reads.items() if (reader := self._reading(row, tp)) is not None]
            decoded = [
                (tp, taker, taker.rps(steady_batch(taker.most, takers)), free)
                for tp, free in decodes.items()
                if (taker := self._decoding(row, tp)) is not None
            ]
            by_mixed = sum(free * one.capacity_rps for _, one, free in own)
            by_read = sum(free * one.rps for _, one, free in read)
            by_decoded = sum(free * rps for _, _, rps, free in decoded)
            apart = min(by_read, by_decoded / _SPARE)
            room = sum(free * self._room(row, one) for _, one, free in own if one.capacity_rps > 0)
            if apart > 0:
                room += sum(free * one.room for _, one, free in read)
            rate = admitted_rps(row.offered_rps, by_mixed + apart, room, row.demand.prompt_spread)
            part = rate / (by_mixed + apart) if rate else 0.0
            for tp, one, _ in own:
                if one.capacity_rps > 0:
                    mixed[tp] *= max(0.0, 1 - part)
            for tp, _, _ in read if apart else ():
                reads[tp] *= max(0.0, 1 - part * apart / by_read)
            for tp, _, _, _ in decoded if apart else ():
                decodes[tp] *= max(0.0, 1 - part * apart / by_decoded)
            # Of each size: requests/s, and of what reads and what decodes the share of its kind.
            given.append(
                (
                    row,
                    [(tp, one, part * free * one.capacity_rps) for tp, one, free in own if one.capacity_rps > 0],
                    part * apart,
                    [(tp, one, free * one.rps / by_read) for tp, one, free in read] if apart else [],
                    [(tp, one, free * rps / by_decoded) for tp, one, rps, free in decoded] if apart else [],
                )
            )
        load = {tp: 1 - free / division.mixed[tp] for tp, free in mixed.items()}
        kept = self._kept_of([(row, own) for row, own, *_ in given], division.mixed, load) if mixed else {}
        value, carried, times = 0.0, {}, {}
        for row, own, rate, read_shares, decode_shares in given:
            good = busy = 0.0
            for tp, one, asked in own:
                ends = asked * kept[row.tier, tp]
                good, busy = good + ends, busy + ends * one.time_ms(load[tp])
            if rate:
                spread = row.demand.prompt_spread
                took = sum(
                    share * one.ttft_ms(1 - reads[tp] / division.reads[tp], spread) for tp, one, share in read_shares
                ) + sum(share * one.time_ms(rate * share / division.decodes[tp]) for tp, one, share in decode_shares)
                good, busy = good + rate, busy + rate * took
            carried[row.tier] = good
            times[row.tier] = busy / good if good else math.inf
            if good:
                value += row.weight * good * (1 + QUICK * min(1.0, row.alone_ms / times[row.tier]))
        return Worth(value, carried, times)

    # Parts of them.

    def _reading(self, row: Row, tp: int) -> Reading | None:
        key = (row.tier, tp)
        if key not in self._readings:
            self._readings[key] = reading(row.demand, self._speeds[tp])
        return self._readings[key]

    def _decoding(self, row: Row, tp: int) -> Decoding | None:
        """A looser tier leaves room for the tightest one that can be decoded there, as in admission."""
        key = (row.tier, tp)
        if key not in self._decodings:
            speed = self._speeds[tp]
            if tp not in self._tightest:
                self._tightest[tp] = self._tightest_ms(speed)
            own, tightest = tpot_ms_of(row), self._tightest[tp]
            if tightest < own:
                own = min(own, guarded_by_ms(tightest, speed.times.decode_ms(1, 1.0), FILL) / SAFETY)
            self._decodings[key] = decoding(row.demand, speed, own, self._handover_ms)
        return self._decodings[key]

    def _tightest_ms(self, speed: Speed) -> float:
        """The least target that a step of one request keeps; infinite if there is none."""
        kept = [tpot_ms_of(row) for row in self._rows]
        alone = speed.times.decode_ms(1, 1.0)
        return min((ms for ms in kept if alone <= SAFETY * ms), default=math.inf)

    def _gpus_to_read(self, tp: int) -> float:
        found = [(row, one) for row in self._rows if (one := self._reading(row, tp)) is not None]
        return sum(row.offered_rps / one.rps for row, one in found) * tp

    def _gpus_to_decode(self, tp: int) -> float:
        found = [(row, one) for row in self._rows if (one := self._decoding(row, tp)) is not None]
        return _SPARE * sum(row.offered_rps / one.rps(steady_batch(one.most, 1)) for row, one in found) * tp

    def _room(self, row: Row, one: Estimate) -> float:
        """Requests that may be before one that is still in time on a mixed engine."""
        ttft_ms = row.demand.terms.ttft_ms
        if ttft_ms is None:
            return math.inf
        speed = self._speeds[one.tp]
        alone = speed.times.latency_ms + speed.times.prefill_ms(max(1.0, row.demand.prompt_tokens))
        return max(0.0, SAFETY * ttft_ms - alone) * one.capacity_rps / 1e3

    def _kept_of(
        self,
        given: Sequence[tuple[Row, Sequence[tuple[int, Estimate, float]]]],
        mixed: Counts,
        load: Mapping[int, float],
    ) -> dict[tuple[str, int], float]:
        """The part of what is served on mixed engines that ends within its TPOT target, by tier and TP size.

        Where chance would take much of it, admission finds out, as it refuses what it sees to be late, and lets less
        in: the best of some loads is taken.
        """
        squares, shares = dict.fromkeys(mixed, 0.0), dict.fromkeys(mixed, 0.0)
        for row, own in given:
            for tp, _, rate in own:
                prompt = self._speeds[tp].times.prefill_ms(max(1.0, row.demand.prompt_tokens))
                per_ms = rate / mixed[tp] / 1e3
                squares[tp] += per_ms * prompt**2 * (1 + row.demand.prompt_spread)
                shares[tp] += per_ms * prompt
        return {
            (row.tier, tp): max(
                let_in * self._kept(row, one, let_in * load[tp], let_in * squares[tp], let_in * shares[tp])
                for let_in in _LET_IN
            )
            for row, own in given
            for tp, one, _ in own
        }

    def _kept(self, row: Row, one: Estimate, load: float, squares: float, share: float) -> float:
        """The part of a tier's requests on a mixed engine whose TPOT is kept."""
        target = tpot_ms_of(row)
        if math.isinf(target):
            return 1.0
        speed, output = self._speeds[one.tp], max(1.0, row.demand.output_tokens)
        alone = speed.times.decode_ms(1.0, row.demand.prompt_tokens + output / 2)
        # At the estimate's own rate TPOT is as it says; of that, what a step takes, which grows with the batch.
        full = one.capacity_rps / 1e3 * speed.times.prefill_ms(max(1.0, row.demand.prompt_tokens))
        growth = max(0.0, 1 - min(0.99, full) - alone / one.tpot_ms) if one.tpot_ms > alone else 0.0
        tpot = alone / max(0.01, 1 - share - load * growth)
        step = tpot * max(0.0, 1 - share)
        if row.demand.prompt_tokens > chunk_tokens(speed.times, step, target, speed.bounds, min(1.0, share)):
            return 1.0  # Prompts are cut so that each part leaves the target kept.
        return kept_share(target, tpot, squares, output)


def divisions_to_try(divider: Divider, gpus: int, holds_tokens: int, rows: Sequence[Row]) -> Iterator[Division]:
    """Those in which no tier that is asked for is without an engine that reads and one that decodes for it, unless its
    targets can be met nowhere."""
    for division in divider.best(gpus, holds_tokens):
        if all(divider.meets(row, division) for row in rows if row.sizes):
            yield division
