"""Refuses in the front, with a 400 that names the parameter, what would end an engine or the front itself.

Stock checks a part of a request in its front; what it lets through is met by the engine's decoder or its forward pass,
where an exception ends the engine and every request on it, or by the front's metrics, where one ends the server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from sglang_adapt.upstream import wire
from sglang_adapt.upstream.grammar_checks import grammar_fault
from sglang_adapt.upstream.patch import Patch

_WRONG_TYPE = (TypeError, AttributeError, KeyError, IndexError, OverflowError, re.error)
_INT32 = 1 << 31
"""Stock makes a tensor of 32-bit integers of every `top_k` in a batch."""
MOST_SAMPLES = 1024
"""Most samples of a prompt (`n`): each is a request of its own in front, router and engine."""
MOST_SAMPLES_OF_A_BATCH = 16_384
"""Most samples of all prompts of a batch, if there is more than one of each."""
_PATH = re.compile(r" - at `\$([^`]*)`$")


class RefuseWhatTheModelCannotTake(Patch):
    """Checks a request against the model, before stock's own checks of its lengths.

    Stock passes token ids outside the vocabulary, empty prompts and impossible log-probability settings to the forward
    pass, and any grammar to its compiler. Ids that begin as those of the router's own warm-up requests would never be
    answered. `custom_labels` of a body go into labels of stock's metrics unchecked: an unknown name ends the server, a
    known one (`model_name`, ...) would make a series for every value that clients think of.
    """

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
    kind = "before"

    @staticmethod
    def hook(self: Any, obj: Any, input_ids: Any) -> None:
        allowed = self.server_args.tokenizer_metrics_allowed_custom_labels or ()
        try:
            fault = model_fault(obj, input_ids, self.model_config.vocab_size) or labels_fault(obj, allowed)
        except _WRONG_TYPE as error:
            raise ValueError(f"The request has a bad parameter: {error}") from error
        if fault is not None:
            raise ValueError(fault)


class RefuseWhatAnEngineCannotRead(Patch):
    """Reads a tokenized request back as an engine will, and names the parameter that has the wrong type.

    Stock encodes whatever a client sent; the engine's decoder raises on it and the engine ends. What stock itself finds
    of the wrong type it answers with a 500 without a text.
    """

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            tokenized = original(*args, **kwargs)
        except _WRONG_TYPE as error:
            raise ValueError(f"The request has a bad parameter: {error}") from error
        fault = wire_fault(tokenized)
        if fault is not None:
            raise ValueError(fault)
        return tokenized


class RefuseBatchesThatDoNotFit(Patch):
    """Answers a batch whose lists differ in length, or are of the wrong type, with a 400; stock with an empty 500."""

    target = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any) -> Any:
        try:
            result = original(self)
            if not self.is_single and self.batch_size:
                # Every list that is too short lacks the last one.
                self[self.batch_size - 1]
                # Stock keeps what it has made, and sets the default priority of all only after this.
                self.__dict__.pop("_sub_obj_cache", None)
        except _WRONG_TYPE as error:
            raise ValueError(f"The request's parameters do not fit its prompts: {error}") from error
        if self.is_single and not isinstance(self.rid, str):
            raise ValueError("The request's parameters do not fit its prompts: rid of one prompt is to be a text.")
        return result


class RefuseTooManySamples(Patch):
    """Refuses more samples than a server could serve beside others, before stock makes a request of each."""

    target = "sglang.srt.managers.io_struct.GenerateReqInput._handle_parallel_sampling"
    kind = "before"

    @staticmethod
    def hook(self: Any) -> None:
        fault = samples_fault(self)
        if fault is not None:
            raise ValueError(fault)


class RefuseBodiesThatFailTheirChecks(Patch):
    """Answers a body on which stock's own checks of it stumble with a 400; stock with an empty 500.

    Validators of stock's models take for granted that a chat completion is an object, and its `response_format`, too.
    A router in front counts a 500 against the server, so that one client could have it taken out of service.
    """

    target = "fastapi.dependencies.utils.request_body_to_args"
    kind = "around"

    @staticmethod
    async def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from fastapi.exceptions import RequestValidationError

        try:
            return await original(*args, **kwargs)
        except _WRONG_TYPE as error:
            said = {"type": "wrong_type", "loc": ("body",), "msg": f"The body has a part of the wrong type: {error}"}
            raise RequestValidationError([said]) from error


REQUEST_CHECKS: tuple[type[Patch], ...] = (
    RefuseWhatTheModelCannotTake,
    RefuseWhatAnEngineCannotRead,
    RefuseBatchesThatDoNotFit,
    RefuseTooManySamples,
    RefuseBodiesThatFailTheirChecks,
)


def model_fault(obj: Any, input_ids: Any, vocab_size: int) -> str | None:
    """Why the model cannot take a request, or None.

    Args:
        obj: stock GenerateReqInput or EmbeddingReqInput of one prompt.
        input_ids: its token ids, or None if it comes as embeddings.
        vocab_size: number of token ids of the model.
    """
    if isinstance(obj.rid, str) and obj.rid.startswith(wire.WARMUP_RID_PREFIX):
        return f"The request id {obj.rid!r} begins with {wire.WARMUP_RID_PREFIX}, which is the server's own."
    if input_ids is not None and not len(input_ids) and not obj.contains_mm_input():
        return "The prompt has no tokens; give at least one."
    if input_ids and not (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        position, token = next((i, token) for i, token in enumerate(input_ids) if not 0 <= token < vocab_size)
        return (
            f"The token id {token} at position {position} of the input is not in the model's vocabulary "
            f"(0 to {vocab_size - 1})."
        )
    wanted = obj.sampling_params.get("max_new_tokens")
    if wanted is not None and type(wanted) is not int:
        return f"max_new_tokens must be a whole number, got {wanted!r}."
    top_k = obj.sampling_params.get("top_k")
    if top_k is not None and not -_INT32 <= top_k < _INT32:
        return f"top_k must be -1 or at least 1, and below {_INT32}, got {top_k}."
    top = getattr(obj, "top_logprobs_num", None)
    if top is not None and not 0 <= top <= vocab_size:
        return f"The number of top log probabilities must be between 0 and the vocabulary's {vocab_size}, got {top}."
    start = getattr(obj, "logprob_start_len", None)
    if start is not None and start < -1:
        return f"logprob_start_len must be -1 or more, got {start}."
    return grammar_fault(obj.sampling_params)


def samples_fault(obj: Any) -> str | None:
    """Why a request asks for too many samples, or None.

    Args:
        obj: stock GenerateReqInput, whose prompts stock has counted.
    """
    given = obj.sampling_params
    counts = [one.get("n") for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]
    most = max((count for count in counts if type(count) is int), default=1)
    if most > MOST_SAMPLES:
        return f"n must be at most {MOST_SAMPLES}, got {most}; send several requests."
    samples = most * obj.batch_size
    if most > 1 and samples > MOST_SAMPLES_OF_A_BATCH:
        return (
            f"{obj.batch_size} prompts with n={most} are {samples} samples, of which a request may ask for at most "
            f"{MOST_SAMPLES_OF_A_BATCH}; send several requests."
        )
    return None


def labels_fault(obj: Any, allowed: Collection[str]) -> str | None:
    """Why a request's labels cannot be labels of stock's metrics, or None.

    Args:
        obj: stock GenerateReqInput or EmbeddingReqInput.
        allowed: names of `--tokenizer-metrics-allowed-custom-labels`.
    """
    unknown = sorted(set(getattr(obj, "custom_labels", None) or ()) - set(allowed))
    if not unknown:
        return None
    shown = repr(unknown[0] if len(unknown[0]) <= 60 else f"{unknown[0][:60]}...")
    return (
        f"custom_labels: {shown} is no label that this server takes; leave it out, or start the server with "
        "--tokenizer-metrics-allowed-custom-labels"
    )


def wire_fault(tokenized: Any) -> str | None:
    """Why an engine could not decode a tokenized request, naming the parameter, or None.

    Args:
        tokenized: stock TokenizedGenerateReqInput or TokenizedEmbeddingReqInput, before its pickled fields are wrapped.
    """
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    probe = copy.copy(tokenized)
    # Made by stock itself and of checked type, and by far the largest.
    for name in ("input_ids", "mm_inputs", "mm_data_mooncake", "time_stats"):
        if getattr(probe, name, None) is not None:
            setattr(probe, name, None)
    try:
        msgpack_decode(msgpack_encode(probe))
    except msgspec.ValidationError as error:
        return f"The parameter {parameter_at(probe, str(error))}."
    except (msgspec.MsgspecError, TypeError, OverflowError, ValueError, RecursionError) as error:
        return f"The request has a parameter that cannot be sent to an engine: {error}."
    return None


def parameter_at(message: Any, error: str) -> str:
    """msgspec's text about a position of an array-like struct, with the fields' names instead of numbers."""
    match = _PATH.search(error)
    if match is None:
        return error
    names = []
    at = message
    for step in re.findall(r"\[(\d+)\]", match[1]):
        if not isinstance(at, msgspec.Struct):
            break
        name = at.__struct_fields__[int(step) - (at.__struct_config__.tag is not None)]
        names.append(name)
        at = getattr(at, name)
    return f"{'.'.join(names)} has the wrong type: {error[: match.start()].replace('`', '')}"
