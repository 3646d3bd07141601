"""The overhead to reckon with, from a table of measured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_adapt.core.overheads import VIRTUAL_GPU, Overhead, OverheadKey


@dataclass(frozen=True)
class Estimate:
    """An overhead as it goes into a plan.

    Attributes:
        nbytes: on one GPU.
        measured_for: what it was measured for.
        exact: that is what was asked for; else the figure is assumed.
    """

    nbytes: int
    measured_for: OverheadKey
    exact: bool


_NEARNESS: tuple[Callable[[OverheadKey, OverheadKey], bool], ...] = (
    lambda a, b: (a.gpu, a.tp, a.shape) == (b.gpu, b.tp, b.shape),
    lambda a, b: (a.gpu, a.tp) == (b.gpu, b.tp),
    lambda a, b: a.gpu == b.gpu,
    lambda a, b: a.tp == b.tp,
    lambda a, b: True,
)


def estimate_overhead(table: Sequence[Overhead], wanted: OverheadKey) -> Estimate:
    """What was measured for `wanted`, or else the most that was measured for anything as near as possible.

    Nearest is the same GPU, TP size and model shape with other CUDA graphs, then other shapes, then other TP sizes,
    then other GPUs. Figures of keepers and engines, and of real and virtual GPUs, are never taken for each other.

    Args:
        table: measured overheads; of two with the same key the later counts.
        wanted: what is to be started.

    Raises:
        LookupError: nothing of the kind was ever measured.
    """
    latest = {overhead.key: overhead for overhead in table}
    if (exact := latest.get(wanted)) is not None:
        return Estimate(exact.nbytes, wanted, exact=True)
    kind = [
        overhead
        for overhead in latest.values()
        if (overhead.key.tp is None) == (wanted.tp is None)
        and (overhead.key.gpu == VIRTUAL_GPU) == (wanted.gpu == VIRTUAL_GPU)
    ]
    for is_near in _NEARNESS:
        near = [overhead for overhead in kind if is_near(overhead.key, wanted)]
        if near:
            most = max(near, key=lambda overhead: overhead.nbytes)
            return Estimate(most.nbytes, most.key, exact=False)
    raise LookupError(f"no overhead was ever measured that could be assumed for {wanted}")
