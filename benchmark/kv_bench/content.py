"""KV that can be told apart: every 8-byte word follows from its request, token, head, plane and place.

So each process checks its own GPU by computing what must be there, without the plan or the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import CopyBatch


@dataclass(frozen=True)
class Resident:
    """What one rank stores on this GPU.

    Attributes:
        tp, heads: the rank's engine's TP size and its heads of the model.
        slots: int64 `[tokens]`, places of its tokens in `[blocks * tokens_per_block]`.
        names: int64 `[tokens]`, a number for each token of each request.
    """

    tp: int
    heads: range
    slots: torch.Tensor
    names: torch.Tensor


def residents(
    geometry: PoolGeometry, batches: Iterable[CopyBatch], gpu: int, end: str, device: torch.device
) -> list[Resident]:
    """Who stores what on `gpu` at one end of the copy, "source" or "dest"."""
    found: list[Resident] = []
    number = 0
    for batch in batches:
        gpus = batch.source if end == "source" else batch.dest
        size = geometry.tokens_per_block(len(gpus))
        slots, names = [], []
        for request in batch.requests:
            number += 1
            if gpu in gpus:
                blocks = request.source_blocks if end == "source" else request.dest_blocks
                row = blocks[gpus.index(gpu)].astype(np.int64)
                slots.append((row[:, None] * size + np.arange(size)).ravel()[: request.end_token])
                names.append((number << 20) + np.arange(request.end_token))
        if slots:
            heads = geometry.head_range(len(gpus), gpus.index(gpu))
            found.append(Resident(len(gpus), heads, _to(slots, device), _to(names, device)))
    return found


def fill(region: torch.Tensor, geometry: PoolGeometry, held: Iterable[Resident]) -> None:
    """Zero the region and write what `held` says."""
    region.view(-1).view(torch.int64).zero_()
    for resident in held:
        view = _words(region, geometry, resident.tp)
        for plane in range(geometry.planes):
            view[plane].index_copy_(0, resident.slots, _values(geometry, resident, plane))


def count_wrong(region: torch.Tensor, geometry: PoolGeometry, held: Iterable[Resident]) -> int:
    """Words that differ from what `held` says, plus words beyond it that are not zero."""
    held = list(held)
    wrong = torch.zeros((), dtype=torch.int64, device=region.device)
    written = 0
    for resident in held:
        view = _words(region, geometry, resident.tp)
        for plane in range(geometry.planes):
            want = _values(geometry, resident, plane)
            wrong += (view[plane].index_select(0, resident.slots) != want).sum()
            written += want.numel()
    planes = region.view(-1).view(torch.int64).view(geometry.planes, -1)
    nonzero = sum(int(torch.count_nonzero(plane)) for plane in planes)
    return int(wrong) + abs(nonzero - written)


def _values(geometry: PoolGeometry, resident: Resident, plane: int) -> torch.Tensor:
    """int64 `[tokens, heads, words of a head]`, never zero."""
    device = resident.names.device
    heads = torch.arange(resident.heads.start, resident.heads.stop, device=device)
    words = torch.arange(geometry.head_bytes // 8, device=device)
    name = (resident.names[:, None] * 64 + heads) * 0x2545F4914F6CDD1D
    return (name[:, :, None] ^ (words * 0x1B873593 + plane * 0x9E3779B1)) | 1


def _words(region: torch.Tensor, geometry: PoolGeometry, tp: int) -> torch.Tensor:
    rows = geometry.blocks * geometry.tokens_per_block(tp)
    flat = region.view(-1).view(torch.int64)
    return flat.view(geometry.planes, rows, geometry.local_heads(tp), geometry.head_bytes // 8)


def _to(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
