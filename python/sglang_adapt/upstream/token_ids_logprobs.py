"""A request for the log-probabilities of tokens that it names (`token_ids_logprob`) beside requests that name none.

Stock has an empty list for each of the latter where it has a tensor for the former, and asks all of them for `tolist()`
when it has read a prompt: the engine would end, with every request on it.
"""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import Patch


class NoNamedTokensIsATensorToo(Patch):
    """Gives requests that name no tokens an empty tensor, as stock does where it speculates.

    Source: sglang/srt/layers/logprob_processor.py, get_token_ids_logprobs; read in
    sglang/srt/managers/scheduler_components/batch_result_processor.py, move_logprobs_to_cpu.
    """

    target = "sglang.srt.layers.logprob_processor.get_token_ids_logprobs"
    kind = "after"

    @staticmethod
    def hook(result: Any, logprobs: Any, token_ids_logprobs: Any, no_copy_to_cpu: bool = False) -> Any:
        """Args: result: (values, ids) of each request; values: float tensors (ids,), or lists of floats if copied."""
        if not no_copy_to_cpu:
            return None
        values, ids = result
        return [value if hasattr(value, "tolist") else logprobs.new_empty(0) for value in values], ids
