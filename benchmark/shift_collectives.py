"""Bandwidth of collectives between the ranks of an engine: an all-to-all, as in sequence-parallel batches, and a sum.

Used by `bench_shift.py`. NCCL on GPUs, gloo without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from server import free_port

_WARM_UP = 3


def measure_collectives(ranks: int, sizes: Sequence[int], repeats: int = 20) -> list[dict[str, Any]]:
    """Both collectives at each size.

    Args:
        ranks: processes, a GPU each if there are GPUs.
        sizes: bytes of the tensor that each rank puts in.
        repeats: of each; the median counts.

    Returns:
        A row each: `collective`, `bytes`, `ms`, and `bus_gb_per_s`, what each rank sends by the time, as NCCL's own
        tests reckon it: (ranks - 1) / ranks of the tensor, twice that for a sum.
    """
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = free_port()
    children = [
        context.Process(target=_rank, args=(rank, ranks, port, tuple(sizes), repeats, queue)) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    try:
        rows: list[dict[str, Any]] = queue.get(timeout=180)
    finally:
        for child in children:
            child.join(30)
            child.kill()
    return rows


def _rank(rank: int, ranks: int, port: int, sizes: tuple[int, ...], repeats: int, queue: Any) -> None:
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    rows = []
    for size in sizes:
        sent = torch.ones(size // 2 // ranks * ranks, dtype=torch.bfloat16, device=device)
        received = torch.empty_like(sent)
        for name, sends, run in (
            ("all_to_all", 1, lambda received=received, sent=sent: dist.all_to_all_single(received, sent)),
            ("all_reduce", 2, lambda sent=sent: dist.all_reduce(sent)),
        ):
            ms = _median_ms(run, repeats, has_gpus)
            sent_bytes = sends * sent.numel() * sent.element_size() * (ranks - 1) / ranks
            gb_per_s = sent_bytes / ms / 1e6
            rows.append({"collective": name, "bytes": size, "ms": round(ms, 4), "bus_gb_per_s": round(gb_per_s, 3)})
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _median_ms(run: Any, repeats: int, has_gpus: bool) -> float:
    times = []
    for number in range(_WARM_UP + repeats):
        began = time.perf_counter()
        run()
        if has_gpus:
            torch.cuda.synchronize()
        if number >= _WARM_UP:
            times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)
