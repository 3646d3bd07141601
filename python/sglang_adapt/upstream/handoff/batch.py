"""Making requests run whose KV is in place: a decode batch as it stands before stock's `prepare_for_decode`.

Stock's own way to such a batch, PREBUILT, is for servers split into prefill and decode, and streams the first token
again. Closest in stock: `Scheduler._build_hisparse_decode_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def join_running(scheduler: Any, reqs: Sequence[Any]) -> None:
    """Add requests to the running batch.

    Args:
        scheduler: stock's, at rest.
        reqs: requests (`Req`) with a slot whose row lists the KV of all their tokens but the last; `kv_committed_len`
            says how many that are.
    """
    if not reqs:
        return
    batch = _decode_batch(scheduler, list(reqs))
    if scheduler.running_batch.is_empty():
        scheduler.running_batch = batch
    else:
        scheduler.running_batch.merge_batch(batch)
    scheduler.running_batch.batch_is_full = False


def _decode_batch(scheduler: Any, reqs: list[Any]) -> Any:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    # Small copies out of ordinary memory: CUDA has read it when they return, so that nobody need wait for the stream.
    device = batch.device
    slots = torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64)
    lengths = torch.tensor([req.kv_committed_len for req in reqs], dtype=torch.int64)
    last_tokens = torch.tensor([req.output_ids[-1] for req in reqs], dtype=torch.int64)
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices, batch.req_pool_indices_cpu = slots.to(device, non_blocking=True), slots
    batch.seq_lens, batch.seq_lens_cpu = lengths.to(device, non_blocking=True), lengths.clone()
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = int(lengths.sum())
    batch.multimodal_inputs = [None] * len(reqs)
    _relay(scheduler, batch.req_pool_indices, last_tokens.to(device, non_blocking=True))
    batch.input_ids = None
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    return batch


def _relay(scheduler: Any, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put last tokens, int64 `[n]`, where the next forward reads its input ids from.

    In the order of forwards: one in flight may still write to a slot that a request has just left.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload

    if not (scheduler.enable_overlap and tokens.is_cuda):
        scheduler.future_map.stash(slots, RelayPayload(bonus_tokens=tokens))
        return
    stream = scheduler.forward_stream
    with scheduler.forward_stream_ctx:
        stream.wait_stream(scheduler.schedule_stream)
        scheduler.future_map.stash(slots, RelayPayload(bonus_tokens=tokens))
    for tensor in (slots, tokens):
        tensor.record_stream(stream)
