"""One copy of the weights under engines of several TP sizes, beside stock engines with their own, in one run.

    python benchmark/bench_weights.py --model MODELS/llama-3.1-8b --tp 1 2 --parts speed --out results.json
    python benchmark/bench_weights.py --model MODELS/llama-3.1-8b --tp 1 2 4 --parts memory idle --out results.json
    python benchmark/bench_weights.py --device cpu --tp 1 2 --out results.json       (tiny model, to try it out)

The model folder needs a config.json only: weights are synthetic, and the same for stock's engines and for ours.

Parts:
  speed   a decode step at batch 1, 16, 64, 128 and a prefill of 16 x 1024, stock and shared at each TP size with the
          same attention backend and CUDA graphs; greedy tokens and log-probabilities compared
  memory  nvidia-smi before and after the keepers and each further warm engine; stages of each rank's start; a
          decode step of the first engine with 0, 1, 2, ... idle engines on its GPUs
  idle    the first request after idling against later ones, of every engine, and of a GPU without an engine

Every part goes on after another has failed; what is known when --limit-s is reached, or at SIGTERM, is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_adapt.upstream.environment import STOCK_ENVIRONMENT

os.environ.update(STOCK_ENVIRONMENT)

from server import environment, exit_on_sigterm, write_json
from sglang_adapt.keeper import KeeperConfig, KeeperHandle, start_keeper
from sglang_adapt.weights import WeightsHandle
from weights_bench import measure
from weights_bench.engine import Engine, EngineSpec
from weights_bench.gpu import clocks, memory_used_mib
from weights_bench.measure import Sizes
from weights_bench.probe import Probe
from weights_bench.report import compare_tokens, ratios, show

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ON_GPU = Sizes((1, 16, 64, 128), 1024, 128, 16, 3, (5, 17, 64, 130, 200, 511, 777, 1024), 64, 32000, 60.0)
ON_CPU = Sizes((1, 4), 32, 8, 4, 2, (1, 9, 40), 8, 500, 1.0)
MEMORY_CONTEXT = 256
MEMORY_BATCHES = (1, 16, 64)
PROBE_IDLE_S = 20.0


class Bench:
    """One run: what was asked for, what is known so far, and what is running."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.sizes = ON_GPU if options.device == "cuda" else ON_CPU
        if options.batches:
            prefill = self.sizes.prefill_batch
            prefill = prefill if prefill in options.batches else max(options.batches)
            self.sizes = replace(self.sizes, batches=tuple(options.batches), prefill_batch=prefill)
        self.results: dict[str, Any] = {"speed": {}, "tokens": {}, "starts_s": {}, "errors": []}
        self._began = time.monotonic()
        self._keepers: list[KeeperHandle] = []
        self._config = json.loads((options.model / "config.json").read_text())

    def left_s(self) -> float:
        return self.options.limit_s - (time.monotonic() - self._began)

    def _require_s(self, seconds: float) -> None:
        if self.left_s() < seconds:
            raise TimeoutError(f"{self.left_s():.0f} s are left, {seconds:g} s are needed to idle")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def attempt(self, what: str, step: Callable[[], None]) -> None:
        """Run a step unless the time is over; a failure is noted and the rest goes on."""
        if self.left_s() <= 0:
            self.results["errors"].append(f"{what}: not begun, the time was over")
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 -- noted, and shown at the end
            self.results["errors"].append(f"{what}: {type(error).__name__}: {error}")
            self.say(f"FAILED {what}: {error}")

    # -- engines and keepers

    def server_args(self, pool_tokens: int, **changes: Any) -> dict[str, Any]:
        options = self.options
        changes = options.server_args | changes
        args: dict[str, Any] = {
            "model_path": str(options.model),
            "device": options.device,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_radix_cache": True,
            "sleep_on_idle": True,
            "random_seed": 1,
            "log_level": "warning",
            "max_total_tokens": pool_tokens,
            "max_running_requests": max(self.sizes.batches),
        }
        if options.device == "cpu":
            return args | {"dtype": "float32"} | changes
        args |= {
            "dtype": "bfloat16",
            "attention_backend": options.attention_backend,
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.8,
            "cuda_graph_max_bs_decode": max(self.sizes.batches),
            "disable_prefill_cuda_graph": not options.prefill_graphs,
        }
        # Stock and ours on the backends that take the strides of shared weights.
        if "num_experts" in self._config:
            args["moe_runner_backend"] = "triton"
        if "quantization_config" in self._config:
            args["fp8_gemm_runner_backend"] = "triton"
        return args | changes

    @property
    def speed_pool_tokens(self) -> int:
        sizes = self.sizes
        return max(sizes.batches) * (sizes.context + sizes.steps + 16)

    @property
    def memory_pool_tokens(self) -> int:
        return max(self.memory_batches) * (self.memory_context + self.sizes.steps + 16)

    @property
    def memory_batches(self) -> tuple[int, ...]:
        return tuple(batch for batch in self.sizes.batches if batch in MEMORY_BATCHES)

    @property
    def memory_context(self) -> int:
        return min(MEMORY_CONTEXT, self.sizes.context)

    def kv_mib(self, tokens: int, tp_size: int) -> float:
        config = self._config
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = max(1, config["num_key_value_heads"] // tp_size)
        return tokens * config["num_hidden_layers"] * 2 * heads * head_dim * 2 / 2**20

    def engine(
        self,
        kind: str,
        tp_size: int,
        pool_tokens: int,
        first_gpu: int = 0,
        handles: dict[int, WeightsHandle] | None = None,
    ) -> Engine:
        """Start a warmed-up engine, kind "stock" or "shared"."""
        name = f"{kind} tp{tp_size}" + (f"@{first_gpu}" if first_gpu else "")
        args = self.server_args(pool_tokens, tp_size=tp_size, base_gpu_id=first_gpu)
        spec = EngineSpec(name, args, handles, self.options.start_method, self.folder)
        engine = Engine(spec, self.left_s)
        try:
            self.results["starts_s"][name] = engine.wait_started()
            held = engine.call(measure.pool_tokens)
            if held < pool_tokens:
                raise RuntimeError(
                    f"its KV pool holds {held} tokens, {pool_tokens} are needed: free memory on its GPUs"
                )
        except BaseException:
            engine.stop()
            raise
        self.say(f"{name} serves after {engine.start_s:.1f} s")
        return engine

    @contextmanager
    def keepers(self) -> Iterator[dict[int, WeightsHandle]]:
        """A keeper for each GPU (one for all virtual GPUs); gives the weights by GPU id."""
        from sglang.srt.server_args import ServerArgs

        finest = max(self.options.tp)
        args = ServerArgs(**self.server_args(self.memory_pool_tokens))
        context = multiprocessing.get_context(self.options.start_method)
        gpus = [tuple(range(finest))] if self.options.device == "cpu" else [(gpu,) for gpu in range(finest)]
        started = [start_keeper(context, KeeperConfig(args, finest, ids)) for ids in gpus]
        try:
            handles: dict[int, WeightsHandle] = {}
            for keeper in started:
                ready = keeper.wait_ready(timeout_s=self.left_s())
                self.results["starts_s"][keeper.config.name] = ready.seconds
                handles |= dict.fromkeys(keeper.config.gpu_ids, keeper.weights)
            size = handles[0].manifest.nbytes / 2**20
            self.say(f"keepers ready: {size:.0f} MiB on each GPU, {len(handles[0].manifest.entries)} parameters")
            yield handles
        finally:
            for keeper in started:
                keeper.stop()

    # -- parts

    def speed(self) -> None:
        for tp_size in self.options.tp:
            self.attempt(f"stock tp{tp_size}", partial(self._measure, "stock", tp_size, None))

        def shared() -> None:
            with self.keepers() as handles:
                for tp_size in self.options.tp:
                    self.attempt(f"shared tp{tp_size}", partial(self._measure, "shared", tp_size, handles))

        self.attempt("keepers", shared)
        tokens = self.results.pop("raw_tokens", {})
        for tp_size in self.options.tp:
            stock, ours = tokens.get(f"stock tp{tp_size}"), tokens.get(f"shared tp{tp_size}")
            if stock and ours:
                self.results["tokens"][f"tp{tp_size}"] = compare_tokens(stock, ours)
        self.results["ratios"] = ratios(self.results, asdict(self.sizes))

    def _measure(self, kind: str, tp_size: int, handles: dict[int, WeightsHandle] | None) -> None:
        engine = self.engine(kind, tp_size, self.speed_pool_tokens, handles=handles)
        try:
            engine.call(measure.warm_up, self.sizes)
            name = engine.spec.name
            speed = engine.call(measure.speed, self.sizes, self.sizes.batches, self.sizes.context, 7)
            self.results["speed"][name] = speed
            self.results.setdefault("raw_tokens", {})[name] = engine.call(measure.tokens, self.sizes)
            self.say(f"{name}: " + ", ".join(f"{b}: {min(x['decode_ms']):.2f} ms" for b, x in speed.items()))
        finally:
            engine.stop()

    def memory_and_idle(self) -> None:
        parts = self.options.parts
        self.results |= {"memory": [], "active_step": [], "first_step": []}
        self._note_memory("nothing runs")
        if "memory" in parts and self.options.device == "cuda":
            self.attempt("a bare context", self._bare_context)
        with self.keepers() as handles:
            self._note_memory("keepers")
            engines: list[Engine] = []
            try:
                for tp_size, first_gpu in self._warm_engines():
                    what = f"warm engine tp{tp_size}@{first_gpu}"
                    self.attempt(what, partial(self._add, engines, tp_size, first_gpu, handles))
                if "idle" in parts:
                    self.attempt("idle", lambda: self._first_steps(engines))
            finally:
                for engine in engines:
                    engine.stop()

    def _warm_engines(self) -> list[tuple[int, int]]:
        """TP size and first GPU of the engines that are kept warm together; the first one is the active one."""
        together = [(tp_size, 0) for tp_size in sorted(self.options.tp)]
        return [*together, (1, 1)] if 1 in self.options.tp and max(self.options.tp) > 1 else together

    def _note_memory(self, after: str, **facts: Any) -> list[int]:
        gpus = max(self.options.tp)
        used = memory_used_mib(self.options.device, gpus)
        self.results["memory"].append({"after": after, "used_mib": used, **facts})
        return used

    def _bare_context(self) -> None:
        probe = Probe(0)
        try:
            self._note_memory("a bare context on 0")
        finally:
            probe.stop()

    def _add(self, engines: list[Engine], tp_size: int, first_gpu: int, handles: dict[int, WeightsHandle]) -> None:
        before = self.results["memory"][-1]["used_mib"]
        engine = self.engine("shared", tp_size, self.memory_pool_tokens, first_gpu, handles)
        engines.append(engine)
        engine.call(measure.speed, self.sizes, self.memory_batches, self.memory_context, 1)
        gpus = list(range(first_gpu, first_gpu + tp_size))
        used = memory_used_mib(self.options.device, max(self.options.tp))
        kv = self.kv_mib(self.memory_pool_tokens, tp_size)
        beyond = [round(used[gpu] - before[gpu] - kv) for gpu in gpus]
        self._note_memory(engine.spec.name, gpus=gpus, kv_mib=round(kv), beyond_kv_mib=beyond, ranks=engine.memory())
        if "memory" in self.options.parts and first_gpu == 0:
            speed = engines[0].call(measure.speed, self.sizes, self.memory_batches, self.memory_context, 9)
            row = {"idle": len(engines) - 1, "after": engine.spec.name, "speed": speed}
            self.results["active_step"].append(row)

    def _first_steps(self, engines: list[Engine]) -> None:
        rows = self.results["first_step"]
        for engine in engines:
            ms = engine.call(measure.single_requests, self.sizes, 11)
            rows.append({"what": f"{engine.spec.name}, warm", "ms": ms, "clocks": clocks(self.options.device)})
        # The largest one first: its GPUs have idled as well; those of the others are awake by then.
        self._require_s(self.sizes.idle_s)
        time.sleep(self.sizes.idle_s)
        for engine in sorted(engines, key=lambda engine: -engine.spec.server_args["tp_size"]):
            before = clocks(self.options.device)
            ms = engine.call(measure.single_requests, self.sizes, 11)
            what = f"{engine.spec.name}, after {self.sizes.idle_s:g} s of idling"
            rows.append({"what": what, "ms": ms, "clocks": before})
        if len(engines) > 1:
            active, idle = engines[0], engines[1]
            self._require_s(self.sizes.idle_s)
            until = time.monotonic() + self.sizes.idle_s
            while time.monotonic() < until:
                active.call(measure.speed, self.sizes, self.memory_batches[-1:], self.memory_context, 11)
            before = clocks(self.options.device)
            ms = idle.call(measure.single_requests, self.sizes, 11)
            what = f"{idle.spec.name}, after {active.spec.name} served {self.sizes.idle_s:g} s"
            rows.append({"what": what, "ms": ms, "clocks": before})
        if self.options.device == "cuda":
            self._require_s(PROBE_IDLE_S)
            probe = Probe(max(self.options.tp) - 1)
            try:
                rows.append(
                    {"what": f"bare GPU after {PROBE_IDLE_S:g} s", "ms": probe.after_idling(PROBE_IDLE_S), "clocks": []}
                )
            finally:
                probe.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a config.json; a tiny Llama on a CPU")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="TP sizes; each must divide the largest")
    parser.add_argument("--parts", nargs="+", choices=["speed", "memory", "idle"], default=["speed", "memory", "idle"])
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes of the decode steps; default 1 16 64 128")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--attention-backend", default="triton", help="of stock and of ours, on GPUs")
    parser.add_argument(
        "--server-args", type=json.loads, default={}, help="further ServerArgs of stock and of ours, as JSON"
    )
    parser.add_argument("--prefill-graphs", action="store_true", help="leave stock's prefill CUDA graphs on")
    parser.add_argument("--start-method", choices=["forkserver", "spawn"], default="forkserver")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if options.model is None and options.device == "cuda":
        parser.error("--model is needed on GPUs")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = Path(folder) / "tiny"
            options.model.mkdir()
            (options.model / "config.json").write_text(json.dumps(TINY))
        if options.start_method == "forkserver":
            multiprocessing.get_context("forkserver").set_forkserver_preload(["sglang_adapt.upstream.preload"])
        bench = Bench(options, Path(folder))
        try:
            if "speed" in options.parts:
                bench.attempt("speed", bench.speed)
            if {"memory", "idle"} & set(options.parts):
                bench.attempt("memory and idle", bench.memory_and_idle)
        except SystemExit:
            bench.results["errors"].append("ended by SIGTERM; what is missing was not reached")
            raise
        finally:
            sizes = asdict(bench.sizes)
            show(bench.results, sizes)
            asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
            write_json(options.out, {**environment(), "options": asked, "sizes": sizes, **bench.results})


if __name__ == "__main__":
    main()
