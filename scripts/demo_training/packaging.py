"""Writing the finished model as the package ships it: bfloat16 weights, configuration, tokenizer and model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaForCausalLM

from demo_training.corpus import SourceRecord
from demo_training.network import demo_config
from demo_training.quality import NARROW_GAP, GapStatistics, QualityReport
from demo_training.vocabulary import BOS_ID, EOS_ID, PAD_ID

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class TrainingRecord:
    """How one run of `train` went; `command` repeats it."""

    command: str
    device: str
    steps: int
    tokens_per_step: int
    seconds: float
    train_loss: float


def save_training(model: LlamaForCausalLM, records: list[TrainingRecord], folder: Path) -> None:
    """Write float32 weights and the records of the runs that led to them into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")


def load_training(folder: Path) -> tuple[dict[str, torch.Tensor], list[TrainingRecord]]:
    """Read what `save_training` wrote: float32 weights by name, and the records.

    Raises:
        FileNotFoundError: nothing was trained into `folder`.
    """
    if not (folder / "training.json").is_file():
        raise FileNotFoundError(f"{folder} holds no trained weights; run the step `train` first.")
    records = [TrainingRecord(**record) for record in json.loads((folder / "training.json").read_text())]
    return load_file(folder / WEIGHTS), records


def rounded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights in bfloat16, as the package ships them."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def exact_model(weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """Return a float32 model with exactly the values of the bfloat16 `weights`."""
    model = LlamaForCausalLM(demo_config())
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


def write_package(
    weights: dict[str, torch.Tensor],
    tokenizer: Path,
    records: list[TrainingRecord],
    sources: list[SourceRecord],
    quality: QualityReport,
    folder: Path,
) -> None:
    """Write every file of the packaged model into `folder`, replacing what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    demo_config().save_pretrained(folder)
    GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True, temperature=0.7, top_p=0.9
    ).save_pretrained(folder)
    for file in sorted(tokenizer.iterdir()):
        shutil.copyfile(file, folder / file.name)
    parameters = sum(tensor.numel() for tensor in weights.values())
    (folder / "README.md").write_text(model_card(parameters, records, sources, quality), encoding="utf-8")


def model_card(
    parameters: int, records: list[TrainingRecord], sources: list[SourceRecord], quality: QualityReport
) -> str:
    """Return the model card as Markdown."""
    config = demo_config()
    source_rows = "\n".join(
        f"| {s.name} | {s.license} | {s.package} {s.version} | {s.characters / 1e6:.2f} M |" for s in sources
    )
    run_rows = "\n".join(
        f"| `{r.command}` | {r.steps} steps of {r.tokens_per_step} tokens, {r.seconds:.0f} s on {r.device} "
        f"| {r.train_loss:.3f} |"
        for r in records
    )
    loss_rows = "\n".join(f"| {name} | {loss:.3f} |" for name, loss in quality.losses.items())
    return f"""\
---
license: apache-2.0
language: en
---

# The demo model of sglang_adapt

A Llama of {parameters / 1e6:.2f} million parameters that lets the server be tried and tested on any machine, offline.
It writes English that looks like English and knows next to nothing: do not rely on anything it says.

| | |
| --- | --- |
| architecture | `LlamaForCausalLM`, {config.num_hidden_layers} layers, hidden {config.hidden_size}, \
intermediate {config.intermediate_size}, {config.num_attention_heads} heads and \
{config.num_key_value_heads} KV heads of {config.head_dim} |
| tensor parallelism | every width divides by 8: TP 1, 2, 4 and 8 |
| context | {config.max_position_embeddings} tokens, all positions trained |
| tokenizer | byte-level BPE, {config.vocab_size} tokens, chat template for system, user and assistant |
| weights | stored as bfloat16; `config.json` says float32, in which they are exact |

With `dtype` left at `auto` sglang runs a float32 checkpoint in float16; serve it with `--dtype float32` where greedy
output has to be the same for every TP size.

## Training text
| source | license | Debian package | characters |
| --- | --- | --- | --- |
{source_rows}

Besides these, small talk and a few facts written for this purpose (`scripts/demo_training/small_talk.py`). The
conversations are drawn from the same texts. WordNet entries about violence, sex, beliefs or origins were left out.

## Training
After `python scripts/train_demo_model.py prepare --work build/demo`:

| run | work | last training loss |
| --- | --- | --- |
{run_rows}

The same commands on other hardware give other digits.

## Measured in float32, from the rounded weights
| held-out text (every 25th chapter, section, word) | loss, nats per token |
| --- | --- |
{loss_rows}

| gap between the two largest logits | held-out text | its own greedy text |
| --- | --- | --- |
{_gap_rows(quality.held_out_gaps, quality.greedy_gaps)}

## Notice
WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. WordNet is provided "as is" and Princeton
University makes no representations or warranties, express or implied; its license is in the package named above.
"""


def _gap_rows(held_out: GapStatistics, greedy: GapStatistics) -> str:
    rows = (
        ("positions", "positions", ""),
        ("median", "median", ".3f"),
        ("smallest", "smallest", ".1e"),
        (f"share below {NARROW_GAP:g}", "narrow_share", ".4%"),
        ("largest rounding error (float32 against float64)", "rounding", ".1e"),
        ("choices that float64 changes", "changed_choices", ""),
    )
    return "\n".join(
        f"| {label} | {format(getattr(held_out, field), spec)} | {format(getattr(greedy, field), spec)} |"
        for label, field, spec in rows
    )
