"""The command line: what is accepted, what is refused, and how."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_adapt.core.ablation import NOTHING_OFF, STEPS, Ablation, Scheduler, parse_tier_engines
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import LayoutError
from sglang_adapt.core.slo_file import read_slo_config
from sglang_adapt.demo import demo_model_path
from sglang_adapt.front.address import STOCK_HOST, STOCK_PORT
from sglang_adapt.front.flags import SettingsError, ablation_of, add_ablation_flags, split_argv
from sglang_adapt.front.settings import Settings, check_allocator, make_settings
from sglang_adapt.upstream.command_line import StockSettingsError, refusals_told
from sglang_adapt.upstream.front import stock_parser
from sglang_adapt.upstream.sequence.refusals import UnsliceableError, check_sliceable


def settings(*argv: str) -> Settings:
    return make_settings(argv, "/nowhere", "forkserver")


def test_defaults_serve_the_demo_model_on_two_virtual_gpus() -> None:
    made = settings()
    assert made.config.tp_sizes == (1, 2)
    assert str(made.config.layout) == "tp1@0,tp1@1"
    assert [engine.name for engine in made.config.candidates] == ["tp1@0", "tp1@1", "tp2@0-1"]
    for tp, args in made.server_args.items():
        assert args.tp_size == tp
        assert Path(args.model_path) == demo_model_path()
        assert args.served_model_name == "demo"
        assert args.sleep_on_idle
        assert args.dtype == "float32"
        assert args.page_size == 8 * tp
        assert (args.host, args.port) == (STOCK_HOST, STOCK_PORT)
    assert made.server_args[1].random_seed == made.server_args[2].random_seed
    assert made.pool is not None
    assert made.pool.geometry.blocks == 1 + 32768 // 8 + made.pool.standby_blocks
    assert [made.server_args[tp].max_total_tokens for tp in (1, 2)] == [
        made.pool.geometry.capacity_tokens(tp) for tp in (1, 2)
    ]


def test_the_name_of_a_model_is_stocks_unless_it_is_the_demo() -> None:
    assert settings("--served-model-name", "mine").server_args[1].served_model_name == "mine"
    folder = str(demo_model_path())
    assert settings("--model-path", folder).server_args[1].served_model_name == folder


def test_stock_flags_pass_unchanged() -> None:
    made = settings("--dtype", "bfloat16", "--schedule-policy", "fcfs", "--port", "1234")
    for args in made.server_args.values():
        assert (args.dtype, args.schedule_policy, args.port) == ("bfloat16", "fcfs", 1234)


def test_pages_and_tokens_of_the_pool_are_said_for_the_smallest_tp_size(tmp_path: Path) -> None:
    made = settings("--max-total-tokens", "1000", "--page-size", "4", "--kv-cache-dtype", "bf16")
    assert made.pool is not None
    geometry = made.pool.geometry
    assert (geometry.tokens_per_block(1), geometry.tokens_per_block(2)) == (4, 8)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.itemsize) == (3, 8, 32, 2)
    assert geometry.blocks - 1 - made.pool.standby_blocks == 250
    assert {tp: args.page_size for tp, args in made.server_args.items()} == {1: 4, 2: 8}
    config = tmp_path / "server.yaml"
    config.write_text(f"model-path: {demo_model_path()}\npage-size: 4\n")
    from_file = settings("--max-total-tokens", "1000", "--kv-cache-dtype", "bf16", "--config", str(config))
    assert from_file.pool == made.pool


def test_one_tp_size_has_no_pool_and_takes_what_several_cannot() -> None:
    made = settings("--adapt-tp-sizes", "1", "--max-total-tokens", "1000", "--enable-hierarchical-cache")
    assert made.pool is None
    assert (made.server_args[1].max_total_tokens, made.server_args[1].page_size) == (1000, 1)


def test_allocator_settings_that_shared_gpu_memory_does_not_survive() -> None:
    with pytest.raises(SettingsError, match="PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True"):
        check_allocator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    check_allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})


def test_tp_size_chooses_the_layout() -> None:
    assert str(settings("--tp-size", "2").config.layout) == "tp2@0-1"
    made = settings("--adapt-virtual-gpus", "4", "--adapt-layout", "tp2@2-3,tp1@0,tp1@1")
    assert str(made.config.layout) == "tp1@0,tp1@1,tp2@2-3"
    assert made.config.tp_sizes == (1, 2, 4)


def test_kv_of_virtual_gpus_is_staged_if_it_is_asked_for() -> None:
    assert settings().config.kv_copy is settings("--adapt-kv-copy", "peer").config.kv_copy is CopyPath.PEER
    staged = settings("--adapt-kv-copy", "staged")
    assert staged.config.kv_copy is CopyPath.STAGED
    assert staged.kv_copy.endswith("(--adapt-kv-copy staged)") and settings().kv_copy.startswith("peer")
    assert settings("--adapt-tp-sizes", "1").kv_copy == ""


BY_TIER = ("--adapt-slo-config", "built-in", "--adapt-policy", "static", "--adapt-ablate-tier-engines")


def test_what_is_switched_off_is_said_in_flags_and_in_words() -> None:
    assert settings().config.ablation == NOTHING_OFF and NOTHING_OFF.flags == () and str(NOTHING_OFF) == ""
    names = [tier.name for tier in read_slo_config("built-in").tiers]
    by_tier = f"{names[0]}=tp1@0/{names[1]}=tp1@1/{names[2]}=tp1@2,tp1@3"
    made = settings(
        *(*BY_TIER, by_tier, "--adapt-ablate-scheduler", "batch-rule", "--adapt-ablate-page-copies"),
        *("--adapt-virtual-gpus", "4"),
    )
    ablation = made.config.ablation
    assert ablation == Ablation(Scheduler.BATCH_RULE, parse_tier_engines(by_tier), page_copies=True)
    assert str(made.config.layout) == "tp1@0,tp1@1,tp1@2,tp1@3"
    assert "batch rule" in str(ablation) and "a copy a page" in str(ablation) and by_tier in str(ablation)
    every = Ablation(Scheduler.ARRIVAL, parse_tier_engines(by_tier), True, True, True)
    parser = argparse.ArgumentParser()
    add_ablation_flags(parser)
    for one in (ablation, every, *(step.ablation for step in STEPS.values())):
        assert ablation_of(parser.parse_args(one.flags)) == one


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--adapt-layout", "tp2@0-1,tp1@1"], "both use GPU 1; a valid layout here is tp1@0,tp1@1"),
        (["--adapt-layout", "tp1@0"], "no engine uses GPU 1; a valid layout here is"),
        (["--adapt-layout", "tp2@1-2", "--adapt-virtual-gpus", "4"], "starts at a multiple of 2"),
        (["--adapt-layout", "tp4@0-3"], "TP size 4 is not among --adapt-tp-sizes 1, 2"),
        (["--adapt-layout", "tp1@0,tp1@1,tp1@2"], "GPU 2 does not exist"),
        (["--adapt-layout", "nonsense"], "is not an engine"),
        (["--adapt-tp-sizes", "3", "--adapt-virtual-gpus", "3"], "3 does not divide the model's 8 attention heads"),
        (["--adapt-tp-sizes", "4"], "4 does not divide the 2 GPUs"),
        (["--adapt-tp-sizes", "1,x"], "write TP sizes separated by commas"),
        (["--adapt-virtual-gpus", "0"], "give 1 to 32"),
        (["--adapt-virtual-gpus", "1000"], "give 1 to 32"),
        (["--adapt-restart-window", "nan"], "give a finite one"),
        (["--adapt-drain-timeout", "inf"], "give a finite one"),
        (["--adapt-virtual-gpus", "two"], "'two' is not a whole number"),
        (["--adapt-virtual-gpus", "１"], "argument --adapt-virtual-gpus: '１' is not a whole number"),
        (["--adapt-tp-sizes", "1,0_2"], "write TP sizes separated by commas"),
        (["--adapt-interval", "1_0"], "argument --adapt-interval: '1_0' is not a number"),
        (["--adapt-restart-limit", "-1"], "is negative"),
        (["--adapt-drain-timeout", "soon"], "'soon' is not a number"),
        (["--adapt-start-method", "fork"], "invalid choice"),
        (
            ["--adapt-ablate-scheduler", "arrival"],
            "--adapt-ablate-scheduler arrival is about tiers; give --adapt-slo",
        ),
        (["--adapt-ablate-scheduler", "none"], "invalid choice"),
        (["--adapt-ablate-tier-engines", "strict"], "'strict' is not TIER=ENGINE"),
        (["--adapt-ablate-tier-engines", "a=tp1@0/b=tp1@0"], "engine tp1@0 is of a and of b"),
        (["--adapt-ablate-tier-engines", "a=tp1@0/a=tp1@1"], "tier a is there twice"),
        (["--adapt-ablate-tier-engines", "a=tp1@0", "--adapt-slo-config", "built-in"], "give --adapt-policy static"),
        ([*BY_TIER, "a=tp1@0", "--adapt-layout", "tp1@0,tp1@1"], "leave --adapt-layout out"),
        ([*BY_TIER, "a=tp1@0"], "no engine uses GPU 1"),
        ([*BY_TIER, "interactive=tp1@0/b=tp1@1"], "tier b is missing or not known"),
        (["--adapt-ablate-stop-copy", "--adapt-policy", "static"], "--adapt-policy static makes none"),
        (["--adapt-ablate-page-copies", "--adapt-tp-sizes", "1"], "with TP 1 alone none do"),
        (
            ["--adapt-ablate-reload-weights", "--load-format", "dummy"],
            "reads the checkpoint again, and --load-format dummy",
        ),
        (["--adapt-kv-copy", "nccl"], "invalid choice"),
        (["--adapt-kv-copy", "staged", "--adapt-tp-sizes", "2"], "with 2 GPUs and TP 2 none does; leave it out"),
        (["--adapt-kv-copy", "staged", "--adapt-ablate-page-copies"], "here KV is staged"),
        (["--adapt-no-such-flag"], "--adapt-no-such-flag is not a flag; sglang_adapt knows --adapt-ablate-page-c"),
        (["--adapt-lay", "tp1@0"], "--adapt-lay is not a flag"),
        (["--tp-size", "4"], "--tp-size 4 is not among the TP sizes 1, 2"),
        (["--dp-size", "2"], "--dp-size 2 cannot be used with sglang_adapt: replicas are engines of the layout"),
        (["--max-total-tokens", "31"], "--max-total-tokens 31 is too little: with pages of 8 tokens"),
        (["--page-size", "1"], "--page-size 1: a page must hold at least 2 tokens at TP 1"),
        (["--enable-hierarchical-cache"], "cache (--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv) ca"),
        (["--api-key", "ключ"], "--api-key is no key that a header can carry"),
        (["--admin-api-key", "two\nlines"], "--admin-api-key is no key that a header can carry"),
        (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num cannot be used"),
        (["--page-size", "0"], "--page-size 0: give 1 or more"),
        (["--max-running-requests", "0"], "--max-running-requests 0: give 1 or more"),
        (["--mem-fraction-static", "90"], "--mem-fraction-static 90.0: give a share of the memory"),
        (["--qwxyz", "3"], "--qwxyz is not a flag; --help tells of all flags"),
        (["--enable-metric=1"], "--enable-metrics"),
        (["--max-total-token", "1000", "--ports", "1"], "--ports is not a flag; did you mean --port"),
        (["tp2@0-1"], "'tp2@0-1' belongs to no flag"),
        (["--log-level", "loud"], "--log-level loud: give debug, info"),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8' (choose from 'auto', "),
        (["--model-path", "/no/model"], "--model-path /no/model: there is no such folder; give a folder with a model"),
        (
            ["--model", "/"],
            "--model-path /: Unrecognized model in /. Should have a `model_type` key in its config.json;",
        ),
        (
            ["--config", "/no/config.yaml"],
            "stock sglang does not take these settings (ValueError): Config file not found: /no/config.yaml",
        ),
        (["--context-length", "100000000"], "stock sglang does not take these settings (ValueError): Warning: User-"),
        (
            ["--adapt-virtual-gpus", "2", "--adapt-tp-sizes", "1", "--adapt-layout", "tp1@0:prefill,tp1@1:decode"],
            "give more --adapt-tp-sizes than 1, or no roles",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_way_out(argv: list[str], text: str) -> None:
    with pytest.raises((SettingsError, LayoutError, StockSettingsError)) as caught:
        settings(*argv)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value) or "\n" in "".join(argv)


def test_a_fault_of_a_program_is_no_refusal() -> None:
    with pytest.raises(KeyError), refusals_told("--model-path", None):
        raise KeyError("x")
    with pytest.raises(AttributeError), refusals_told("--model-path", None):
        _ = object().x  # type: ignore[attr-defined]


def test_a_tokenizer_that_is_not_there_is_refused_under_its_flag() -> None:
    from transformers import AutoTokenizer

    with pytest.raises(StockSettingsError) as caught, refusals_told("--tokenizer-path", "/no/tokenizer"):
        AutoTokenizer.from_pretrained("/no/tokenizer")
    assert str(caught.value).startswith("--tokenizer-path /no/tokenizer: there is no such folder; give a folder")


def test_our_flags_are_read_before_sglang_is_loaded() -> None:
    ours, rest = split_argv(["--adapt-layout=tp2@0-1", "--model-path", "x", "--port", "1"])
    assert ours.adapt_layout == "tp2@0-1"
    assert rest == ["--model-path", "x", "--port", "1"]


def test_help_has_stocks_flags_and_ours() -> None:
    from sglang_adapt.front.flags import add_adapt_flags

    parser = stock_parser("prog", "text")
    add_adapt_flags(parser)
    text = parser.format_help()
    for flag in ("--model-path", "--schedule-policy", "--adapt-layout", "--adapt-tp-sizes", "--adapt-virtual-gpus"):
        assert flag in text


def test_batches_run_sequence_parallel_only_if_asked(tmp_path: Path) -> None:
    assert settings().config.sp_tokens == {}
    made = settings("--adapt-sp", "2048", "--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "1,2,4")
    assert made.config.sp_tokens == made.tiers.sp_tokens == {2: 2048, 4: 2048}
    assert made.sequences == tuple(f"TP {tp}: batches of 2048 tokens and more run sequence-parallel" for tp in (2, 4))
    assert settings("--adapt-sp", "off").sequences == ()
    made = settings("--adapt-sp", "0", "--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "2,4")
    assert made.config.sp_tokens == {4: 0} and made.config.base_tp == 2
    assert made.sequences[-1] == "TP 4: all batches run sequence-parallel, 2 ways by tokens and 2 ways by weights"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--adapt-sp", "-1"], "give auto, off, or from how many tokens on"),
        (["--adapt-sp", "often"], "give auto, off, or from how many tokens on"),
        (["--adapt-sp", "auto"], "there is no profile; measure both ways"),
        (["--adapt-sp", "1", "--adapt-tp-sizes", "2"], "there is only TP 2; add a smaller one to --adapt-tp-sizes"),
        (["--adapt-sp", "1", "--adapt-tp-sizes", "1"], "there is only TP 1; add a larger one to --adapt-tp-sizes"),
        (["--adapt-sp", "1", "--enable-two-batch-overlap"], "--enable-two-batch-overlap cannot be used"),
        (["--adapt-sp", "1", "--enable-torch-compile"], "--enable-torch-compile cannot be used"),
    ],
)
def test_what_cannot_run_sequence_parallel_is_refused(argv: list[str], text: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(text)):
        settings(*argv)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "no mixtures of experts"),
        ({"quantization": "fp8"}, "the weights are quantised (fp8)"),
        ({"is_generation": False}, "the model gives embeddings"),
    ],
)
def test_models_that_cannot_run_sequence_parallel(changes: dict[str, object], text: str) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization": None, "is_generation": True, **changes}
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=fields.pop("architectures")), **fields)
    with pytest.raises(UnsliceableError, match=re.escape(text)):
        check_sliceable(settings().server_args[2], config, (1, 2))


def test_help_says_that_a_model_can_be_left_out() -> None:
    usage = stock_parser("launch_server", "").format_usage()
    assert "[--model-path MODEL_PATH]" in usage
