"""What the planner has to know of a deployment, gathered from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.kv.sizing import PoolSettings
from sglang_adapt.policy.demand import Terms
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import Price, first_gpu_price
from sglang_adapt.policy.profile import Corrected, shared_corrections
from sglang_adapt.policy.situation import Plan
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.manager import Planning

ALL = "all"
"""The name of the only tier where there are none."""
_FIRST_VIRTUAL_PRICE = Price(fixed_ms=100.0, bytes_per_s=2.0e9)


def make_planning(
    config: AdaptConfig,
    pool: PoolSettings,
    tiers: TierSettings,
    admission: Admission | None,
    bounds: Mapping[int, Bounds],
    planned: Callable[[Plan, float], None],
) -> Planning:
    """Planning for a deployment.

    Args:
        config: the deployment.
        pool: the KV pool of each GPU.
        tiers: how fast the engines are.
        admission: has the tiers now, and what was learned of the speed; None without tiers.
        bounds: of an engine's iterations, by TP size.
        planned: told each plan, and the seconds that it took.

    Raises:
        NoTimesError: nothing is known of the speed.
    """
    geometry = pool.geometry
    times = {tp: tiers.times(tp) for tp in config.tp_sizes}

    def speeds() -> tuple[Speed, ...]:
        known = (
            {} if admission is None else shared_corrections(admission.corrections, measured=tiers.profile is not None)
        )
        return tuple(
            Speed(
                tp,
                Corrected(times[tp], known[tp]) if tp in known else times[tp],
                bounds[tp],
                (geometry.blocks - 1) * geometry.tokens_per_block(tp),
                pool.request_tokens[tp],
            )
            for tp in config.tp_sizes
        )

    def terms() -> tuple[Terms, ...]:
        if admission is None:
            return (Terms(ALL),)
        return tuple(Terms(tier.name, tier.weight, tier.ttft_ms, tier.tpot_ms) for tier in admission.config.tiers)

    return Planning(
        gpus=config.gpus,
        terms=terms,
        speeds=speeds,
        token_bytes=2 * geometry.layers * geometry.kv_heads * geometry.head_dim * geometry.itemsize,
        price=_FIRST_VIRTUAL_PRICE if config.virtual else first_gpu_price(config.kv_copy),
        gives_roles=config.gives_roles,
        planned=planned,
        assign=lambda tiers_of: None if admission is None else admission.assign(tiers_of),
    )
