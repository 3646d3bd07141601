"""Log-probabilities of named tokens, of requests with and without them in one batch, by stock's own functions."""

from __future__ import annotations

import torch
from sglang.srt.layers.logprob_processor import get_token_ids_logprobs

from sglang_adapt.upstream.token_ids_logprobs import NoNamedTokensIsATensorToo

LOGPROBS = torch.arange(12.0).reshape(3, 4)
NAMED = [[1, 3], None, [0]]


def test_all_requests_have_tensors_until_they_are_copied() -> None:
    found = get_token_ids_logprobs(LOGPROBS, NAMED, no_copy_to_cpu=True)
    values, ids = NoNamedTokensIsATensorToo.hook(found, LOGPROBS, NAMED, no_copy_to_cpu=True)
    assert [value.tolist() for value in values] == [[1.0, 3.0], [], [8.0]]
    assert ids == [[1, 3], [], [0]]


def test_what_is_copied_already_stays() -> None:
    found = get_token_ids_logprobs(LOGPROBS, NAMED)
    assert NoNamedTokensIsATensorToo.hook(found, LOGPROBS, NAMED) is None
    assert found[0] == [[1.0, 3.0], [], [8.0]]
