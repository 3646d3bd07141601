"""How many engines should prefill and how many decode, against as many that do both.

Nitsum, 3.3.1: the highest rates of prefill and of decode within the targets are balanced, here in whole engines of one
TP size. An engine that does both, with its prompts cut to what a decode step has to spare, is that of
`policy.efficiency`, with the same margins. A fixed split collapses where lengths change (their ablation), so both are
estimated and the better one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.policy.demand import Demand, Terms
from sglang_adapt.policy.efficiency import Speed, estimate
from sglang_adapt.policy.limits import SAFETY

HANDOVER_MS = 3.0
"""What a hand-over adds to the time of a request, beyond a decode step; the goal, not yet measured on GPUs."""
_BUSIEST = 0.98
"""Prompts never take more of an engine's time, as in `policy.efficiency`."""
_HALVINGS = 12
"""Steps of the search for the largest batch."""


@dataclass(frozen=True, slots=True)
class Split:
    """Engines of one TP size for one tier's requests, split or not.

    Attributes:
        prefill, decode: how many engines have these roles; 0 and 0 if all are mixed.
        split_rps: what the best split carries within the targets; 0 without one.
        mixed_rps: what as many mixed engines do.
        reason: which of both is taken, and why.
    """

    prefill: int
    decode: int
    split_rps: float
    mixed_rps: float
    reason: str

    @property
    def is_split(self) -> bool:
        return self.prefill > 0


def prefill_rps(demand: Demand, speed: Speed) -> float:
    """The most prompts a second that an engine reads so that TTFT stays within its target; 0 if none does."""
    alone = speed.times.prefill_ms(max(1.0, demand.prompt_tokens))
    most = math.inf if demand.terms.ttft_ms is None else SAFETY * demand.terms.ttft_ms - speed.times.latency_ms
    if alone > most:
        return 0.0
    # As in a queue with one server and equal work (M/D/1): the wait is alone x busy / (2 (1 - busy)).
    spare = (most - alone) / alone
    busy = _BUSIEST if math.isinf(spare) else min(_BUSIEST, 2 * spare / (1 + 2 * spare))
    return 1e3 * busy / alone


def decode_rps(demand: Demand, speed: Speed, handover_ms: float = HANDOVER_MS) -> float:
    """The most requests a second that an engine ends which only decodes, so that TPOT stays within its target; 0 if it
    cannot for one."""
    prompt, output = max(1.0, demand.prompt_tokens), max(1.0, demand.output_tokens)
    context = prompt + output / 2
    target = math.inf if demand.terms.tpot_ms is None else SAFETY * demand.terms.tpot_ms

    def step(batch: float) -> float:
        return speed.times.decode_ms(batch, batch * context)

    def fits(batch: float) -> bool:
        return step(batch) + handover_ms / output <= target

    most = min(float(speed.bounds.requests), speed.kv_tokens / (prompt + output))
    if most < 1 or prompt + output > speed.request_tokens or not fits(1.0):
        return 0.0
    low, high = 1.0, most
    if fits(most):
        low = most
    else:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    return 1e3 * low / (output * step(low))


def together(demands: Sequence[Demand]) -> Demand:
    """Requests of several tiers as of one: their mean, with the tightest targets. At least one is given."""
    rates = [demand.rate_rps or 1e-9 for demand in demands]
    total = sum(rates)
    ttft = min((one.terms.ttft_ms for one in demands if one.terms.ttft_ms is not None), default=None)
    tpot = min((one.terms.tpot_ms for one in demands if one.terms.tpot_ms is not None), default=None)
    return Demand(
        Terms("+".join(one.terms.tier for one in demands), 1.0, ttft, tpot),
        total,
        sum(rate * one.prompt_tokens for rate, one in zip(rates, demands, strict=True)) / total,
        sum(rate * one.output_tokens for rate, one in zip(rates, demands, strict=True)) / total,
    )


def roles_rps(demand: Demand, roles: Mapping[EngineSpec, Role], speeds: Mapping[int, Speed]) -> float:
    """Requests/s within the targets that a layout with these roles carries; engines of both kinds carry their own."""
    reads = sum(prefill_rps(demand, speeds[one.tp]) for one, role in roles.items() if role is Role.PREFILL)
    decodes = sum(decode_rps(demand, speeds[one.tp]) for one, role in roles.items() if role is Role.DECODE)
    mixed = sum(estimate(demand, speeds[one.tp]).capacity_rps for one, role in roles.items() if role is Role.MIXED)
    return mixed + min(reads, decodes)


def split(demand: Demand, speed: Speed, engines: int, handover_ms: float = HANDOVER_MS) -> Split:
    """The better of a split and of mixed engines, by what they carry within the targets.

    Args:
        demand: its requests' lengths count, and its targets; the rate does not.
        speed: of an engine.
        engines: how many there are.
    """
    mixed = engines * estimate(demand, speed).capacity_rps
    reads, decodes = prefill_rps(demand, speed), decode_rps(demand, speed, handover_ms)
    pairs = [(min(count * reads, (engines - count) * decodes), -count) for count in range(1, engines)]
    best, negative = max(pairs, default=(0.0, 0))
    count = -negative
    size = f"{demand.prompt_tokens:.0f} + {demand.output_tokens:.0f} tokens"
    if best > mixed:
        reason = (
            f"{count} that prefill and {engines - count} that decode carry {best:.2f} requests/s of {size}, {engines} "
            f"mixed ones {mixed:.2f}: {_cost_of_mixing(demand, speed, mixed)}"
        )
        return Split(count, engines - count, best, mixed, reason)
    if not best:
        why = "there is one engine" if engines < 2 else "no split meets the targets"
    elif count * reads < (engines - count) * decodes:
        why = f"{count} that prefill are the bottleneck of a split, which carries {best:.2f}"
    else:
        why = f"{engines - count} that decode are the bottleneck of a split, which carries {best:.2f}"
    return Split(0, 0, best, mixed, f"{engines} mixed engines carry {mixed:.2f} requests/s of {size}: {why}")


def _cost_of_mixing(demand: Demand, speed: Speed, mixed: float) -> str:
    if not mixed:
        return "beside prompts no decode step meets its target"
    return f"a prompt takes {speed.times.prefill_ms(demand.prompt_tokens):.0f} ms, in which nothing else decodes"
