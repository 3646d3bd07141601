"""Going on with a request whose engine has died: from the message by which it came, and the tokens that it had given.

Stock builds the request as it did the first time. Then it gets its tokens, is told that they have been sent, and waits
for a prefill of prompt and tokens, as a request does that stock has retracted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sglang_adapt.upstream.handoff.adopt import expect_prefill
from sglang_adapt.upstream.handoff.grammar import rebuild_grammar


def recover(scheduler: Any, message: bytes, output_ids: Sequence[int]) -> bool:
    """Take up one request on this rank, inside the scheduler's dispatcher, on all ranks in the same iteration.

    Args:
        scheduler: stock's.
        message: an encoded TokenizedGenerateReqInput.
        output_ids: the tokens that its client has.

    Returns:
        False if stock has refused the request, which it has told its client then.

    Raises:
        GrammarError: its grammar cannot be built, or refuses its tokens.
    """
    from sglang.srt.managers.io_struct import msgpack_decode

    request = msgpack_decode(message)
    request.unwrap_pickle_fields()
    scheduler.handle_generate_request(request)
    manager = scheduler.grammar_manager
    queue = next(
        (queue for queue in (scheduler.waiting_queue, manager.grammar_queue) if queue and queue[-1].rid == request.rid),
        None,
    )
    if queue is None:
        return False
    req = queue.pop()
    if req.finished() or req.to_finish is not None:
        queue.append(req)
        return True
    req.output_ids = array("q", output_ids)
    if _has_grammar(req):
        # The grammar's state is that after the tokens; where it is being compiled, this waits for it.
        rebuild_grammar(scheduler, req)
    if len(output_ids):
        _mark_sent(req, len(output_ids))
        expect_prefill(req, spilled=True)
    scheduler.waiting_queue.append(req)
    return True


def _has_grammar(req: Any) -> bool:
    params = req.sampling_params
    return any(value is not None for value in (params.json_schema, params.regex, params.ebnf, params.structural_tag))


def _mark_sent(req: Any, count: int) -> None:
    """Set what stock keeps of the output that has been sent (scheduler_components/output_streamer.py)."""
    req.init_incremental_detokenize()
    req.send_token_offset = count
    req.send_decode_id_offset = len(req.surr_and_decode_ids)
    if req.return_logprob:
        for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            for part in ("val", "idx"):
                # Sent already: of the output only their number matters, of the input that they are not None, which
                # is how stock knows them to be computed.
                setattr(req.logprob, f"output_{kind}_{part}", [None] * count)
                setattr(req.logprob, f"input_{kind}_{part}", [])
        req.send_output_token_logprobs_offset = count
        req.input_logprob_sent = True
