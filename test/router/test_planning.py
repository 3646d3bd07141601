"""What the planner is told of a deployment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, TpProfile
from sglang_adapt.core.slo import BUILT_IN
from sglang_adapt.kv.sizing import KvShape, size_pool
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import GPU_PRICE
from sglang_adapt.policy.profile import Correction
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.manager import Planning
from sglang_adapt.router.planning import make_planning

POOL = size_pool(KvShape(2, 4, 32, 2), (1, 2), 16, 1600, (4, 2))
KEY = ProfileKey("demo", "float32", "virtual GPU", "0", "0", "triton")
SIZES = tuple(TpProfile(tp, (PrefillPoint(1, 0, 5.0),), (DecodePoint(1, 1, 3.0),)) for tp in (1, 2))


def planning(admission: Any = None, *, virtual: bool = True, kv_copy: CopyPath = CopyPath.PEER) -> Planning:
    config: Any = SimpleNamespace(
        gpus=2, tp_sizes=(1, 2), virtual=virtual, policy=AdaptPolicy.AUTO, gives_roles=False, kv_copy=kv_copy
    )
    tiers = TierSettings(None, None, KEY, (1, 2), 2, Profile(KEY, SIZES), ())
    bounds = {tp: Bounds(16 * tp, 2048, 64) for tp in (1, 2)}
    return make_planning(config, POOL, tiers, admission, bounds, lambda plan, seconds: None)


def test_without_tiers_there_is_one_without_targets() -> None:
    (only,) = planning().terms()
    assert (only.tier, only.ttft_ms, only.tpot_ms) == ("all", None, None)
    one, two = planning().speeds()
    assert (one.tp, two.tp, one.bounds.page_tokens, two.bounds.page_tokens) == (1, 2, 16, 32)
    # Twice the tokens at twice the GPUs, and so the longest request.
    assert two.kv_tokens == 2 * one.kv_tokens >= 2 * 1600
    assert {1: one.request_tokens, 2: two.request_tokens} == POOL.request_tokens
    assert one.times.decode_ms(1, 1) == 3.0
    # K and V of 2 layers with 4 heads of 32 numbers of 2 bytes.
    assert planning().token_bytes == 2 * 2 * 4 * 32 * 2


def test_a_switch_costs_by_the_way_that_kv_takes() -> None:
    prices = {path: planning(virtual=False, kv_copy=path).price for path in CopyPath}
    assert prices[CopyPath.PEER] == GPU_PRICE
    assert prices[CopyPath.STAGED].fixed_ms == GPU_PRICE.fixed_ms
    # 392 and 21 GB/s were measured.
    assert GPU_PRICE.bytes_per_s / prices[CopyPath.STAGED].bytes_per_s == pytest.approx(392 / 21)


def test_tiers_and_corrections_are_those_of_now() -> None:
    admission = SimpleNamespace(config=BUILT_IN, corrections={1: Correction(2.0, 4.0), 2: Correction()})
    made = planning(admission)
    interactive, _, background = made.terms()
    assert (interactive.tier, interactive.weight, interactive.tpot_ms) == ("interactive", 2.0, 25.0)
    assert background.ttft_ms is None
    assert [one.times.decode_ms(1, 1) for one in made.speeds()] == [12.0, 3.0]
    told: list[object] = []
    admission.assign = told.append
    made.assign({"tp1@0": frozenset({"interactive"})})
    assert told == [{"tp1@0": frozenset({"interactive"})}]
    planning().assign({"tp1@0": frozenset()})
    admission.corrections[2] = Correction(1.0, 0.5)
    assert made.speeds()[1].times.decode_ms(1, 1) == 1.5
