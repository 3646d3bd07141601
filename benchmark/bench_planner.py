"""How long the planner takes to decide on the layout of many GPUs.

    python benchmark/bench_planner.py [--plans 300]

Each plan is made from other demand (rates and lengths of four tiers at random from a fixed seed), for Llama-3.1-8B at
TP 1, 2, 4 and 8 by measured times: interpolated grids, which cost more than reckoned ones. Nothing is kept from one
plan to the next but the history, as in the router. Nitsum: 2.49 ms for 128 GPUs and four tiers, in Rust (4.2.3).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from server import environment, write_json
from sglang_adapt.core.layout import uniform_layout
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, TpProfile
from sglang_adapt.policy.demand import Demand, Terms, Unfinished
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.planner import plan
from sglang_adapt.policy.price import Price, Running
from sglang_adapt.policy.profile import MeasuredTimes, ModelFigures, ReckonedTimes, gpu_figures
from sglang_adapt.policy.situation import Situation

RESULTS = Path(__file__).parent / "results" / "bench_planner.json"
NITSUM_MS = 2.49
SIZES = (1, 2, 4, 8)
TIERS = (
    Terms("strict", 4.0, 400.0, 9.0),
    Terms("interactive", 2.0, 500.0, 25.0),
    Terms("standard", 1.0, 2000.0, 50.0),
    Terms("background", 0.25),
)


def speed(tp: int) -> Speed:
    """Llama-3.1-8B on H100: a profile's grid, filled with reckoned times."""
    model = ModelFigures(tp, 32, 16_000_000_000 // tp, 131_072 // tp, 2)
    reckoned = ReckonedTimes(model, gpu_figures("NVIDIA H100")[0])
    tokens, prefixes = (64, 256, 1024, 4096, 8192), (0, 1024, 8192)
    batches, contexts = (1, 4, 16, 64, 128, 256), (1000, 20_000, 100_000, 300_000)
    profile = TpProfile(
        tp,
        tuple(PrefillPoint(n, prefix, reckoned.prefill_ms(n, prefix)) for n in tokens for prefix in prefixes),
        tuple(DecodePoint(n, context, reckoned.decode_ms(n, context)) for n in batches for context in contexts),
    )
    return Speed(tp, MeasuredTimes(profile), Bounds(16 * tp, 8192, 256), 300_000 * tp, 300_000 * tp)


def situations(gpus: int, count: int, seed: int) -> list[Situation]:
    """Demands that together are from a tenth of what the GPUs carry to twice of it, for each another layout serves."""
    chance = random.Random(seed)
    speeds = tuple(speed(tp) for tp in SIZES)
    made = []
    for _ in range(count):
        asked = tuple(
            Demand(
                terms,
                gpus * chance.uniform(0.5, 10.0),
                chance.uniform(100, 3000),
                chance.uniform(50, 500),
                Unfinished(chance.randrange(gpus * 10), 0),
                chance.uniform(0.0, 2.0),
            )
            for terms in TIERS
        )
        layout = uniform_layout(chance.choice(SIZES), gpus)
        running = {
            engine.name: Running(
                chance.randrange(64),
                chance.uniform(0, 5e9) * engine.tp,
                kv_share=chance.uniform(0.0, 0.6),
                most_weight=chance.choice(TIERS).weight,
            )
            for engine in layout.engines
        }
        made.append(Situation(asked, speeds, gpus, layout, running, Price(40.0, 3e11)))
    return made


def measure(gpus: int, count: int, gives_roles: bool) -> dict[str, object]:
    """Times of `count` plans, in ms."""
    times, cpu, moved = [], [], 0
    history = None
    for now in situations(gpus, count, seed=gpus):
        now = replace(now, gives_roles=gives_roles)
        if history is not None:
            now = replace(now, history=history)
        began, began_cpu = time.perf_counter(), time.thread_time()
        decided = plan(now)
        times.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.thread_time() - began_cpu))
        history, moved = decided.history, moved + decided.move
    times.sort()
    return {
        "gpus": gpus,
        "gives_roles": gives_roles,
        "tiers": len(TIERS),
        "tp_sizes": SIZES,
        "plans": count,
        "moved": moved,
        "median_ms": round(statistics.median(times), 3),
        "mean_ms": round(statistics.mean(times), 3),
        "p99_ms": round(times[int(0.99 * (count - 1))], 3),
        "median_cpu_ms": round(statistics.median(cpu), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=300, help="plans of each size (default: 300)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results = [measure(gpus, options.plans, roles) for roles in (False, True) for gpus in (8, 128, 1024)]
    for one in results:
        roles = ", roles" if one["gives_roles"] else ""
        print(
            f"{one['gpus']:5} GPUs, {one['tiers']} tiers{roles}: {one['median_ms']} ms at the median, "
            f"mean {one['mean_ms']}, p99 {one['p99_ms']}, CPU time {one['median_cpu_ms']} "
            f"({one['moved']} of {one['plans']} move)"
        )
    print(f"Nitsum, 128 GPUs, 4 tiers: {NITSUM_MS} ms")
    write_json(RESULTS, {"environment": environment(), "load": load, "nitsum_ms": NITSUM_MS, "results": results})


if __name__ == "__main__":
    main()
