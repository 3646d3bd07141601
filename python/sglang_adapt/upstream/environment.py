"""Environment variables that stock sglang and torch read at import, and that have no other switch."""

from __future__ import annotations

STOCK_ENVIRONMENT = {
    # torch asks NVML instead of the CUDA runtime whether there are GPUs; asking the runtime would initialise CUDA,
    # and a process that has cannot be forked (documented at torch.cuda.is_available).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Stock sends pickles between its processes unless told otherwise; msgpack can be read in part (wire.py).
    "SGLANG_USE_PICKLE_IPC": "0",
}
"""Set in the first process, before anything is imported; every other process inherits them."""

LIBRARY_FOLDERS = {"CUDA_TILE_TEMP_DIR": "cuda_tile"}
"""Temporary folders that a library makes at its import, and removes at an exit as processes of the server have none: by
variable, the name in the run's folder, with which it goes."""
