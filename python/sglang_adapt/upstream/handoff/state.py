"""What becomes of each attribute of stock's `Req` when a request moves: carried, rebuilt, or a reason not to move it.

Source: sglang/srt/managers/schedule_batch.py. The lists name every attribute there is, so a new or lost one in another
release of sglang stops the start instead of corrupting a request.
"""

from __future__ import annotations

from functools import cache
from typing import Any


class UnknownReqStateError(RuntimeError):
    """Stock's `Req` has other attributes than this module knows; the text names them."""


CARRIED = frozenset(
    """
    rid origin_input_ids origin_input_ids_unpadded output_ids session_id
    extend_batch_idx decode_batch_idx http_worker_ipc
    require_reasoning _is_reasoning_over reasoning_tokens _think_end_match_len
    sampling_params custom_logit_processor return_hidden_states return_hidden_states_mode hidden_states
    extra_key routing_key priority eos_token_ids vocab_size stream
    finished_reason finished_len finished_output to_finish
    surr_offset read_offset decoded_text surr_and_decode_ids cur_decode_ids_len
    send_token_offset send_decode_id_offset send_output_token_logprobs_offset send_output_sampling_mask_offset
    return_logprob logprob_start_len logprob temp_scaled_logprobs top_p_normalized_logprobs
    return_sampling_mask return_flat_raw_top_logprobs input_logprob_sent
    input_token_logprobs temp_input_top_logprobs_val temp_input_top_logprobs_idx
    temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx
    output_token_sampling_mask output_token_sampling_logprobs customized_info grammar_wait_ct
    cached_tokens already_computed cached_tokens_device cached_tokens_host cached_tokens_storage
    _cache_breakdown_computed num_matched_prefix_tokens
    is_retracted retracted_stain retraction_count retraction_mb_id has_log_time_stats
    bootstrap_host bootstrap_port skip_radix_cache_insert routed_dp_rank disagg_prefill_dp_rank
    mm_image_tokens mm_audio_tokens mm_video_tokens
    """.split()  # noqa: SIM905 -- a line for each part of a request
)
"""Moves as it is, in the request's pickle."""

REBUILT = frozenset(
    """
    tokenizer metrics_collector time_stats grammar grammar_key _think_end_matcher
    req_pool_idx kv kv_committed_len extend_range prefix_indices cache_protected_len inflight_middle_chunks
    full_untruncated_fill_ids
    last_node last_host_node best_match_node host_hit_length swa_host_hit_length mamba_host_hit_length
    storage_hit_length swa_uuid_for_lock swa_prefix_lock_released skip_lock_node_ids swa_evict_floor
    """.split()  # noqa: SIM905 -- a line for each part of a request
)
"""Belongs to the engine: made anew by the one that adopts. The clocks of `time_stats` are carried."""

REFUSED = {
    "session": "it belongs to a session",
    "session_generation": "it belongs to a session of the prefix cache",
    "input_embeds": "its prompt is given as embeddings",
    "positional_embed_overrides": "its prompt overrides embeddings",
    "multi_item_delimiter_indices": "it scores several items at once",
    "token_type_ids": "it is for a cross-encoder",
    "multimodal_inputs": "it has multimodal inputs",
    "lora_id": "it uses a LoRA adapter",
    "return_routed_experts": "it returns routed experts, which are captured by slot",
    "routed_experts_start_len": "it returns routed experts, which are captured by slot",
    "routed_experts": "it returns routed experts, which are captured by slot",
    "return_indexer_topk": "it returns the indexer's choice, which is captured by slot",
    "indexer_topk": "it returns the indexer's choice, which is captured by slot",
    "dimensions": "it is an embedding request",
    "embedding": "it is an embedding request",
    "return_pooled_hidden_states": "it is an embedding request",
    "pooled_hidden_state": "it is an embedding request",
    **dict.fromkeys(
        ("hidden_states_tensor", "output_topk_p", "output_topk_index", "output_dsa_topk_indices"),
        "it has state of speculative decoding",
    ),
    **dict.fromkeys(
        (
            "spec_verify_ct",
            "spec_num_correct_drafts",
            "spec_num_block_accept_tokens",
            "spec_num_cap_tokens",
            "spec_correct_drafts_histogram",
            "spec_cap_lens_histogram",
        ),
        "it was decoded speculatively",
    ),
    **dict.fromkeys(
        (
            "mamba_pool_idx",
            "mamba_ping_pong_track_buffer",
            "mamba_next_track_idx",
            "mamba_last_track_seqlen",
            "mamba_branching_seqlen",
            "mamba_cow_src_index",
            "mamba_needs_clear",
            "mamba_lazy_is_insert",
        ),
        "it has Mamba state",
    ),
    **dict.fromkeys(
        (
            "dllm_initialized",
            "dllm_phase",
            "dllm_incomplete_ids",
            "dllm_algo_state",
            "dllm_block_offset",
            "dllm_config",
        ),
        "it is for a diffusion model",
    ),
    **dict.fromkeys(
        (
            "bootstrap_room",
            "pd_rebootstrap_forced_output_id",
            "disagg_kv_sender",
            "start_send_idx",
            "tmp_end_idx",
            "metadata_buffer_index",
            "pending_bootstrap",
            "prefill_attempt_count",
        ),
        "it is split between a prefill and a decode server",
    ),
    "hisparse_staging": "it is in hierarchical sparse attention",
}
"""A request moves only if this attribute has the value of a new request; the text says what else it means."""

PLAIN = (bool, int, float, str, type(None))
"""Types whose values are compared as they are."""

LATE = frozenset({"surr_and_decode_ids", "cur_decode_ids_len"})
"""Attributes of CARRIED that a new request does not have yet."""

KNOWN = CARRIED | REBUILT | REFUSED.keys()


def check_req_attributes() -> None:
    """Compare the lists with a real `Req`; to be called at start.

    Raises:
        UnknownReqStateError: an attribute that no list has, one that is gone, or one in two lists.
    """
    twice = (CARRIED & REBUILT) | (CARRIED & REFUSED.keys()) | (REBUILT & REFUSED.keys())
    there = vars(new_req()).keys()
    unknown, gone = there - KNOWN, KNOWN - LATE - there
    problems = [
        f"{text}: {', '.join(sorted(names))}"
        for text, names in (("unknown", unknown), ("gone", gone), ("in two lists", twice))
        if names
    ]
    if problems:
        raise UnknownReqStateError(
            f"the attributes of sglang's Req are not those that requests are moved by ({'; '.join(problems)}); "
            f"say in upstream/handoff/state.py what becomes of them"
        )


@cache
def usual() -> dict[str, Any]:
    """Attributes of CARRIED with the plain value that every new request has, whatever it asks for. With that value they
    need not be carried."""
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    asks = SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.7,
        top_k=3,
        stop=["x"],
        stop_token_ids=[5],
        frequency_penalty=0.5,
        json_schema="{}",
        custom_params={"budget": 3},
    )
    other = vars(Req("r", "", array("q", [5, 6, 7]), asks))
    return {
        name: value
        for name, value in vars(new_req()).items()
        if name in CARRIED and type(value) in PLAIN and type(other[name]) is type(value) and other[name] == value
    }


@cache
def new_req() -> Any:
    """A request as stock makes it, for its attributes' first values; not to be changed."""
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req("", "", array("q", [0]), SamplingParams())
