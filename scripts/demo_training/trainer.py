"""The training loop: next-token prediction on the mixed streams, on a GPU or a CPU.

Most steps see short windows, a share of which begin where a document begins, as prompts do; every `long_every`-th
sees windows of the full context length, so that positions up to the last are trained.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from demo_training.corpus import STREAMS, Corpus
from demo_training.network import MAX_LENGTH, demo_config
from demo_training.vocabulary import BOS_ID, SPECIAL_TOKENS, VOCAB_SIZE

MEASURED_WINDOW = 1024
FIRST_TEXT_ID = len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class TrainingPlan:
    """How to train. The rate falls to zero at `steps`, or at `max_seconds` if the clock is faster.

    `window` is the length of the short windows in tokens, `aligned_share` the share of windows that begin where a
    document begins, `copying_share` the share that holds random tokens in a loop instead of text, from which a model
    learns to copy (induction heads; Olsson et al. 2022); `mixture` is the share of the windows that each of `STREAMS`
    gives; `bfloat16` computes under autocast, with float32 weights.
    """

    steps: int
    max_seconds: float
    tokens_per_step: int
    window: int
    long_every: int
    aligned_share: float
    copying_share: float
    peak_rate: float
    weight_decay: float
    mixture: tuple[float, ...]
    seed: int
    bfloat16: bool
    warmup_share: float = 0.02
    report_every: int = 200


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and how it got there; `held_out_losses` are in nats per token, by stream."""

    model: LlamaForCausalLM
    steps: int
    seconds: float
    train_loss: float
    held_out_losses: dict[str, float]


class WindowSampler:
    """Draws batches of windows at random places of the streams, on the training device."""

    def __init__(self, streams: dict[str, np.ndarray], plan: TrainingPlan, device: torch.device) -> None:
        self._streams = [torch.from_numpy(streams[name].astype(np.int16)).to(device) for name in STREAMS]
        self._beginnings = [np.flatnonzero(streams[name] == BOS_ID) for name in STREAMS]
        self._random = np.random.default_rng(plan.seed)
        self._mixture = np.asarray(plan.mixture) / sum(plan.mixture)
        self._tokens = plan.tokens_per_step
        self._aligned_share = plan.aligned_share
        self._copying_share = plan.copying_share

    def batch(self, length: int) -> torch.Tensor:
        """Return windows as int64 [windows, length + 1]; at least one window."""
        count = max(1, self._tokens // length)
        windows = []
        for stream in self._random.choice(len(self._streams), size=count, p=self._mixture):
            if self._copying_share and self._random.random() < self._copying_share:
                windows.append(self._loop(length + 1))
                continue
            tokens = self._streams[stream]
            usable = min(length + 1, len(tokens))
            start = int(self._random.integers(0, len(tokens) - usable + 1))
            if self._aligned_share and self._random.random() < self._aligned_share:
                start = min(int(self._random.choice(self._beginnings[stream])), len(tokens) - usable)
            window = tokens[start : start + usable]
            windows.append(window.repeat(math.ceil((length + 1) / usable))[: length + 1])
        return torch.stack(windows).long()

    def _loop(self, length: int) -> torch.Tensor:
        period = int(self._random.integers(4, max(5, length // 3)))
        tokens = self._random.integers(FIRST_TEXT_ID, VOCAB_SIZE, size=period).astype(np.int16)
        return torch.from_numpy(np.resize(tokens, length)).to(self._streams[0].device)


def train(
    corpus: Corpus, plan: TrainingPlan, device: torch.device, start: dict[str, torch.Tensor] | None = None
) -> TrainingResult:
    """Train a fresh model, or one with the weights `start`; prints a line every `plan.report_every` steps."""
    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(demo_config())
    if start is not None:
        model.load_state_dict(start)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(_parameter_groups(model, plan), lr=plan.peak_rate, betas=(0.9, 0.95), eps=1e-8)
    sampler = WindowSampler(corpus.train, plan, device)
    began = time.monotonic()
    step, loss = 0, torch.zeros(())
    while (progress := max(step / plan.steps, (time.monotonic() - began) / plan.max_seconds)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = plan.peak_rate * _rate_share(progress, plan.warmup_share)
        length = MAX_LENGTH if step % plan.long_every == plan.long_every - 1 else plan.window
        tokens = sampler.batch(min(length, plan.tokens_per_step))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=plan.bfloat16):
            loss = _token_losses(model, tokens).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % plan.report_every == 0:
            report = held_out_losses(model, corpus, device)
            losses = " ".join(f"{name} {value:.4f}" for name, value in report.items())
            elapsed = time.monotonic() - began
            print(f"step {step} at {elapsed:.1f} s: train {loss.item():.4f}, held out {losses}", flush=True)
    elapsed = time.monotonic() - began
    return TrainingResult(model, step, elapsed, loss.item(), held_out_losses(model, corpus, device))


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, corpus: Corpus, device: torch.device, length: int = MEASURED_WINDOW, windows: int = 16
) -> dict[str, float]:
    """Return the mean loss by stream, nats per token, over the first `windows` windows of the held-out text."""
    losses = {}
    for name in STREAMS:
        tokens = torch.from_numpy(corpus.held_out[name].astype(np.int64))
        count = min(windows, max(1, len(tokens) // length))
        rows = tokens[: count * length].view(count, -1).to(device)
        losses[name] = _token_losses(model, rows).mean().item()
    return losses


def _token_losses(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1], use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def _rate_share(progress: float, warmup_share: float) -> float:
    if progress < warmup_share:
        return max(progress, 1e-3) / warmup_share
    return 0.5 * (1.0 + math.cos(math.pi * (progress - warmup_share) / (1.0 - warmup_share)))


def _parameter_groups(model: LlamaForCausalLM, plan: TrainingPlan) -> list[dict[str, object]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
