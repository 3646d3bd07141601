"""The bytes of a block ledger: a header that says whose ledger it is, then one column per fact about a block.

The buffer is shared memory with one writer and any number of readers. A sequence number that is odd while the
writer changes something lets readers notice a torn read (a seqlock).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sglang_adapt.kv.geometry import PoolGeometry

MAGIC = b"sgadkvbl"
VERSION = 1

_GEOMETRY_FIELDS = tuple(PoolGeometry.__dataclass_fields__)
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u8"),
        ("run_id", "S32"),
        ("gpu", "<u8"),
        ("geometry", "<u8", (len(_GEOMETRY_FIELDS),)),
        ("writer_pid", "<u8"),
        ("epoch", "<u8"),
        ("sequence", "<u8"),
    ]
)
_COLUMNS = (("stamp", "<u8"), ("owner", "<u2"), ("copies", "<u2"), ("state", "u1"))
MAX_ENGINE = int(np.iinfo(np.uint16).max)


class LedgerError(RuntimeError):
    """A ledger that cannot be used or a change that it does not allow; the text names the GPU and the
    block."""


class ForeignLedgerError(LedgerError):
    """A buffer that holds no ledger, or one of another run, version, GPU or pool."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerMemory:
    """Views of a ledger's buffer.

    Attributes:
        header: structured array of one entry.
        state: uint8 `[blocks]`, a BlockState.
        owner: uint16 `[blocks]`, the engine's number; 0 where there is none.
        copies: uint16 `[blocks]`, copies in flight that read or write the block.
        stamp: uint64 `[blocks]`, the epoch of the block's last change.
    """

    header: npt.NDArray[Any]
    state: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.uint16]
    copies: npt.NDArray[np.uint16]
    stamp: npt.NDArray[np.uint64]

    def get(self, name: str) -> int:
        return int(self.header[name][0])

    def put(self, name: str, value: int) -> None:
        self.header[name][0] = value


def ledger_bytes(geometry: PoolGeometry) -> int:
    """Bytes of the buffer that a pool's ledger needs, on each GPU."""
    return _HEADER.itemsize + geometry.blocks * sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)


def format_ledger(
    buffer: Any, geometry: PoolGeometry, gpu: int, run_id: str, writer_pid: int, *, overwrite: bool
) -> LedgerMemory:
    """Lay out an empty ledger in a writable buffer (any object with the buffer protocol).

    Raises:
        ForeignLedgerError: the buffer holds a ledger already and `overwrite` is False.
        LedgerError: a buffer that is too small or read-only, or a run id that is not 1 to 32 ASCII
            characters.
    """
    memory = _views(buffer, geometry, gpu)
    if not memory.state.flags.writeable:
        raise LedgerError(f"the ledger of GPU {gpu} is in read-only memory; its writer needs to write")
    if not run_id.isascii() or not 1 <= len(run_id) <= 32:
        raise LedgerError(f"run id {run_id!r} must have 1 to 32 ASCII characters")
    if memory.header["magic"][0] == MAGIC and not overwrite:
        raise ForeignLedgerError(
            f"the buffer for GPU {gpu} holds the ledger of run {_text(memory, 'run_id')}, written by process "
            f"{memory.get('writer_pid')}; stop that run, or remove what it left and start again"
        )
    memory.header["magic"][0] = b""
    for column in (memory.stamp, memory.owner, memory.copies, memory.state):
        column[:] = 0
    memory.header["run_id"][0] = run_id.encode()
    memory.header["geometry"][0] = astuple(geometry)
    for name, value in (
        ("version", VERSION),
        ("gpu", gpu),
        ("writer_pid", writer_pid),
        ("epoch", 0),
        ("sequence", 0),
    ):
        memory.put(name, value)
    return memory


def publish(memory: LedgerMemory) -> None:
    """Make a formatted ledger one that readers accept."""
    memory.header["magic"][0] = MAGIC


def open_ledger(buffer: Any, geometry: PoolGeometry, gpu: int, run_id: str) -> LedgerMemory:
    """Read-only views of a ledger that someone else writes.

    Raises:
        ForeignLedgerError: no ledger, or one of another version, run, GPU or geometry; names both.
        LedgerError: a buffer that is too small.
    """
    memory = _views(memoryview(buffer).toreadonly(), geometry, gpu)
    if memory.header["magic"][0] != MAGIC:
        raise ForeignLedgerError(f"the buffer for GPU {gpu} holds no ledger; its writer has not started or ended")
    if memory.get("version") != VERSION:
        raise ForeignLedgerError(
            f"the ledger of GPU {gpu} has version {memory.get('version')}, this process reads version {VERSION}; "
            "run the same release everywhere"
        )
    if _text(memory, "run_id") != run_id:
        raise ForeignLedgerError(
            f"the ledger of GPU {gpu} is that of run {_text(memory, 'run_id')} (process "
            f"{memory.get('writer_pid')}), not of this run {run_id}; its blocks mean nothing here"
        )
    if memory.get("gpu") != gpu:
        raise ForeignLedgerError(f"the ledger is that of GPU {memory.get('gpu')}, not of GPU {gpu}")
    theirs = dict(zip(_GEOMETRY_FIELDS, memory.header["geometry"][0].tolist(), strict=True))
    for name, value in zip(_GEOMETRY_FIELDS, astuple(geometry), strict=True):
        if theirs[name] != value:
            raise ForeignLedgerError(f"the ledger of GPU {gpu} has {name} {theirs[name]}, this pool has {value}")
    return memory


def _views(buffer: Any, geometry: PoolGeometry, gpu: int) -> LedgerMemory:
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) < ledger_bytes(geometry):
        raise LedgerError(
            f"the ledger of GPU {gpu} needs {ledger_bytes(geometry)} bytes for {geometry.blocks} blocks, the "
            f"buffer has {len(raw)}"
        )
    columns: dict[str, Any] = {"header": raw[: _HEADER.itemsize].view(_HEADER)}
    at = _HEADER.itemsize
    for name, kind in _COLUMNS:
        end = at + geometry.blocks * np.dtype(kind).itemsize
        columns[name] = raw[at:end].view(kind)
        at = end
    return LedgerMemory(**columns)


def _text(memory: LedgerMemory, name: str) -> str:
    return cast(bytes, memory.header[name][0]).decode("ascii", "replace")
