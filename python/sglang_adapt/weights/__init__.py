"""One copy of a model's weights, seen at any tensor-parallel size through views.

The rule: the store is the T stock shards of the finest TP size T side by side. A column-parallel parameter,
an embedding or an LM head is joined along its output dimension, a row-parallel matrix along its input
dimension, everything else is kept once. At a TP size t that divides T, rank r's parameter is the r-th of t
equal parts: a run of rows or a range of columns, never a copy. A fused matrix (q, k and v; gate and up) is
therefore ordered by block, `[q0 k0 v0 | q1 k1 v1 | ...]`, so that at t < T its output has to be read
accordingly.

Where no TP size is smaller than t, a store may have one of t parts only (`Part`): the shards that the ranks of one GPU
read.

This room knows tensors only; what a stock model's parameters are is for `upstream.weights` to say.
"""

from sglang_adapt.weights.manifest import WHOLE, Manifest, ParamEntry, ParamKind, Part, ShardSpec, plan_layout
from sglang_adapt.weights.store import WeightsHandle, WeightStore
from sglang_adapt.weights.views import ExpectedParam, ViewMismatchError, checked_view, shard_view

__all__ = [
    "WHOLE",
    "ExpectedParam",
    "Manifest",
    "ParamEntry",
    "ParamKind",
    "Part",
    "ShardSpec",
    "ViewMismatchError",
    "WeightStore",
    "WeightsHandle",
    "checked_view",
    "plan_layout",
    "shard_view",
]
