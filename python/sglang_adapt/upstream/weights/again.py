"""Reading a checkpoint again, to measure what one copy of the weights saves a switch.

Without one copy an engine of another TP size reads its shards anew. Here the bytes do come from the checkpoint, by
stock's own loader, and a rank's share of them does go to its device; only where it is put is thrown away, because the
store has the same bytes and other engines read them.
"""

from __future__ import annotations

from typing import Any

import torch


class NotReadError(RuntimeError):
    """There is no checkpoint to read again; the text says why."""


def read_again(server_args: Any, rank: int) -> int:
    """Read a share of every tensor of the checkpoint, and send it to this process's device.

    Args:
        server_args: stock's, of the rank's engine.
        rank: within the engine; it gets the rows of each matrix that are its `1 / tp_size`, and everything else whole.

    Returns:
        Bytes that were read and sent.

    Raises:
        NotReadError: the load format has no checkpoint that stock's default loader reads.
        Exception: whatever stock's loader raises.
    """
    # Whoever imports this to answer calls has not loaded sglang yet, and need not for it.
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    config = LoadConfig(
        load_format=server_args.load_format,
        download_dir=server_args.download_dir,
        model_loader_extra_config=server_args.model_loader_extra_config,
    )
    model_config = ModelConfig.from_server_args(server_args)
    loader = None if config.load_format == LoadFormat.DUMMY else get_model_loader(config, model_config)
    if not isinstance(loader, DefaultModelLoader):
        raise NotReadError(f"--load-format {server_args.load_format} has no checkpoint that can be read again")
    device = torch.device(server_args.device)
    place: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    sent = 0
    # Of a model it asks only for further checkpoints, which this one has not.
    for _, tensor in loader._get_all_weights(model_config, torch.nn.Module()):
        share = _share(tensor, rank, server_args.tp_size)
        key = (share.shape, share.dtype)
        if key not in place:
            # Tensors of one shape take the place of one another, so this needs room for one layer.
            place[key] = torch.empty(share.shape, dtype=share.dtype, device=device)
        place[key].copy_(share)
        sent += share.numel() * share.element_size()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return sent


def _share(tensor: torch.Tensor, rank: int, of: int) -> torch.Tensor:
    """The rows of a matrix that a rank has; all of what is no matrix, or cannot be cut so."""
    rows = tensor.shape[0] if tensor.dim() > 1 else 0
    return tensor.narrow(0, rank * (rows // of), rows // of) if rows and rows % of == 0 else tensor
