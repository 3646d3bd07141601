"""What cannot run sequence-parallel, each with its reason and the way out; checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Stock model classes whose layers are known to run sequence-parallel."""

WAY_OUT = "Give --adapt-sp off"

_SETTINGS: tuple[tuple[str, Callable[[ServerArgs], bool], str], ...] = (
    (
        "--enable-torch-compile",
        lambda args: bool(args.enable_torch_compile),
        "it compiles one way of a layer to run, and each batch may take another one",
    ),
    (
        "--enable-deterministic-inference",
        lambda args: bool(args.enable_deterministic_inference),
        "whole products differ from sums of parts in their last bits, and which one a token meets depends on its batch",
    ),
    (
        "on-policy inference (--rl-on-policy-target)",
        lambda args: args.rl_on_policy_target is not None,
        "it fixes the order of sums, which depends on the batch here",
    ),
    (
        "--enable-two-batch-overlap",
        lambda args: bool(args.enable_two_batch_overlap),
        "it runs two halves of a batch, each of which would be sliced for itself",
    ),
    (
        "context parallelism (--attn-cp-size)",
        lambda args: args.attn_cp_size > 1,
        "it slices the tokens of a batch as well",
    ),
    (
        "--enable-pdmux",
        lambda args: bool(args.enable_pdmux),
        "it runs prompts layer by layer, past the place where a batch is sliced",
    ),
)


class UnsliceableError(ValueError):
    """A model or a setting cannot run sequence-parallel; says why and what to do instead."""


def check_sliceable(server_args: ServerArgs, model_config: ModelConfig, tp_sizes: Sequence[int]) -> None:
    """Check that engines of these TP sizes, which share one copy of the weights, can run batches sequence-parallel.

    Raises:
        UnsliceableError: the first thing that forbids it, why, and the way out.
    """
    if len(tp_sizes) < 2:
        raise UnsliceableError(
            f"batches run sequence-parallel on the copy of all weights that engines of several TP sizes share, and "
            f"there is only TP {tp_sizes[0]}; add a {'larger' if tp_sizes[0] == 1 else 'smaller'} one to "
            f"--adapt-tp-sizes. {WAY_OUT}"
        )
    names = list(model_config.hf_config.architectures or ())
    if not any(name in ARCHITECTURES for name in names):
        raise UnsliceableError(
            f"the model is a {', '.join(names)}; batches can run sequence-parallel for {', '.join(ARCHITECTURES)} "
            f"(no mixtures of experts: what an expert gets would have to be exchanged as well). {WAY_OUT}"
        )
    if model_config.quantization is not None:
        raise UnsliceableError(
            f"the weights are quantised ({model_config.quantization}), and whole products of quantised weights are "
            f"not known to equal the parts' yet; use a checkpoint that is not quantised. {WAY_OUT}"
        )
    if not model_config.is_generation:
        raise UnsliceableError(f"the model gives embeddings, whose pooling needs all tokens of a batch. {WAY_OUT}")
    for what, is_set, why in _SETTINGS:
        if is_set(server_args):
            raise UnsliceableError(f"{what} cannot be used with --adapt-sp: {why}; leave it out. {WAY_OUT}")
