"""Series of runs: ours beside its rivals, step by step, and over deployments, intervals and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sglang_adapt.core.ablation import NOTHING_OFF, PREFIX, STEPS, Ablation, engines_text, tier_engines_text
from sglang_adapt.core.layout import Layout, Role, parse_layout, uniform_layout
from sglang_adapt.core.slo import SloConfig
from sglang_adapt.policy.price import Price
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.load import Arrival, faster, overlaid
from sglang_adapt.simulate.outcome import aligned
from sglang_adapt.simulate.systems import RELOAD_S, Run, System, best_tier_engines, carries, priced, run, split

ATTAINMENT = 0.8
"""A system carries a load if this part of all requests is good (Nitsum, 4.2.3)."""
INTERVALS_S = (0.1, 0.3, 1.0, 3.0, 10.0)
SCALES = (0.75, 1.0, 1.5, 2.0, 3.0)
GPUS = (4, 8, 16, 32, 64)

Say = Callable[[str], None]
Found = tuple[str, dict[str, Any]]


class StudyError(ValueError):
    """A series cannot be made of this; the text says why."""


@dataclass(frozen=True)
class Setting:
    """What a run is made of.

    Attributes:
        hardware: what engines can do.
        gpus: of the deployment.
        arrivals: the load, in order of time.
        config: the tiers.
        interval_s: of the planner's windows.
        price: of a switch.
        reload_s: of a switch that reads the weights again, in s.
        gives_roles: the planner may give engines roles.
    """

    hardware: Hardware
    gpus: int
    arrivals: tuple[Arrival, ...]
    config: SloConfig
    interval_s: float
    price: Price
    reload_s: float = RELOAD_S
    gives_roles: bool = False

    def report(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "hardware": self.hardware.source,
            "gpus": self.gpus,
            "tp_sizes": list(self.hardware.tp_sizes),
            "kv_tokens": dict(self.hardware.kv_tokens),
            "requests": len(self.arrivals),
            "seconds": round(self.arrivals[-1].at_ms / 1e3, 3),
            "tiers": msgspec.to_builtins(self.config),
            "interval_s": self.interval_s,
            "gives_roles": self.gives_roles,
            "price": {"fixed_ms": self.price.fixed_ms, "bytes_per_s": self.price.bytes_per_s},
        }


def scaled(config: SloConfig, scale: float) -> SloConfig:
    """The same tiers with all targets multiplied."""
    tiers = (
        tier
        if tier.ttft_ms is None or tier.tpot_ms is None
        else msgspec.structs.replace(tier, ttft_ms=tier.ttft_ms * scale, tpot_ms=tier.tpot_ms * scale)
        for tier in config.tiers
    )
    return msgspec.structs.replace(config, tiers=tuple(tiers))


def _auto_system(setting: Setting, interval_s: float | None = None, ablation: Ablation = NOTHING_OFF) -> System:
    return System(
        setting.hardware,
        setting.gpus,
        uniform_layout(setting.hardware.tp_sizes[0], setting.gpus),
        interval_s=interval_s or setting.interval_s,
        price=priced(setting.price, ablation, setting.reload_s),
        ablation=ablation,
        gives_roles=setting.gives_roles,
    )


def _auto_from_best(setting: Setting) -> Run:
    """Following the traffic from the best layout that stays on, so without the first windows in another one."""
    best = _best_static(setting)
    assert best.first is not None
    system = replace(_auto_system(setting), layout=best.first)
    return replace(run(system, setting.arrivals, setting.config), notes=f"from {best.notes}")


def _auto(setting: Setting, interval_s: float | None = None, ablation: Ablation = NOTHING_OFF) -> Run:
    return run(_auto_system(setting, interval_s, ablation), setting.arrivals, setting.config)


def _static_system(
    setting: Setting, layout: int | Layout, *, admission: bool = True, ablation: Ablation = NOTHING_OFF
) -> System:
    """A layout, or engines of a TP size, that stay."""
    if isinstance(layout, int):
        layout = uniform_layout(layout, setting.gpus)
    return System(setting.hardware, setting.gpus, layout, admission, ablation=ablation)


def _static(setting: Setting, layout: int | Layout, *, admission: bool = True, ablation: Ablation = NOTHING_OFF) -> Run:
    system = _static_system(setting, layout, admission=admission, ablation=ablation)
    return run(system, setting.arrivals, setting.config)


def _best_static(setting: Setting, *, admission: bool = True, ablation: Ablation = NOTHING_OFF) -> Run:
    runs = [(tp, _static(setting, tp, admission=admission, ablation=ablation)) for tp in setting.hardware.tp_sizes]
    tp, best = max(runs, key=lambda one: one[1].goodput_rps)
    return replace(best, notes=f"TP {tp}")


def _best_roles(setting: Setting, *, admission: bool = True, ablation: Ablation = NOTHING_OFF) -> Run:
    """Engines of one TP size that prefill and others that decode: the best of all such layouts."""
    runs = []
    for tp in setting.hardware.tp_sizes:
        engines = uniform_layout(tp, setting.gpus).engines
        for reads in range(1, len(engines)):
            roles = (Role.PREFILL,) * reads + (Role.DECODE,) * (len(engines) - reads)
            made = _static(setting, Layout(engines, roles), admission=admission, ablation=ablation)
            runs.append(replace(made, notes=f"{reads} of {len(engines)} engines of TP {tp} prefill"))
    if not runs:
        raise StudyError(f"--gpus {setting.gpus}: roles need two engines")
    return max(runs, key=lambda one: one.goodput_rps)


def compare(setting: Setting, say: Say) -> Found:
    """Ours that follows, ours and stock at each TP size, and stock split by tier."""
    systems: dict[str, Callable[[], Run]] = {"ours, auto": lambda: _auto(setting)}
    for tp in setting.hardware.tp_sizes:
        systems[f"ours, TP {tp}"] = lambda tp=tp: _static(setting, tp, admission=True)  # type: ignore[misc]
        systems[f"stock, TP {tp}"] = lambda tp=tp: _static(setting, tp, admission=False)  # type: ignore[misc]
    systems["split"] = lambda: split(setting.hardware, setting.gpus, setting.arrivals, setting.config)
    return _series(setting, systems, say)


def ablation(setting: Setting, say: Say) -> Found:
    """Nitsum's steps (4.2.1), as the server has them: with what its flags switch off (`core.ablation.STEPS`).

    Where a step has the best of its layouts, the notes say which one, as `compare_goodput.py` takes it.
    """
    by_tier: list[Run] = []

    def tiers_apart() -> Run:
        off = STEPS["4"].ablation
        system = _static_system(setting, setting.hardware.tp_sizes[0], ablation=off)
        try:
            own = best_tier_engines(system, setting.arrivals, setting.config)
        except ValueError as error:
            raise StudyError(f"--gpus {setting.gpus}: {error}") from None
        layout = parse_layout(engines_text(own), setting.hardware.tp_sizes, setting.gpus)
        made = _static(setting, layout, ablation=replace(off, tier_engines=own))
        by_tier.append(replace(made, notes=tier_engines_text(own)))
        return by_tier[0]

    def together() -> Run:
        assert by_tier[0].first is not None
        return replace(_static(setting, by_tier[0].first, ablation=STEPS["5"].ablation), notes=by_tier[0].notes)

    ways: dict[str, Callable[[], Run]] = {
        "1": lambda: _static(setting, setting.hardware.tp_sizes[0], ablation=STEPS["1"].ablation),
        "2": lambda: _best_roles(setting, ablation=STEPS["2"].ablation),
        "3": lambda: _best_static(setting, ablation=STEPS["3"].ablation),
        "4": tiers_apart,
        "5": together,
    }

    def step(number: str) -> Run:
        known = STEPS[number]
        made = _auto(setting, ablation=known.ablation) if known.follows else ways[number]()
        return replace(made, notes=f"{known.what}{': ' if made.notes else ''}{made.notes}")

    return _series(setting, {f"{PREFIX}{one}": lambda one=one: step(one) for one in STEPS}, say)  # type: ignore[misc]


def roles(setting: Setting, say: Say) -> Found:
    """The best fixed roles and the best mixed engines, with stock's routing and with ours, and ours that follows."""
    systems: dict[str, Callable[[], Run]] = {
        "stock, fixed roles, the best ones": lambda: _best_roles(setting, admission=False),
        "stock, mixed, best TP": lambda: _best_static(setting, admission=False),
        "ours, fixed roles, the best ones": lambda: _best_roles(setting, admission=True),
        "ours, mixed, best TP": lambda: _best_static(setting, admission=True),
        "ours, auto": lambda: _auto(replace(setting, gives_roles=True)),
        "ours, auto, from the best TP": lambda: _auto_from_best(replace(setting, gives_roles=True)),
    }
    return _series(setting, systems, say)


def interval(setting: Setting, say: Say) -> Found:
    """The planner's interval."""
    return _series(
        setting,
        {f"{seconds:g} s": lambda seconds=seconds: _auto(setting, interval_s=seconds) for seconds in INTERVALS_S},  # type: ignore[misc]
        say,
    )


def targets(setting: Setting, say: Say) -> Found:
    """All targets, tighter and looser: ours, the best static layout of ours and of stock, and split."""
    systems: dict[str, Callable[[], Run]] = {}
    for scale in SCALES:
        at = replace(setting, config=scaled(setting.config, scale))
        systems[f"{scale:g}x, ours, auto"] = lambda at=at: _auto(at)  # type: ignore[misc]
        systems[f"{scale:g}x, ours, best TP"] = lambda at=at: _best_static(at, admission=True)  # type: ignore[misc]
        systems[f"{scale:g}x, stock, best TP"] = lambda at=at: _best_static(at, admission=False)  # type: ignore[misc]
        systems[f"{scale:g}x, split"] = lambda at=at: split(at.hardware, at.gpus, at.arrivals, at.config)  # type: ignore[misc]
    return _series(setting, systems, say)


def scaling(setting: Setting, say: Say) -> Found:
    """The most goodput with `ATTAINMENT` at 4 to 64 GPUs: with so many times the GPUs, so many times the users.

    The load of the setting is for its GPUs; larger deployments get copies of it, and all are made faster until a
    system no longer carries them.
    """
    least = setting.gpus
    systems: Mapping[str, Callable[[Setting], Sequence[System]]] = {
        "ours, auto": lambda at: [_auto_system(at)],
        "ours, best TP": lambda at: [_static_system(at, tp, admission=True) for tp in at.hardware.tp_sizes[::-1]],
        "stock, best TP": lambda at: [_static_system(at, tp, admission=False) for tp in at.hardware.tp_sizes[::-1]],
    }
    rows = [("GPUs", *systems)]
    found: list[dict[str, Any]] = []
    for gpus in (gpus for gpus in GPUS if gpus >= least and gpus % least == 0):
        at = replace(setting, gpus=gpus, arrivals=tuple(overlaid(setting.arrivals, gpus // least)))
        cells = []
        for name, system in systems.items():
            times, best = _most(at, system(at))
            say(f"{gpus} GPUs, {name}: {best.goodput_rps:g} req/s at {times:.3g}x" if best else f"{gpus}, {name}: none")
            cells.append("0" if best is None else f"{best.goodput_rps:.1f}")
            report = {} if best is None else best.report()
            found.append({"gpus": gpus, "system": name, "times": times, **report})
        rows.append((str(gpus), *cells))
    if not found:
        raise StudyError(
            f"--gpus {least}: scaling begins there; give {GPUS[0]}, of which {_listed(GPUS)} are multiples"
        )
    return aligned(rows), {"setting": setting.report(), "attainment": ATTAINMENT, "runs": found}


def _most(setting: Setting, systems: Sequence[System]) -> tuple[float, Run | None]:
    """(how much faster than the setting, the run) of the fastest load that one of these carries, to 6 %."""

    def at(times: float) -> Run | None:
        arrivals = faster(setting.arrivals, times)
        return next(
            (one for one in (carries(each, arrivals, setting.config, ATTAINMENT) for each in systems) if one), None
        )

    low, best, high = 0.0, None, 1.0
    while (found := at(high)) is not None and high < 64:
        low, best, high = high, found, high * 2
    low = low or high / 16
    while high / low > 1.06:
        middle = (low * high) ** 0.5
        found = at(middle)
        if found is not None:
            low, best = middle, found
        else:
            high = middle
    return low, best


def _series(setting: Setting, systems: Mapping[str, Callable[[], Run]], say: Say) -> Found:
    rows: list[tuple[str, ...]] = [
        ("", *("goodput_rps", "attainment", "sent", "refused", "missed"), *_tiers(setting), "switches", "")
    ]
    found = []
    for name, system in systems.items():
        one = system()
        say(f"{name}: {one.goodput_rps:g} req/s good, {one.took_s:.1f} s")
        total = one.judged["total"]
        shares = [_share(one.judged[tier]["attainment"]) for tier in _tiers(setting)]
        counts = [str(total[column]) for column in ("sent", "refused", "missed")]
        cells = [f"{one.goodput_rps:.2f}", _share(total["attainment"]), *counts, *shares, str(len(one.switches))]
        rows.append((name, *cells, one.notes))
        found.append({"system": name, **one.report()})
    return aligned(rows), {"setting": setting.report(), "runs": found}


def _tiers(setting: Setting) -> list[str]:
    return [tier.name for tier in setting.config.tiers]


def _share(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


STUDIES: Mapping[str, Callable[[Setting, Say], Found]] = {
    "compare": compare,
    "ablation": ablation,
    "roles": roles,
    "interval": interval,
    "targets": targets,
    "scaling": scaling,
}
