"""What processes take of a GPU's memory beyond weights and KV, as measured: the packaged figures and the user's own.

The user's file is written by what a run observes (`router.observe`) and lies in the cache folder; the packaged one
comes with the project. Both are a JSON list of `Overhead`.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec

from sglang_adapt.core.files import replace_file

PACKAGED = Path(__file__).parent / "overheads.json"
VIRTUAL_GPU = "virtual GPU"
"""The name of the GPU under which figures of virtual GPUs are kept: bytes of the host's memory a rank."""


class OverheadsFileError(ValueError):
    """A file of overheads cannot be read; the text names it and says what to do."""


class OverheadKey(msgspec.Struct, frozen=True):
    """What an overhead depends on.

    Attributes:
        gpu: name of the GPU model, as NVML gives it.
        shape: class of model shapes, `<layers>x<hidden size>`; empty for a keeper.
        tp: TP size of the engine; None for a keeper.
        graph_batch: largest batch of which a CUDA graph is captured; 0 without graphs.
    """

    gpu: str
    shape: str
    tp: int | None
    graph_batch: int

    def __str__(self) -> str:
        if self.tp is None:
            return f"a keeper on {self.gpu}"
        return f"TP {self.tp} of {self.shape or 'any shape'} on {self.gpu}, graphs up to batch {self.graph_batch}"


class Overhead(msgspec.Struct, frozen=True):
    """A measured overhead.

    Attributes:
        key: of what.
        nbytes: on one GPU, beyond weights and KV: context, CUDA graphs, workspace, communication buffers.
        source: where the figure comes from, in words.
    """

    key: OverheadKey
    nbytes: int
    source: str


def default_overheads_file() -> Path:
    """Where a user's own figures are kept."""
    return Path.home() / ".cache" / "sglang_adapt" / "overheads.json"


def read_overheads(path: Path) -> tuple[Overhead, ...]:
    """The figures in a file; none if there is no such file.

    Raises:
        OverheadsFileError: it is there, but is not such a file.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    try:
        return tuple(msgspec.json.decode(data, type=list[Overhead]))
    except msgspec.DecodeError as error:
        raise OverheadsFileError(
            f"{path} is not a file of overheads ({error}); remove it, and it is measured anew"
        ) from None


def record_overhead(path: Path, overhead: Overhead) -> None:
    """Put a figure into a file, in place of an earlier one of the same key; safe beside other writers.

    Raises:
        OverheadsFileError: the file is there, but is not such a file.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = [other for other in read_overheads(path) if other.key != overhead.key]
        replace_file(path, msgspec.json.format(msgspec.json.encode([*kept, overhead]), indent=2))
