"""Make the demo model that the package ships in `python/sglang_adapt/demo/model/`.

    python scripts/train_demo_model.py --work build/demo            # all steps
    python scripts/train_demo_model.py prepare --work build/demo    # texts and tokenizer; needs Debian's apt
    python scripts/train_demo_model.py train --work build/demo      # on a GPU where there is one, else on the CPU
    python scripts/train_demo_model.py package --work build/demo    # measures, then writes the package's files

The shipped model took four runs of `train`, each from where the last one ended; the model card has their commands:
one on a GPU, two short ones on looped random tokens, without which it memorised the novels and never learned to copy
a word from its prompt, and one on text again.

Everything is seeded; on the same hardware a run with the same `--steps` gives the same model up to the order of the
GPU's sums. With `--max-seconds` the clock may end the run earlier; the model card names the steps it had.

Texts and their licenses (fetched as Debian packages, never installed):
    Jane Austen's six novels (r-cran-janeaustenr)                               public domain
    The Rust book, the Rustonomicon and the edition guide (rust-doc)            MIT or Apache-2.0
    The Python tutorial, HOWTOs, FAQ and What's New (python3.11-doc)            PSF-2.0
    The SQLite documentation (sqlite3-doc)                                      public domain
    The Apache HTTP Server documentation (apache2-doc)                          Apache-2.0
    WordNet 3.0's definitions and example sentences (wordnet-base)              WordNet-3.0 (permissive)
    Small talk and plain facts (demo_training/small_talk.py)                    Apache-2.0, written for this
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from demo_training.corpus import load_corpus, load_sources, prepare_corpus
from demo_training.network import MAX_LENGTH
from demo_training.packaging import (
    TrainingRecord,
    exact_model,
    load_training,
    rounded,
    save_training,
    write_package,
)
from demo_training.quality import measure_quality
from demo_training.trainer import TrainingPlan, train

STEPS = ("prepare", "train", "package")
MODEL_FOLDER = Path(__file__).resolve().parents[1] / "python" / "sglang_adapt" / "demo" / "model"


def main() -> None:
    options = _parse()
    steps = STEPS if options.step == "all" else (options.step,)
    if "prepare" in steps:
        prepare_corpus(options.work, MAX_LENGTH, options.conversations, options.seed)
    if "train" in steps:
        _train(options)
    if "package" in steps:
        _package(options)


def _train(options: argparse.Namespace) -> None:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = TrainingPlan(
        steps=options.steps,
        max_seconds=options.max_seconds,
        tokens_per_step=options.tokens_per_step,
        window=options.window,
        long_every=options.long_every,
        aligned_share=options.aligned_share,
        copying_share=options.copying_share,
        peak_rate=options.peak_rate,
        weight_decay=options.weight_decay,
        mixture=tuple(options.mixture),
        seed=options.seed,
        bfloat16=options.precision == "bfloat16",
    )
    start, earlier = load_training(options.start_from) if options.start_from else (None, [])
    result = train(load_corpus(options.work), plan, device, start)
    target = options.trained or options.work / "trained"
    record = TrainingRecord(
        command=_command(plan, result.steps, options.start_from, target),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU core",
        steps=result.steps,
        tokens_per_step=plan.tokens_per_step,
        seconds=result.seconds,
        train_loss=result.train_loss,
    )
    save_training(result.model, [*earlier, record], target)
    print(f"{result.steps} steps in {result.seconds:.0f} s; held-out losses {result.held_out_losses}")


def _command(plan: TrainingPlan, steps: int, start: Path | None, target: Path) -> str:
    flags = {
        "work": "build/demo",
        "start-from": start and f"build/demo/{start.name}",
        "trained": f"build/demo/{target.name}",
        "steps": steps,
        "tokens-per-step": plan.tokens_per_step,
        "window": plan.window,
        "long-every": plan.long_every,
        "aligned-share": plan.aligned_share,
        "copying-share": plan.copying_share,
        "peak-rate": plan.peak_rate,
        "weight-decay": plan.weight_decay,
        "seed": plan.seed,
        "precision": "bfloat16" if plan.bfloat16 else "float32",
        "mixture": " ".join(format(share, "g") for share in plan.mixture),
    }
    given = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
    return f"python scripts/train_demo_model.py train {given}"


def _package(options: argparse.Namespace) -> None:
    exact, records = load_training(options.trained or options.work / "trained")
    weights = rounded(exact)
    quality = measure_quality(exact_model(weights), load_corpus(options.work))
    print(quality)
    write_package(weights, options.work / "tokenizer", records, load_sources(options.work), quality, options.out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("step", nargs="?", choices=("all", *STEPS), default="all")
    parser.add_argument("--work", type=Path, required=True, help="folder for texts and intermediate files")
    parser.add_argument("--trained", type=Path, help="folder for the trained weights (default: WORK/trained)")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="where the packaged model goes")
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument("--conversations", type=int, default=60_000, help="conversations to write for training")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="end the training by this time")
    parser.add_argument("--tokens-per-step", type=int, default=65_536, help="tokens in a batch")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a short window")
    parser.add_argument("--long-every", type=int, default=5, help="every so many steps, windows are 8192 long")
    parser.add_argument("--aligned-share", type=float, default=0.5, help="share of windows that begin a document")
    parser.add_argument("--copying-share", type=float, default=0.1, help="share of windows of looped random tokens")
    parser.add_argument("--peak-rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="AdamW's weight decay")
    parser.add_argument(
        "--mixture",
        type=float,
        nargs=4,
        default=(0.35, 0.15, 0.4, 0.1),
        help="shares of novels, manuals, conversations and repetitions",
    )
    parser.add_argument("--start-from", type=Path, help="folder of an earlier run of `train` to go on from")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of the products")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work = options.work.resolve()
    return options


if __name__ == "__main__":
    main()
