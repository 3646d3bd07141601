"""What the finished model is measured by, on a CPU in float32: held-out loss, and how clear its greedy choices are.

A greedy choice is a tie when the two largest logits differ by no more than the rounding of float32 sums, for then
another order of summation (another TP size) may pick the other token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

from demo_training.corpus import STREAMS, Corpus
from demo_training.trainer import held_out_losses
from demo_training.vocabulary import BOS_ID

NARROW_GAP = 1e-3


@dataclass(frozen=True)
class GapStatistics:
    """Gaps between the two largest logits over `positions` next-token choices, in float32.

    `rounding` is the largest change of such a gap when the same choice is computed in float64 instead, and
    `changed_choices` is how many choices that changes.
    """

    positions: int
    smallest: float
    median: float
    narrow_share: float
    rounding: float
    changed_choices: int


@dataclass(frozen=True)
class QualityReport:
    """Held-out losses (nats per token, by stream), and gaps on held-out text and on the model's own greedy text."""

    losses: dict[str, float]
    held_out_gaps: GapStatistics
    greedy_gaps: GapStatistics


def measure_quality(model: LlamaForCausalLM, corpus: Corpus, tokens_per_stream: int = 8192) -> QualityReport:
    """Measure a float32 model on the CPU; `tokens_per_stream` held-out tokens of each stream are read."""
    model = model.eval()
    texts = [
        torch.from_numpy(corpus.held_out[name][:tokens_per_stream].astype(np.int64)).view(-1, 512) for name in STREAMS
    ]
    prompts = torch.stack([row[:32] for text in texts for row in text])
    prompts[:, 0] = BOS_ID
    return QualityReport(
        losses=held_out_losses(model, corpus, torch.device("cpu")),
        held_out_gaps=gap_statistics(model, torch.cat(texts)),
        greedy_gaps=gap_statistics(model, greedy_text(model, prompts, 128), first=prompts.shape[1] - 1),
    )


@torch.no_grad()
def greedy_text(model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return `prompts` [rows, length] followed by `new_tokens` greedy tokens each; ends of text are passed over."""
    rows, past, inputs = prompts, None, prompts
    for _ in range(new_tokens):
        output = model(inputs, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, inputs = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        rows = torch.cat([rows, inputs], dim=1)
    return rows


@torch.no_grad()
def gap_statistics(model: LlamaForCausalLM, rows: torch.Tensor, first: int = 0) -> GapStatistics:
    """Return the gaps at positions `first` and later of `rows` [rows, length]."""
    single = _top_two(model, rows, first)
    double = _top_two(model.double(), rows, first)
    model.float()
    gaps = single.values[:, 0] - single.values[:, 1]
    exact_gaps = double.values[:, 0] - double.values[:, 1]
    same = single.indices[:, 0] == double.indices[:, 0]
    return GapStatistics(
        positions=gaps.numel(),
        smallest=gaps.min().item(),
        median=gaps.median().item(),
        narrow_share=(gaps < NARROW_GAP).double().mean().item(),
        rounding=(gaps - exact_gaps)[same].abs().max().item(),
        changed_choices=int((~same).sum().item()),
    )


def _top_two(model: LlamaForCausalLM, rows: torch.Tensor, first: int) -> torch.return_types.topk:
    parts = [model(part, use_cache=False).logits[:, first:].topk(2, dim=-1) for part in rows.split(16)]
    values = torch.cat([part.values.flatten(0, 1) for part in parts])
    indices = torch.cat([part.indices.flatten(0, 1) for part in parts])
    return torch.return_types.topk((values, indices))
