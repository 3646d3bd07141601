"""What a deployment knows of its tiers and of how fast it is, as one value that is passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_adapt.core.profile import Profile, ProfileKey
from sglang_adapt.core.slo import SloConfig, Terms, Tier
from sglang_adapt.policy.profile import ModelFigures, ReckonedTimes, Times, gpu_figures
from sglang_adapt.policy.sequence import measured_times

_RECKONED_FLOOR = 0.3
"""An estimate that is not measured proves a target impossible only below this part of it."""


class NoTimesError(ValueError):
    """Nothing is known of the speed of a deployment; the text says how to find out."""


@dataclass(frozen=True)
class TierSettings:
    """Tiers and speed.

    Attributes:
        config: the tiers; None if the server has none, and every request is as good as any other.
        source: where they come from: a file, or `built-in`.
        key: what a profile must have been measured with.
        tp_sizes: of the engines.
        gpus: of the deployment.
        profile: as measured; None to reckon.
        figures: to reckon with, by TP size; empty if the sizes of the model are not known.
        profile_source: the profile's file.
        sp_tokens: by TP size, tokens of a batch from which it runs sequence-parallel.
    """

    config: SloConfig | None
    source: str | None
    key: ProfileKey
    tp_sizes: tuple[int, ...]
    gpus: int
    profile: Profile | None
    figures: tuple[ModelFigures, ...]
    profile_source: str | None = None
    sp_tokens: Mapping[int, int] = field(default_factory=dict)

    def times(self, tp: int) -> Times:
        """How fast an engine of a TP size is. Raises NoTimesError."""
        if self.profile is not None:
            return measured_times(self.profile.size(tp), self.sp_tokens.get(tp), self.tp_sizes[0])
        for figures in self.figures:
            if figures.tp == tp:
                return ReckonedTimes(figures, gpu_figures(self.key.gpu)[0])
        raise NoTimesError(
            f"the sizes of {self.key.model} are not known before it is loaded, so its times cannot be reckoned; "
            "measure them with `python -m sglang_adapt.profile` on a server without --adapt-slo-config, then give "
            "--adapt-profile"
        )

    @property
    def speed_source(self) -> str:
        """Where the times come from, in words."""
        if self.profile is not None:
            return f"measured: {self.profile_source}"
        known = gpu_figures(self.key.gpu)[1]
        what = f"the model's size and what {self.key.gpu} does" if known else f"the model's size alone ({self.key.gpu})"
        return f"reckoned from {what}, corrected as requests run; measure with `python -m sglang_adapt.profile`"

    def floors_ms(self) -> tuple[float, float]:
        """(TTFT, TPOT) below which no target can be met at any TP size, of the smallest request, alone."""
        share = 1.0 if self.profile is not None else _RECKONED_FLOOR
        times = [self.times(tp) for tp in self.tp_sizes]
        return share * min(t.latency_ms + t.prefill_ms(1) for t in times), share * min(t.decode_ms(1, 1) for t in times)


def target_faults(settings: TierSettings, config: SloConfig) -> list[str]:
    """Targets of tiers that no engine can meet, each with what it can."""
    return [fault for tier in config.tiers for fault in _unmeetable(settings, tier, f"tier {tier.name}: ")]


def terms_fault(settings: TierSettings, terms: Terms) -> str | None:
    """Why a request's targets can never be met, or None."""
    return next(iter(_unmeetable(settings, terms, "")), None)


def _unmeetable(settings: TierSettings, asks: Tier | Terms, prefix: str) -> list[str]:
    floors = settings.floors_ms()
    return [
        f"{prefix}{key} {target:g} cannot be met by any engine here, even alone; the least is about {floor:.3g} ms"
        for key, target, floor in zip(("ttft_ms", "tpot_ms"), (asks.ttft_ms, asks.tpot_ms), floors, strict=True)
        if target is not None and target < floor
    ]
