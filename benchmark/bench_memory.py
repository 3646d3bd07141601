"""How fast a GPU reads shared memory: by its owner, and by another process that maps it through CUDA IPC.

    python benchmark/bench_memory.py --out results.json

Regions of several sizes, some no multiple of the GPU's large pages, are read by matrix products of one row, as a
decode step reads weights, and by a sum. Prints TB/s and the ratio mapped/owned. The rows "as asked" bypass the rounding
of `memory.cuda.allocation_bytes` and show what it is for.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

from server import environment, write_json
from sglang_adapt.memory import allocate, attach, cuda

ROWS, COLUMNS = 28672, 4096
"""Of the matrices: gate and up of Llama-3.1-8B, 235 MB in bfloat16."""
REPEATS = 3
LIKE_WEIGHTS = 16_060_522_496 + 3 * COLUMNS


@dataclass(frozen=True)
class Speed:
    """TB/s (1e12 bytes a second) of matrix products and of a sum over the whole region."""

    product: float
    sum: float


def read_speed(buffer: torch.Tensor) -> Speed:
    """The best of some repeats over a region, uint8 `[nbytes]`, larger than the GPU's cache."""
    each = ROWS * COLUMNS * 2
    matrices = [
        buffer[start : start + each].view(torch.bfloat16).view(ROWS, COLUMNS)
        for start in range(0, len(buffer) - each + 1, each)
    ]
    x = torch.ones(1, COLUMNS, device=buffer.device, dtype=torch.bfloat16)
    words = buffer[: len(buffer) // 8 * 8].view(torch.int64)

    def products() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(x, matrix)

    return Speed(
        len(matrices) * each / _best_ms(products) / 1e9,
        len(words) * 8 / _best_ms(words.sum) / 1e9,
    )


def _best_ms(work: object) -> float:
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:])


def mapped(pipe: Connection) -> None:
    """A process that maps the regions it is told of and keeps them, as an engine does."""
    kept = []
    while (handle := pipe.recv()) is not None:
        kept.append(attach(handle, "read"))
        pipe.send(read_speed(kept[-1].tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[LIKE_WEIGHTS, 20 << 30, 3_000_000_000])
    parser.add_argument("--out", type=Path, default=Path("benchmark/results/bench_memory.json"))
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    print(f"{'region':>36} {'owner':>14} {'mapped':>14} {'ratio':>7}")
    for as_asked in (False, True):
        ours, theirs = context.Pipe()
        process = context.Process(target=mapped, args=(theirs,))
        process.start()
        rounding = (lambda nbytes: nbytes) if as_asked else cuda.allocation_bytes
        for nbytes in options.sizes:
            with mock.patch.object(cuda, "allocation_bytes", rounding):
                region = allocate(nbytes, "cuda:0")
            region.tensor[: nbytes // 2 * 2].view(torch.bfloat16).fill_(0.5)
            own = read_speed(region.tensor)
            ours.send(region.handle)
            theirs_speed: Speed = ours.recv()
            name = f"{nbytes} bytes, {'as asked' if as_asked else 'rounded'}"
            ratio = theirs_speed.product / own.product
            for kind in ("product", "sum"):
                a, b = getattr(own, kind), getattr(theirs_speed, kind)
                print(f"{name:>36} {a:9.2f} TB/s {b:9.2f} TB/s {b / a:7.3f}  {kind}", flush=True)
            row = {"bytes": nbytes, "rounded": not as_asked, "owner": asdict(own), "mapped": asdict(theirs_speed)}
            rows.append({**row, "product_ratio": ratio})
        ours.send(None)
        process.join()
    write_json(options.out, {**environment(), "rows": rows})


if __name__ == "__main__":
    main()
