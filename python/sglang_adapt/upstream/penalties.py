"""Penalties that depend on a request's tokens alone, and not on what its engine did between them.

Stock counts, before each decode step, the last token that it knows. With overlap scheduling that is the last but one;
after any step that let the results catch up (another request's prefill, a pause, a switch) it is the last. The token
between is never counted then, and the last one twice. A retracted request is counted from nothing. So the same request
gives other tokens, depending on its neighbours. Here every step counts the token at the same distance, known or not
known to stock, and a batch that is built for requests with tokens starts with those counted. In steady state both are
what stock does.
"""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import Patch


def token_at(req: Any, position: int) -> int:
    """The token at a position of prompt and output."""
    prompt = len(req.origin_input_ids)
    return req.origin_input_ids[position] if position < prompt else req.output_ids[position - prompt]


def counted_end(req: Any, enable_overlap: bool) -> int:
    """Position in prompt and output before which a request's tokens count as penalised, given its committed KV.

    A step whose input is the token at position n has n tokens of KV. Stock counts the token at n before it, and with
    overlap scheduling, where that one is not known on the host, the one at n - 1.
    """
    return req.kv_committed_len - 1 if enable_overlap else req.kv_committed_len


class PenaltiesFollowTheTokens(Patch):
    """Counts the token at a fixed distance before each decode step, where stock counts the newest that it knows."""

    target = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
    kind = "replace"

    @staticmethod
    def hook(self: Any) -> None:
        import torch
        from sglang.srt.utils.common import is_pin_memory_available

        tokens = torch.tensor(
            [token_at(req, counted_end(req, self.enable_overlap)) for req in self.reqs],
            dtype=torch.int64,
            pin_memory=is_pin_memory_available(self.device),
        )
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(tokens.to(self.device, non_blocking=True))


class PenaltiesOfKnownTokens(Patch):
    """Counts the tokens that requests have already when a batch is built for them; stock begins with none.

    That are requests that were retracted, and those that come from another engine.
    """

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    kind = "after"

    @staticmethod
    def hook(result: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        orchestrator = result.penalizer_orchestrator
        if not orchestrator.is_required:
            return
        for row, req in enumerate(batch.reqs):
            # The first decode step of a request counts the last token of its prompt where it overlaps the prefill.
            first = len(req.origin_input_ids) - (1 if batch.enable_overlap else 0)
            end = counted_end(req, batch.enable_overlap)
            if end > first:
                _count(orchestrator, row, [token_at(req, position) for position in range(first, end)])


PENALTY_PATCHES: tuple[type[Patch], ...] = (PenaltiesFollowTheTokens, PenaltiesOfKnownTokens)


def _count(orchestrator: Any, row: int, tokens: list[int]) -> None:
    """Do in one row what as many calls of `cumulate_output_tokens` would do.

    Source: sglang/srt/sampling/penaltylib/. Each penalizer has a row a request of the tensors used here.
    """
    import torch
    from sglang.srt.sampling import penaltylib

    ids = torch.tensor(tokens, dtype=torch.int64, device=orchestrator.device)
    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        if kind is penaltylib.BatchedFrequencyPenalizer:
            amounts = penalizer.frequency_penalties[row].expand(len(ids))
            penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, amounts)
        elif kind is penaltylib.BatchedPresencePenalizer:
            penalizer.cumulated_presence_penalties[row, ids] = penalizer.presence_penalties[row]
        elif kind is penaltylib.BatchedRepetitionPenalizer:
            penalizer.cumulated_repetition_penalties[row, ids] = penalizer.repetition_penalties[row]
        elif kind is penaltylib.BatchedMinNewTokensPenalizer:
            penalizer.len_output_tokens[row] += len(ids)
        else:
            raise TypeError(
                f"penalties of kind {kind.__name__} are not known; say in upstream/penalties.py how to count"
            )
