"""From `--adapt-slo-config` and `--adapt-profile` to what the deployment knows of its tiers and of its speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_adapt.core.overheads import VIRTUAL_GPU
from sglang_adapt.core.profile import ProfileError, profile_fault, read_profile
from sglang_adapt.core.slo_file import SloFileError, read_slo_config
from sglang_adapt.policy.profile import ModelFigures
from sglang_adapt.policy.sequence import NoSequenceProfileError, thresholds
from sglang_adapt.policy.tiers import NoTimesError, TierSettings, target_faults


class TiersError(ValueError):
    """Tiers or profile cannot be used; the text says why and what would do."""


def make_tier_settings(
    slo_config: str | None,
    profile: Path | None,
    server_args: Mapping[int, Any],
    gpus: int,
    virtual: bool,
    plans: bool = False,
    sp: str | int | None = None,
) -> TierSettings:
    """Read both files and check them against the deployment.

    Args:
        slo_config: a file of tiers, `built-in`, or None for none.
        profile: a file of measured times, or None.
        server_args: stock's, by TP size.
        gpus: of the deployment.
        virtual: they are virtual GPUs.
        plans: the layout is planned, so the speed has to be known even without tiers.
        sp: of which batches run sequence-parallel, as `policy.sequence.thresholds` takes it.

    Raises:
        TiersError: a file is bad or of another deployment, a tier's target can never be met, or the profile does not
            say what `sp` asks of it.
    """
    from sglang_adapt.memory.free import FreeMemoryError, gpu_memory
    from sglang_adapt.upstream.front import profile_key
    from sglang_adapt.upstream.weights.sizes import model_sizes, weight_itemsize

    tp_sizes = tuple(server_args)
    args = server_args[tp_sizes[-1]]
    try:
        gpu = VIRTUAL_GPU if virtual else gpu_memory(args.base_gpu_id).now().name
        key = profile_key(args, gpu)
        measured = None if profile is None else read_profile(profile)
        config = None if slo_config is None else read_slo_config(slo_config)
    except (SloFileError, ProfileError, FreeMemoryError) as error:
        raise TiersError(str(error)) from None
    if measured is not None and (fault := profile_fault(measured, key, tp_sizes)) is not None:
        raise TiersError(f"--adapt-profile {profile} is of another deployment: {fault}")
    try:
        sp_tokens = thresholds(sp, tp_sizes, measured)
    except NoSequenceProfileError as error:
        raise TiersError(
            f"--adapt-sp auto takes the threshold from --adapt-profile, and {error}; measure both ways to run a batch "
            "with `python -m sglang_adapt.profile`, on a server with --adapt-sp off and then on one with --adapt-sp 0, "
            "or give a number of tokens"
        ) from None
    figures: tuple[ModelFigures, ...] = ()
    if (plans or config is not None) and measured is None:
        sizes = model_sizes(args, tp_sizes)
        if not isinstance(sizes, str):
            layers = int(sizes.shape.split("x")[0])
            itemsize = weight_itemsize(args)
            figures = tuple(
                ModelFigures(tp, layers, sizes.rank_bytes[tp], sizes.kv_bytes_per_token[tp], itemsize)
                for tp in tp_sizes
            )
    settings = TierSettings(
        config, slo_config, key, tp_sizes, gpus, measured, figures, None if profile is None else str(profile), sp_tokens
    )
    if plans or config is not None:
        try:
            # Asks for the times of every TP size.
            settings.floors_ms()
            faults = [] if config is None else target_faults(settings, config)
        except NoTimesError as error:
            raise TiersError(str(error)) from None
        if faults:
            raise TiersError(f"--adapt-slo-config {slo_config}: {'; '.join(faults)}")
    return settings
