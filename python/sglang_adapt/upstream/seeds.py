"""Sampling with a seed that depends on the request alone: its seed, and the position of each token.

Stock reads `sampling_seed` in deterministic mode only, and its kernel for it needs Triton. Otherwise a seeded request
draws from the engine's one generator, as everything in its batch does, so its tokens depend on its neighbours and on
the engine it is on. Here the rows of a batch that have a seed are drawn again by a hash of seed, position and token;
all other rows are left as stock drew them. In deterministic mode nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_adapt.upstream.patch import Patch

_SEEDS = "adapt_seeds"
"""Attribute of SamplingBatchInfo: for each row its seed, or None. Batches that are not made from requests have none."""


class SeedsOfABatch(Patch):
    """Notes the seeds of a new batch's requests, in the place that stock leaves for such additions."""

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"
    kind = "replace"

    @staticmethod
    def hook(self: Any, batch: Any, vocab_size: int) -> None:
        setattr(self, _SEEDS, [req.sampling_params.sampling_seed for req in batch.reqs])


class SeedsOfAMergedBatch(Patch):
    """Keeps the seeds when two batches become one."""

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_merge_batch"
    kind = "replace"

    @staticmethod
    def hook(self: Any, other: Any) -> None:
        setattr(self, _SEEDS, [*getattr(self, _SEEDS), *getattr(other, _SEEDS)])


class SeedsOfAFilteredBatch(Patch):
    """Keeps the seeds of the requests that stay in a batch."""

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_filter_batch"
    kind = "replace"

    @staticmethod
    def hook(self: Any, keep_indices: list[int], keep_indices_device: Any) -> None:
        seeds = getattr(self, _SEEDS)
        setattr(self, _SEEDS, [seeds[index] for index in keep_indices])


class SeedsOfAForward(Patch):
    """Gives the seeds to the copy of the sampling parameters that a forward reads."""

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward"
    kind = "after"

    @staticmethod
    def hook(copy: Any, self: Any) -> None:
        setattr(copy, _SEEDS, getattr(self, _SEEDS))


class SeededRowsAreDrawnBySeed(Patch):
    """Draws the tokens of seeded rows again, by their seeds."""

    target = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
    kind = "around"

    @staticmethod
    def hook(
        original: Callable[..., torch.Tensor],
        self: Any,
        probs: torch.Tensor,
        sampling_info: Any,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> torch.Tensor:
        seeds = vars(sampling_info).get(_SEEDS, ())
        rows = [row for row, seed in enumerate(seeds) if seed is not None]
        if not rows or sampling_info.sampling_seed is not None:
            return original(self, probs, sampling_info, positions, simple_sampling_case)
        at = torch.tensor(rows, device=probs.device)
        drawn = draw(
            probs[at],
            torch.tensor([seeds[row] % 2**63 for row in rows], device=probs.device),
            positions[at],
            sampling_info.top_ks[at],
            sampling_info.top_ps[at],
            sampling_info.min_ps[at],
        )
        tokens = original(self, probs, sampling_info, positions, simple_sampling_case)
        tokens[at] = drawn.to(tokens.dtype)
        return tokens


SEED_PATCHES: tuple[type[Patch], ...] = (
    SeedsOfABatch,
    SeedsOfAMergedBatch,
    SeedsOfAFilteredBatch,
    SeedsOfAForward,
    SeededRowsAreDrawnBySeed,
)


def draw(
    probs: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """A token for each row, from what top-k, top-p and min-p leave of it, by the Gumbel-max trick.

    The filters are those of stock's `top_k_top_p_min_p_sampling_from_probs_torch`.

    Args:
        probs: `[rows, vocabulary]`, each row a distribution.
        seeds: int64 `[rows]`.
        positions: integers `[rows]`, of the token before the one to draw.
        top_ks, top_ps, min_ps: `[rows]`.

    Returns:
        int64 `[rows]`. A row's token depends on nothing but the row's arguments.
    """
    chances, tokens = probs.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(chances.shape[1], device=chances.device)
    keep = rank < top_ks[:, None]
    keep &= chances.cumsum(dim=-1) - chances <= top_ps[:, None]
    keep &= chances >= chances[:, :1] * min_ps[:, None]
    scores = torch.where(keep, chances, 0.0).log() + _gumbel(seeds[:, None], positions[:, None], tokens)
    return tokens.gather(1, scores.argmax(dim=-1, keepdim=True)).view(-1)


def _gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise by hash, float64; the arguments are broadcast."""
    bits = _mix(_mix(_mix(seeds) + positions) + tokens)
    uniform = ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
    return -torch.log(-torch.log(uniform))


def _mix(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64, whose products wrap around."""
    values = values.long() + _signed(0x9E3779B97F4A7C15)
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that fills with zeros; torch's on int64 fills with the sign."""
    return (values >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
