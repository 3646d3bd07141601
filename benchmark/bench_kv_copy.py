"""Copies of KV between TP sizes: time and GB/s over the link, beside plain copies, on all GPUs of a machine.

    python benchmark/bench_kv_copy.py --out result.json            # all GPUs of this machine (2 or 4)
    python benchmark/bench_kv_copy.py --device cpu --out x.json    # tiny sizes on a CPU, to try it out

One process a GPU owns that GPU's KV region and maps the others' by CUDA IPC, as keepers and engines do. Every
copy is checked word by word against what must be there. Llama-3.1-8B shapes, bf16, blocks scattered at random.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from kv_bench.cases import Scale, full_scale, tiny_scale
from kv_bench.report import Measured, as_json, limits, rows, table
from kv_bench.worker import SECTIONS, Links, work


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every section ran on every GPU and every copy was exact."""
    options = _options(argv)
    cuda = options.device == "cuda"
    gpus = options.gpus or (torch.cuda.device_count() if cuda else 2)
    if gpus not in (2, 4):
        print(f"{gpus} GPUs: this benchmark runs on 2 or 4; choose with --gpus", file=sys.stderr)
        return 2
    scale = full_scale(gpus) if cuda else tiny_scale(gpus)
    begin = time.monotonic()
    measured, complete = _run(scale, options.device, begin + options.time_limit_s)
    found = rows(measured)
    print(f"limits, GB/s: {limits(measured)}")
    print(table(found))
    errors = [item for item in measured if item.section == "error"]
    for item in errors:
        print(f"GPU {item.gpu}, section {item.key} failed:\n{item.values['text']}")
    wrong = [row for row in found if row.wrong]
    print(
        f"{len(found)} rows in {time.monotonic() - begin:.0f} s; "
        f"{'all sections ran' if complete and not errors else 'NOT all sections ran'}; "
        f"{'every checked copy was exact' if not wrong else f'{len(wrong)} copies were WRONG'}"
    )
    if options.out is not None:
        options.out.write_text(json.dumps(_document(scale, options.device, measured), indent=1) + "\n")
    return 0 if complete and not errors and not wrong and found else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--gpus", type=int, help="2 or 4; default: all of the machine, or 2 on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--time-limit-s", type=float, default=230, help="seconds; then what there is is reported")
    return parser.parse_args(argv)


def _run(scale: Scale, device: str, deadline: float) -> tuple[list[Measured], bool]:
    """Run the processes; what they reported until they were done or the time was up, and whether all were
    done."""
    context = multiprocessing.get_context("spawn")
    barriers: dict[str, Any] = {name: context.Barrier(scale.gpus) for name in ("start", *SECTIONS)}
    channels = [context.Pipe() for _ in range(scale.gpus)]
    pipes, processes = [], []
    for gpu in range(scale.gpus):
        near, far = context.Pipe()
        links = Links(far, barriers, channels[gpu][0], channels[(gpu + 1) % scale.gpus][1])
        process = context.Process(target=work, args=(gpu, scale, device, links), daemon=True)
        process.start()
        far.close()
        pipes.append(near)
        processes.append(process)
    try:
        return _collect(scale, pipes, deadline)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _collect(scale: Scale, pipes: list[Connection], deadline: float) -> tuple[list[Measured], bool]:
    handles: dict[int, Any] = {}
    measured: list[Measured] = []
    done, open_pipes = 0, list(pipes)
    while done < scale.gpus and open_pipes:
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            print("the time limit is reached", file=sys.stderr)
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                gpu, section, key, values = pipe.recv()
            except EOFError:
                print("a process ended early; its own output says why", file=sys.stderr)
                open_pipes.remove(pipe)
                continue
            if section == "handles":
                handles[gpu] = values
                if len(handles) == scale.gpus:
                    for other in pipes:
                        other.send(handles)
            elif section == "done":
                done += 1
            else:
                measured.append(Measured(gpu, section, key, values))
                if section == "copy" and gpu == 0:
                    print(f"{key.direction} page {key.page_tokens} {key.bytes_per_gpu / 1e9} GB", flush=True)
        if len(open_pipes) < scale.gpus:
            break
    for pipe in open_pipes:
        pipe.send(None)
    return measured, done == scale.gpus


def _document(scale: Scale, device: str, measured: list[Measured]) -> dict[str, Any]:
    starts = [item.values for item in measured if item.section == "start"]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": sorted({values["card"] for values in starts}),
        "gpus": scale.gpus,
        "driver": _driver_version() if device == "cuda" else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton_version(),
        },
        "shapes": {
            "layers": scale.layers,
            "kv_heads": scale.kv_heads,
            "head_dim": scale.head_dim,
            "bytes_per_element": 2,
        },
        "map_ms": [values["map_ms"] for values in starts],
        "limits_gbps": limits(measured),
        "rows": as_json(rows(measured)),
        "errors": [
            {"gpu": item.gpu, "section": item.key, "text": item.values["text"]}
            for item in measured
            if item.section == "error"
        ],
    }


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
