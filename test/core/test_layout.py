"""Layouts: what is accepted, what is refused and how."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.core.layout import (
    EngineSpec,
    Layout,
    LayoutError,
    Role,
    candidate_engines,
    check_tp_sizes,
    default_tp_sizes,
    nesting,
    parse_layout,
    shard_on,
    uniform_layout,
)


def test_engine_names() -> None:
    assert EngineSpec(0, 1).name == "tp1@0"
    assert EngineSpec(2, 2).name == "tp2@2-3"


def test_candidates_are_every_aligned_group() -> None:
    names = [engine.name for engine in candidate_engines((1, 2, 4), 4)]
    assert names == ["tp1@0", "tp1@1", "tp1@2", "tp1@3", "tp2@0-1", "tp2@2-3", "tp4@0-3"]


def test_parse_orders_by_gpu() -> None:
    layout = parse_layout("tp2@2-3, tp1@1,tp1@0", (1, 2), 4)
    assert str(layout) == "tp1@0,tp1@1,tp2@2-3"


def test_roles_belong_to_the_layout() -> None:
    layout = parse_layout("tp1@3:decode, tp2@0-1:prefill,tp1@2:mixed", (1, 2), 4)
    assert str(layout) == "tp2@0-1:prefill,tp1@2,tp1@3:decode"
    assert parse_layout(str(layout), (1, 2), 4) == layout
    plain = parse_layout("tp2@0-1,tp1@2,tp1@3", (1, 2), 4)
    assert layout.engines == plain.engines
    assert layout != plain
    assert layout.role_of[EngineSpec(0, 2)] is Role.PREFILL
    assert set(plain.role_of.values()) == {Role.MIXED}
    assert parse_layout("tp2@0-1:mixed,tp1@2:mixed,tp1@3", (1, 2), 4) == plain


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp1@0,tp2@0-1", "both use GPU 0"),
        ("tp1@0,tp1@0,tp1@1", "both use GPU 0"),
        ("tp1@0", "no engine uses GPU 1, 2, 3"),
        ("tp2@1-2,tp1@0,tp1@3", "starts at a multiple of 2"),
        ("tp4@0-3", "4 is not among --adapt-tp-sizes 1, 2"),
        ("tp2@4-5", "GPU 5 does not exist"),
        ("tp2@0-2", "needs 2 GPUs"),
        ("", "is not an engine"),
        ("tp@0", "is not an engine"),
        ("tp1@0;tp1@1", "is not an engine"),
        ("tp1@0,", "is not an engine"),
        ("tp-1@0", "is not an engine"),
        ("tp2@0-1:,tp2@2-3", "is not an engine"),
        ("tp2@0-1:draft,tp2@2-3", "'draft' is no role; roles are mixed, prefill, decode"),
        ("tp2@0-1:prefill,tp2@2-3:prefill", "all engines only prefill"),
        ("tp2@0-1:decode,tp2@2-3:decode", "and there is none; give one the role prefill"),
        ("tp2@0-1:decode,tp2@2-3", "and there is none; give one the role prefill"),
        ("tp2@0-1:prefill,tp2@0-1:decode,tp2@2-3", "both use GPU 0"),
        ("tp2@1-0,tp2@2-3", "tp2@1-0: write the first GPU first, tp2@0-1"),
        ("prefill:tp2@0-1,tp2@2-3", "write the role behind it, tp2@0-1:prefill"),
        # Digits that only Python takes for such.
        ("tp２@0-1,tp2@2-3", "'tp２@0-1' is not an engine"),
        ("tp2@٠-1,tp2@2-3", "is not an engine"),
        ("tp1_0@0", "is not an engine"),
        ("tp2@0-1:décode,tp2@2-3", "is not an engine"),
        ("tp2@0-" + "9" * 5000, "is not an engine"),
    ],
)
def test_bad_layouts_say_why_and_show_a_good_one(text: str, reason: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text, (1, 2), 4)
    said = str(caught.value)
    assert reason in said
    with_roles = "with roles here is tp1@0:prefill,tp1@1:decode,tp1@2:decode,tp1@3:decode"
    example = with_roles if ":" in text else "here is tp1@0,tp1@1,tp1@2,tp1@3"
    assert f"a valid layout {example}" in said
    assert parse_layout(said.rpartition(" is ")[2], (1, 2), 4)
    assert len(said) < 600


def test_one_engine_has_nobody_to_share_roles_with() -> None:
    with pytest.raises(LayoutError, match=r"a valid layout here is tp2@0-1$"):
        parse_layout("tp2@0-1:prefill", (2,), 2)


@pytest.mark.parametrize(
    ("gpus", "heads", "kv_heads", "sizes"),
    [
        (8, 32, 8, (1, 2, 4, 8)),
        (4, 32, 2, (1, 2, 4)),
        (6, 12, 4, (1, 2)),
        (8, 14, 2, (1, 2)),
        (1, 8, 8, (1,)),
        (3, 9, 3, (1,)),
    ],
)
def test_default_sizes(gpus: int, heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    assert default_tp_sizes(gpus, heads, kv_heads) == sizes


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([], "is empty"),
        ([0], "not positive"),
        ([1, 1], "given twice"),
        ([3], "does not divide the 8 GPUs"),
        ([8], "does not divide the model's 12 attention heads"),
        ([2, 4], None),
    ],
)
def test_check_tp_sizes(sizes: list[int], reason: str | None) -> None:
    if reason is None:
        assert check_tp_sizes(sizes, 8, 12, 4) == tuple(sizes)
        return
    with pytest.raises(LayoutError, match=reason):
        check_tp_sizes(sizes, 8, 12, 4)


def test_sizes_must_nest() -> None:
    with pytest.raises(LayoutError, match="not a multiple of 2"):
        check_tp_sizes([2, 3], 6, 12, 12)


def test_kv_heads_that_neither_divide_nor_are_divided() -> None:
    with pytest.raises(LayoutError, match="6 KV heads"):
        check_tp_sizes([4], 4, 24, 6)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, Layout]:
    gpus = draw(st.sampled_from([1, 2, 4, 8]))
    engines = []
    gpu = 0
    while gpu < gpus:
        sizes = [tp for tp in (1, 2, 4, 8) if gpu % tp == 0 and gpu + tp <= gpus]
        tp = draw(st.sampled_from(sizes))
        engines.append(EngineSpec(gpu, tp))
        gpu += tp
    return gpus, Layout(tuple(engines))


@given(partitions(), st.randoms())
def test_every_aligned_partition_reads_back(case: tuple[int, Layout], rng: object) -> None:
    gpus, layout = case
    parts = str(layout).split(",")
    rng.shuffle(parts)  # type: ignore[attr-defined]
    assert parse_layout(",".join(parts), (1, 2, 4, 8), gpus) == layout


@given(st.text(alphabet="tp@-,0123 ", max_size=20))
def test_any_text_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = parse_layout(text, (1, 2), 2)
    except LayoutError:
        return
    assert sorted(gpu for engine in layout.engines for gpu in engine.gpus) == [0, 1]


def test_uniform() -> None:
    assert str(uniform_layout(2, 4)) == "tp2@0-1,tp2@2-3"


@pytest.mark.parametrize("tp_sizes", [(1, 2, 4, 8), (2, 4), (2, 8), (4, 8, 16), (2, 6), (3, 9)])
def test_what_a_gpu_has_of_the_model_nests(tp_sizes: tuple[int, ...]) -> None:
    smallest, gpus = tp_sizes[0], 2 * tp_sizes[-1]
    assert nesting(tp_sizes) == smallest
    for spec in candidate_engines(tp_sizes, gpus):
        assert sorted(spec.gpus) == list(range(spec.first_gpu, spec.first_gpu + spec.tp))
        for rank, gpu in enumerate(spec.gpus):
            assert shard_on(gpu, spec.tp) == rank
            for narrow in (tp for tp in tp_sizes if tp <= spec.tp):
                # Parts of the model as fractions of it.
                assert rank * narrow // spec.tp == shard_on(gpu, narrow)


def test_ranks_on_gpus_and_sizes_that_do_not_nest() -> None:
    assert EngineSpec(4, 4).gpus == (4, 6, 5, 7) and EngineSpec(2, 2).gpus == (2, 3) and EngineSpec(3, 1).gpus == (3,)
    assert nesting((3, 6)) == 1
