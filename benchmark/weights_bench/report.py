"""The tables of bench_weights.py, from its results."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

MEAN_LIMIT = 1.01
EACH_LIMIT = 1.03
TIE_GAP = 0.125
"""Log-probability gap below which two tokens count as tied: one bfloat16 step of a logit between 16 and 32."""


def ratios(results: dict[str, Any], sizes: dict[str, Any]) -> dict[str, float]:
    """Ours over stock's by measurement, from each one's quickest run, for every TP size that has both."""
    out: dict[str, float] = {}
    speed = results.get("speed", {})
    for name, ours in speed.items():
        kind, _, tp = name.partition(" ")
        stock = speed.get(f"stock {tp}")
        if kind != "shared" or stock is None:
            continue
        for batch in ours:
            out[f"{tp} decode {batch}"] = min(ours[batch]["decode_ms"]) / min(stock[batch]["decode_ms"])
        batch = str(sizes["prefill_batch"])
        out[f"{tp} prefill {batch}"] = min(ours[batch]["prefill_ms"]) / min(stock[batch]["prefill_ms"])
    return out


def compare_tokens(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """How far greedy tokens and log-probabilities of two engines agree, and how close the first differences were."""
    same = total = 0
    identical = compared = 0
    differences = []
    for number, (a, b) in enumerate(zip(stock, ours, strict=True)):
        total += len(a["ids"])
        first = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=True)) if x != y), None)
        until = len(a["ids"]) if first is None else first
        same += until
        pairs = list(zip(a["logprobs"][:until], b["logprobs"][:until], strict=True))
        identical += sum(x == y for x, y in pairs)
        compared += len(pairs)
        if first is not None:
            gap = a["gaps"][first]
            differences.append({"prompt": number, "token": first, "gap": gap, "tie": gap <= TIE_GAP})
    return {
        "tokens_before_first_difference": same,
        "tokens": total,
        "logprobs_identical": identical,
        "logprobs_compared": compared,
        "first_differences": differences,
    }


def show(results: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Print every table for which there are results."""
    if results.get("speed"):
        _show_speed(results["speed"], sizes)
        _show_ratios(ratios(results, sizes))
    for tp, found in results.get("tokens", {}).items():
        print(
            f"greedy tokens {tp}: {found['tokens_before_first_difference']}/{found['tokens']} before a difference, "
            f"{found['logprobs_identical']}/{found['logprobs_compared']} log-probabilities identical; "
            f"differences: {found['first_differences'] or 'none'}"
        )
    if results.get("memory"):
        _show_memory(results["memory"])
    if results.get("active_step"):
        print("\ndecode step of the first engine, ms at batch, by number of idle engines on its GPUs")
        for row in results["active_step"]:
            steps = "  ".join(f"{b}: {min(x['decode_ms']):.3f}" for b, x in row["speed"].items())
            print(f"  {row['idle']} idle ({row['after']}): {steps}")
    if results.get("first_step"):
        print("\none request of one token, ms")
        for row in results["first_step"]:
            later = row["ms"][1:]
            print(
                f"  {row['what']}: first {row['ms'][0]:.1f}, later median {median(later):.1f} "
                f"({row['ms'][0] - median(later):+.1f}); SM clocks before: {', '.join(row['clocks']) or '-'}"
            )
    for error in results.get("errors", []):
        print(f"ERROR {error}")


def _show_speed(speed: dict[str, Any], sizes: dict[str, Any]) -> None:
    batches = [str(batch) for batch in sizes["batches"]]
    prefill = str(sizes["prefill_batch"])
    print(
        f"\nms a decode step at batch (context {sizes['context']}), and of a prefill of {prefill} x {sizes['context']}"
    )
    print(f"{'':16}" + "".join(f"{batch:>9}" for batch in batches) + f"{'prefill':>10}")
    for name, rows in sorted(speed.items(), key=lambda item: (item[0].split()[1], item[0].split()[0] != "stock")):
        steps = "".join(f"{min(rows[batch]['decode_ms']):9.3f}" for batch in batches)
        print(f"{name:16}{steps}{min(rows[prefill]['prefill_ms']):10.1f}")


def _show_ratios(found: dict[str, float]) -> None:
    if not found:
        return
    print("ours / stock: " + ", ".join(f"{what} {ratio:.3f}" for what, ratio in found.items()))
    worst = max(found, key=lambda what: found[what])
    verdict = "met" if mean(found.values()) <= MEAN_LIMIT and found[worst] <= EACH_LIMIT else "NOT met"
    print(
        f"mean {mean(found.values()):.4f} (at most {MEAN_LIMIT}), worst {found[worst]:.4f} at {worst} "
        f"(at most {EACH_LIMIT}): {verdict}"
    )


def _show_memory(memory: list[dict[str, Any]]) -> None:
    print("\nMiB used on each GPU (nvidia-smi)")
    for row in memory:
        print(f"  {row['after']:24} {row['used_mib']}")
        if "beyond_kv_mib" in row:
            print(f"  {'':24} of it beyond its KV: {row['beyond_kv_mib']} on GPUs {row['gpus']}")
        for rank, facts in enumerate(row.get("ranks", [])):
            for title, values in facts.items():
                listed = ", ".join(f"{what} {value:g}" for what, value in values.items())
                print(f"  {'':24} rank {rank} {title}: {listed}")
