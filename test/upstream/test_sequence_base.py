"""Sequence-parallel batches on shards of the weights: whose tokens, heads and sums are whose, between ranks that are
threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from thread_groups import ThreadGroup

from sglang_adapt.memory import allocate
from sglang_adapt.upstream.sequence import group as groups
from sglang_adapt.upstream.sequence.base import Base
from sglang_adapt.upstream.sequence.exchange import Exchange, TokenSlices
from sglang_adapt.upstream.sequence.group import CaptureOwnGroups, Groups
from sglang_adapt.upstream.sequence.layers import BaseLinear, run_embedding, run_row
from sglang_adapt.upstream.sequence.mode import SequenceMode
from sglang_adapt.weights import ParamKind, ShardSpec, WeightStore, plan_layout

CASES = [(4, 1), (4, 2), (8, 2), (8, 4), (6, 3), (6, 2)]
HIDDEN, WIDTH, VOCAB = 5, 3, 24


def on_ranks(ranks: int, tp: int, tokens: int, do: Callable[[SequenceMode], torch.Tensor]) -> list[torch.Tensor]:
    """`do` on every rank of an engine, which has groups as `Base` says."""
    made: dict[tuple[int, ...], tuple[list[torch.Tensor], threading.Barrier]] = {}

    def group(members: list[int], rank: int) -> ThreadGroup:
        board, barrier = made.setdefault(
            tuple(members), ([torch.empty(0)] * len(members), threading.Barrier(len(members), timeout=20))
        )
        return ThreadGroup(members.index(rank), board, barrier)

    modes = []
    for rank in range(ranks):
        base = Base(rank, ranks, tp)
        tokens_of, sums_of = (
            next(members for members in found if rank in members) for found in (base.sp_groups, base.tp_groups)
        )
        own = Groups(group(tokens_of, rank), None if tp == 1 else group(sums_of, rank))
        mode = SequenceMode(base, own, 1)
        mode.exchange = Exchange(TokenSlices(tokens, base.slice, base.sp), own.tokens, own.sums)
        modes.append(mode)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(do, modes))


def own_rows(mode: SequenceMode, whole: torch.Tensor) -> torch.Tensor:
    """A rank's rows of `[tokens, columns]`; its padding is not a number, which must not get anywhere."""
    assert mode.exchange is not None
    s = mode.exchange.slices
    padded = torch.cat([whole, torch.full((s.padding, whole.shape[1]), torch.nan)])
    return padded[s.rank * s.rows : (s.rank + 1) * s.rows].contiguous()


@pytest.mark.parametrize(("ranks", "tp"), CASES)
def test_groups_are_those_of_the_same_weights_and_of_the_same_tokens(ranks: int, tp: int) -> None:
    bases = [Base(rank, ranks, tp) for rank in range(ranks)]
    for base in bases:
        [same_weights] = [members for members in base.sp_groups if base.rank in members]
        [same_tokens] = [members for members in base.tp_groups if base.rank in members]
        assert (len(same_weights), len(same_tokens)) == (base.sp, tp) == (ranks // tp, tp)
        assert same_weights[base.slice] == same_tokens[base.shard] == base.rank
        assert {bases[rank].shard for rank in same_weights} == {base.shard}
        assert {bases[rank].slice for rank in same_tokens} == {base.slice}
        # What a rank has at TP size `ranks` is part of its shard.
        assert base.shard * ranks // tp <= base.rank < (base.shard + 1) * ranks // tp
    assert str(Base(0, 4, 2)) == "SP 2 x TP 2"


@pytest.mark.parametrize("tp", [0, 3, 8])
def test_ranks_that_cannot_be_shared_out(tp: int) -> None:
    with pytest.raises(ValueError, match=f"4 ranks cannot share weights out in {tp} parts"):
        Base(0, 4, tp)


@pytest.mark.parametrize(("ranks", "tp"), CASES)
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_heads_are_in_stocks_order_and_products_whole(ranks: int, tp: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (tokens, HIDDEN), generator=random).float()
    into = torch.randint(-4, 5, (HIDDEN, ranks * WIDTH), generator=random).float()
    out_of = torch.randint(-4, 5, (ranks * WIDTH, HIDDEN), generator=random).float()
    heads: dict[int, torch.Tensor] = {}

    def block(mode: SequenceMode) -> torch.Tensor:
        assert mode.exchange is not None
        shard = into.chunk(tp, 1)[mode.base.shard]
        mine = heads[mode.base.rank] = mode.exchange.tokens_to_heads(own_rows(mode, x) @ shard)
        rows = mode.exchange.heads_to_tokens(mine)
        return mode.exchange.all_tokens(mode.exchange.sum_parts(rows @ out_of.chunk(tp, 0)[mode.base.shard]))

    whole = on_ranks(ranks, tp, tokens, block)
    for rank in range(ranks):
        # What the rank's own columns give at TP size `ranks`, so the KV that they are is the same.
        assert torch.equal(heads[rank], (x @ into).chunk(ranks, 1)[rank])
        assert torch.equal(whole[rank], x @ into @ out_of)


@pytest.mark.parametrize(("ranks", "tp"), [(4, 1), (4, 2), (6, 3)])
def test_embeddings_are_found_in_whichever_shard_has_them(ranks: int, tp: int) -> None:
    table = torch.arange(1.0, 1 + VOCAB * HIDDEN).view(VOCAB, HIDDEN)
    ids = torch.tensor([0, 23, 11, 12, 7, 8, 16])

    def embed(mode: SequenceMode) -> torch.Tensor:
        assert mode.exchange is not None
        layer = SimpleNamespace(forward=None)
        run_embedding(layer, table.chunk(tp)[mode.base.shard], mode)  # type: ignore[arg-type]
        return mode.exchange.all_tokens(layer.forward(ids))

    for got in on_ranks(ranks, tp, len(ids), embed):
        assert torch.equal(got, table[ids])


class PlainMethod:
    """Of stock's method for layers without quantisation what is used here."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


def layer_of(kind: type, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    layer.quant_method, layer.skip_bias_add = PlainMethod(), False
    return layer


def test_a_sum_has_its_bias_once() -> None:
    ranks = tp = 2
    weight, bias = torch.arange(24.0).view(4, 6), torch.tensor([1.0, 10, 100, 1000])
    shards = (
        ShardSpec("row.weight", ParamKind.ROW, 1, (4, 3), "float32"),
        ShardSpec("row.bias", ParamKind.REPLICATED, None, (4,), "float32"),
        ShardSpec("column.weight", ParamKind.COLUMN, 0, (2, 6), "float32"),
        ShardSpec("column.bias", ParamKind.COLUMN, 0, (2,), "float32"),
    )
    manifest = plan_layout("m", tp, shards)
    with WeightStore(manifest, allocate(manifest.nbytes, "cpu")) as store:
        for kind in ("row", "column"):
            store.full(f"{kind}.weight").copy_(weight)
            store.full(f"{kind}.bias").copy_(bias)
        x = torch.arange(18.0).view(3, 6)

        def row(mode: SequenceMode) -> torch.Tensor:
            layer = layer_of(RowParallelLinear, weight.chunk(tp, 1)[mode.base.rank], bias)
            run_row(layer, BaseLinear(layer, "row", store, mode.base), mode, has_heads=False)
            product, added_later = layer.forward(x.chunk(tp, 1)[mode.base.shard])
            assert added_later is None
            return product

        def column(mode: SequenceMode) -> torch.Tensor:
            layer = layer_of(ColumnParallelLinear, weight.chunk(tp)[mode.base.rank], bias.chunk(tp)[mode.base.rank])
            return BaseLinear(layer, "column", store, mode.base)(x)

        for got in on_ranks(ranks, tp, 3, row):
            assert torch.equal(got, x @ weight.T + bias)
        assert torch.equal(torch.cat(on_ranks(ranks, tp, 3, column), 1), x @ weight.T + bias)


def test_own_groups_are_captured_with_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[str] = []

    class Captured:
        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def graph_capture(self, context: str) -> Iterator[str]:
            assert context == "stream" and "stock" in within
            within.append(self.name)
            yield context
            within.remove(self.name)

    @contextmanager
    def stock(stream: str) -> Iterator[str]:
        within.append("stock")
        yield stream
        assert within == ["stock"], "own groups have left before"
        within.remove("stock")

    monkeypatch.setattr(groups, "_own", [Captured("tokens"), Captured("sums")])
    with CaptureOwnGroups.hook(stock, stream="stream") as context:
        assert context == "stream" and within == ["stock", "tokens", "sums"]
    assert within == []
