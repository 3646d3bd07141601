"""The Triton KV copy against its PyTorch reference, in Triton's interpreter, and the accesses it compiles
to."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sgl_kernel_ext import kv_copy_reference
from sgl_kernel_ext.kv_copy_reference import copy_units_reference, pack_records


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A second copy of the kernel's module, decorated while Triton's interpreter is on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = Path(kv_copy_reference.__file__).with_name("kv_copy.py")
    spec = importlib.util.spec_from_file_location("kv_copy_interpreted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def random_records(
    rng: np.random.Generator, units: int, unit_tokens: int, row_quanta: int, places: int, slots: int
) -> tuple[np.ndarray, int]:
    """Records of units at random places that do not overlap, and the quanta of a plane.

    A place holds `unit_tokens` rows at the widest stride. Sources have one row width more between rows.
    """
    place_quanta = unit_tokens * row_quanta * 3
    records = pack_records(
        rng.permutation(places)[:units] * place_quanta + row_quanta,
        rng.permutation(places)[:units] * place_quanta,
        rng.integers(1, unit_tokens + 1, units),
        rng.integers(0, slots, units),
        np.full(units, 2 * row_quanta),
        rng.choice([row_quanta, 2 * row_quanta, 3 * row_quanta], units),
    )
    return records, places * place_quanta


@pytest.mark.parametrize(
    ("unit_tokens", "row_quanta"), [(16, 4), (16, 64), (12, 5), (1, 1), (200, 8), (3, 96), (48, 10)]
)
def test_interpreted_kernel_equals_the_reference(interpreted: ModuleType, unit_tokens: int, row_quanta: int) -> None:
    rng = np.random.default_rng(unit_tokens * 1000 + row_quanta)
    planes, slots = 3, 2
    records, plane_quanta = random_records(rng, 5, unit_tokens, row_quanta, places=7, slots=slots)
    generator = torch.Generator().manual_seed(1)
    shape = (planes, plane_quanta * 2)
    source, *expected = (torch.randint(-(2**62), 2**62, shape, generator=generator) for _ in range(slots + 1))
    got = [dest.clone() for dest in expected]
    before = [dest.clone() for dest in expected]
    packed = torch.from_numpy(records)
    copy_units_reference(source, expected, packed, planes=2, first_plane=1, source_planes=planes, row_quanta=row_quanta)
    interpreted.copy_units(
        source,
        torch.tensor([dest.data_ptr() for dest in got]),
        packed,
        planes=2,
        first_plane=1,
        source_plane_bytes=plane_quanta * 16,
        dest_plane_bytes=plane_quanta * 16,
        unit_tokens=unit_tokens,
        row_quanta=row_quanta,
        programs=3,
    )
    changed = 0
    for mine, theirs, old in zip(got, expected, before, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine[0], old[0]), "a plane outside the range was written"
        changed += int((mine != old).sum())
    assert changed == 2 * int((records[:, 2] >> 16).sum()) * row_quanta * 2


def test_reference_moves_the_rows_that_the_records_name() -> None:
    """Checked against loops, so that the reference is not its own witness."""
    rng = np.random.default_rng(3)
    records, plane_quanta = random_records(rng, 4, unit_tokens=3, row_quanta=2, places=5, slots=2)
    source = torch.arange(2 * plane_quanta * 2).view(2, plane_quanta, 2)
    dests = [torch.zeros_like(source) for _ in range(2)]
    expected = [dest.clone() for dest in dests]
    for source_at, dest_at, rows_slot, strides in records.tolist():
        for row in range(rows_slot >> 16):
            read, write = source_at + row * (strides >> 16), dest_at + row * (strides & 0xFFFF)
            for quantum in range(2):
                expected[rows_slot & 0xFFFF][:, write + quantum] = source[:, read + quantum]
    copy_units_reference(source, dests, torch.from_numpy(records), planes=2, row_quanta=2)
    assert all(torch.equal(dest, want) for dest, want in zip(dests, expected, strict=True))


def test_uneven_offsets_and_overlong_units_are_refused() -> None:
    one = np.ones(1, dtype=np.int64)
    region = torch.zeros(2, 64, dtype=torch.int64)
    records = torch.from_numpy(pack_records(one * 3, one * 2, one, one * 0, one * 2, one * 2))
    with pytest.raises(ValueError, match="not a multiple of its row of 2 quanta"):
        copy_units_reference(region, [region.clone()], records, planes=2, row_quanta=2)
    with pytest.raises(ValueError, match="not 3 planes"):
        copy_units_reference(region, [region.clone()], records, planes=3, row_quanta=1)
    with pytest.raises(ValueError, match="rows of a unit is 40000"):
        pack_records(one, one, one * 40000, one, one, one)
    with pytest.raises(ValueError, match="destination stride is -1"):
        pack_records(one, one, one, one, one, -one)


@pytest.mark.parametrize(("rows", "cols", "row_words"), [(16, 128, 128), (16, 32, 32), (16, 32, 20)])
def test_the_compiled_kernel_uses_16_byte_accesses_only(
    rows: int, cols: int, row_words: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled for an H100 without one: every access to KV is a pair of 8-byte words."""
    import triton
    from sgl_kernel_ext.kv_copy import _copy_units_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    integers = ("units", "tasks", "first_plane", "source_plane", "dest_plane")
    signature: dict[str, str] = {"source": "*i64", "addresses": "*i64", "records": "*i32"}
    signature |= dict.fromkeys(integers, "i32")
    constants: dict[str, Any] = {"CHUNKS": 1, "ROWS": rows, "COLS": cols, "ROW_WORDS": row_words}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    source = ASTSource(_copy_units_kernel, signature, constants, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    loads = re.findall(r"ld\.global[.\w]*", ptx)
    stores = set(re.findall(r"st\.global[.\w]*", ptx))
    assert stores == {"st.global.v2.b64"}
    assert loads.count("ld.global.v2.b64") == rows * cols * 8 // (16 * 32 * 4)
    assert loads.count("ld.global.b32") == 4, "the record"
    assert loads.count("ld.global.b64") == 1, "the destination's address"
