"""The sizes of weights by a model's configuration alone are those of the store that the model is built for."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import weights_children as children
from weights_engines import in_child
from weights_models import MODELS

CASES = [(name, tp) for name in sorted(MODELS) for tp in (2, 4) if MODELS[name].fp8 != "block" or tp == 2]


@pytest.mark.parametrize(("name", "finest_tp"), CASES)
def test_sizes_are_those_of_the_layout(
    context: ForkServerContext, model: Callable[[str], Path], name: str, finest_tp: int
) -> None:
    found = in_child(context, children.sizes_by_layout_and_configuration, model(name), finest_tp)
    (whole, by_configuration), (shard, shard_by_configuration) = found
    assert (by_configuration, shard_by_configuration) == (whole, shard)
    assert whole / finest_tp <= shard < whole
