"""Which measured overhead is reckoned with, and the files they are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from sglang_adapt.core.overheads import (
    PACKAGED,
    VIRTUAL_GPU,
    Overhead,
    OverheadKey,
    OverheadsFileError,
    read_overheads,
    record_overhead,
)
from sglang_adapt.policy.overheads import estimate_overhead

H100 = "NVIDIA H100 80GB HBM3"


def of(nbytes: int, gpu: str = "A", shape: str = "32x4096", tp: int | None = 1, graphs: int = 128) -> Overhead:
    return Overhead(OverheadKey(gpu, shape, tp, graphs), nbytes, "test")


@dataclass(frozen=True)
class Case:
    wanted: Overhead
    nbytes: int
    exact: bool


TABLE = (
    of(10),
    of(20, graphs=256),
    of(15, graphs=64),
    of(40, tp=2),
    of(70, shape="80x8192"),
    of(5, tp=None, shape="", graphs=0),
    of(500, gpu="B", tp=8),
    of(300, gpu="B", tp=2),
    of(9999, gpu=VIRTUAL_GPU),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(of(0), 10, True),
        # Other graphs: the most of the same GPU, TP size and shape.
        Case(of(0, graphs=512), 20, False),
        Case(of(0, shape="48x5120"), 70, False),
        Case(of(0, tp=4), 70, False),
        Case(of(0, gpu="C", tp=2), 300, False),
        Case(of(0, gpu="C", tp=16), 500, False),
        Case(of(0, gpu="C", tp=None, shape="", graphs=0), 5, False),
        Case(of(0, gpu=VIRTUAL_GPU, tp=4), 9999, False),
    ],
    ids=str,
)
def test_the_nearest_that_was_measured_counts(case: Case) -> None:
    estimate = estimate_overhead(TABLE, case.wanted.key)
    assert (estimate.nbytes, estimate.exact) == (case.nbytes, case.exact)


def test_a_later_figure_counts() -> None:
    assert estimate_overhead([*TABLE, of(11)], of(0).key).nbytes == 11
    assert estimate_overhead([of(11), *TABLE], of(0).key).nbytes == 10


def test_nothing_of_the_kind_is_an_error() -> None:
    with pytest.raises(LookupError, match="a keeper on A"):
        estimate_overhead([of(10)], of(0, tp=None).key)


def test_packaged_figures_have_engines_and_keepers_of_both_kinds_of_gpus() -> None:
    table = read_overheads(PACKAGED)
    # As measured on H100, see docs/log.md.
    assert estimate_overhead(table, OverheadKey(H100, "32x4096", 1, 128)).nbytes == 2 * 10**9
    assert estimate_overhead(table, OverheadKey(H100, "32x4096", 2, 128)).nbytes == 4 * 10**9
    assert estimate_overhead(table, OverheadKey(H100, "", None, 0)).nbytes == 5 * 10**8
    for gpu in ("some new GPU", VIRTUAL_GPU):
        for tp in (None, 1, 8):
            estimate = estimate_overhead(table, OverheadKey(gpu, "1x1", tp, 0))
            assert estimate.nbytes > 0 and not estimate.exact


def test_a_recorded_figure_replaces_that_of_its_key_only(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "overheads.json"
    assert read_overheads(file) == ()
    for overhead in (of(1), of(2, tp=2), of(3)):
        record_overhead(file, overhead)
    assert read_overheads(file) == (of(2, tp=2), of(3))
    assert {path.name for path in file.parent.iterdir()} == {"overheads.json", "overheads.lock"}


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "overheads.json"
    context = get_context("fork")
    writers = [context.Process(target=record_overhead, args=(file, of(tp, tp=tp))) for tp in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {overhead.key.tp for overhead in read_overheads(file)} == set(range(1, 9))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "overheads.json"
    file.write_text('[{"key": 1}]')
    with pytest.raises(OverheadsFileError, match=r"overheads\.json is not a file of overheads .* remove it"):
        read_overheads(file)
    with pytest.raises(OverheadsFileError):
        record_overhead(file, of(1))
    assert file.read_text() == '[{"key": 1}]'
