"""A process that owns a GPU's region and sends its KV, until it is killed."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.staged_server import StagedServer
from sglang_adapt.memory import allocate


def send(geometry: PoolGeometry, content: bytes, buffer_bytes: int, address: str, pipe: Connection) -> None:
    """Say the handle and the process, and live until the pipe is closed."""
    region = allocate(geometry.region_bytes, "cpu")
    region.tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    server = StagedServer("GPU 0", geometry, region, allocate(2 * buffer_bytes, "cpu"), address)
    pipe.send((os.getpid(), server.handle))
    pipe.poll(None)
