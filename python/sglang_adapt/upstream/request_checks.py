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
from sglang_adapt.upstream.sampling_rules import sampling_fault, shown

_WRONG_TYPE = (TypeError, AttributeError, KeyError, IndexError, OverflowError, re.error)
MOST_SAMPLES = 1024
"""Most samples of a prompt (`n`): each is a request of its own in front, router and engine."""
MOST_SAMPLES_OF_A_BATCH = 16_384
"""Most samples of all prompts of a batch, if there is more than one of each."""
_FOR_EACH = (
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
)
"""Fields of which a batch may have a list with one for each prompt, and one prompt none."""
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
    """Refuses sampling parameters that are not as they may be, no prompts, and lists that do not fit the prompts.

    Stock answers a part of this with an empty 500 or a text that names nothing; no prompts (`text: []`) and fewer
    samples than one (`n: 0`) with a 200, the latter with one sample or, of several prompts, a 400 about `range()`.
    """

    target = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any) -> Any:
        try:
            fault = prompts_fault(self) or sampling_faults(self.sampling_params)
            if fault is None:
                result = original(self)
                fault = lists_fault(self)
            if fault is None and not self.is_single and self.batch_size:
                self[self.batch_size - 1]
                # Stock keeps what it has made, and sets the default priority of all only after this.
                self.__dict__.pop("_sub_obj_cache", None)
        except _WRONG_TYPE as error:
            fault = f"The request's parameters do not fit its prompts: {error}"
        except ValueError:
            forget_id(self)
            raise
        if fault is not None:
            forget_id(self)
            raise ValueError(fault)
        return result


class LeaveTheRequestOfThatIdAlone(Patch):
    """Keeps a stream that is refused for its id, which another request has, from ending that one.

    Two seconds after a stream stock aborts what has its id, whoever's that is by then.
    """

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, obj, *args, **kwargs)
        except ValueError:
            forget_id(obj)
            raise


class RaiseRefusalsOfStreams(Patch):
    """Raises what an engine refuses (a grammar that it cannot compile) in streams, too, as stock does without a stream.

    Stock gives such a stream a token that nobody asked for and ends it with `finish_reason` "abort", without a text.
    """

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason"
    kind = "around"

    @staticmethod
    async def hook(original: Callable[..., Any], self: Any, out: Any, state: Any, is_stream: bool) -> Any:
        reason = out["meta_info"]["finish_reason"]
        refused = reason.get("type") == "abort" and reason.get("status_code") == 400
        return await original(self, out, state, is_stream and not refused)


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
            body = args[1] if len(args) > 1 else kwargs.get("received_body")
            said = {"type": "wrong_type", **wrong_part(body, error)}
            raise RequestValidationError([said]) from error


REQUEST_CHECKS: tuple[type[Patch], ...] = (
    RefuseWhatTheModelCannotTake,
    RefuseWhatAnEngineCannotRead,
    RefuseBatchesThatDoNotFit,
    RefuseTooManySamples,
    RefuseBodiesThatFailTheirChecks,
    RaiseRefusalsOfStreams,
    LeaveTheRequestOfThatIdAlone,
)


def wrong_part(body: object, error: Exception) -> dict[str, Any]:
    """`loc`, `msg` and `input` of FastAPI for a body on which a validator has stumbled with `error`."""
    if not isinstance(body, dict):
        return {"loc": ("body",), "msg": f"got {shown(body)}", "input": body}
    # The only field into which stock's validators look before its type is checked.
    given = body.get("response_format")
    if given is not None:
        msg = "must be an object with a type, and with a schema as an object"
        return {"loc": ("body", "response_format"), "msg": msg, "input": given}
    return {"loc": ("body",), "msg": f"a part has the wrong type: {error}", "input": None}


def model_fault(obj: Any, input_ids: Any, vocab_size: int) -> str | None:
    """Why the model cannot take a request, or None.

    Args:
        obj: stock GenerateReqInput or EmbeddingReqInput of one prompt.
        input_ids: its token ids, or None if it comes as embeddings.
        vocab_size: number of token ids of the model.
    """
    if isinstance(obj.rid, str) and obj.rid.startswith(wire.WARMUP_RID_PREFIX):
        return f"rid: {obj.rid!r} begins with {wire.WARMUP_RID_PREFIX}, which is the server's own."
    if input_ids is not None and not len(input_ids) and not obj.contains_mm_input():
        return f"{_prompt(obj)}: the prompt has no tokens; give at least one."
    if input_ids and not (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        position, token = next((i, token) for i, token in enumerate(input_ids) if not 0 <= token < vocab_size)
        return (
            f"{_prompt(obj)}: the token id {token} at position {position} is not in the model's vocabulary "
            f"(0 to {vocab_size - 1})."
        )
    stops = obj.sampling_params.get("stop_token_ids") or ()
    if obj.sampling_params.get("min_new_tokens") and not all(
        0 <= token < vocab_size for token in stops if token is not None
    ):
        return (
            f"stop_token_ids must be in the model's vocabulary (0 to {vocab_size - 1}) where min_new_tokens is given: "
            "these tokens are kept from coming before."
        )
    top = getattr(obj, "top_logprobs_num", None)
    if top is not None and not 0 <= top <= vocab_size:
        return f"top_logprobs_num must be from 0 to the size of the vocabulary, {vocab_size}, got {top}."
    start = getattr(obj, "logprob_start_len", None)
    if start is not None and start < -1:
        return f"logprob_start_len must be -1 or more, got {start}."
    return grammar_fault(obj.sampling_params)


def _prompt(obj: Any) -> str:
    """The field that a prompt is in."""
    return "text" if obj.text is not None else "input_ids" if obj.input_ids is not None else "input_embeds"


def forget_id(obj: Any) -> None:
    """A request is refused: nothing is to be aborted in its name later, which stock does behind a stream."""
    obj.is_single, obj.rid = False, []


def prompts_fault(obj: Any) -> str | None:
    """Why a request has no prompts, or embeddings that are none, or None.

    Args:
        obj: stock GenerateReqInput as it has come.
    """
    if obj.text is not None and not obj.text and not obj.contains_mm_input():
        return "text must not be empty; give at least one prompt."
    embeds = obj.input_embeds
    if obj.text is None and obj.input_ids is None and embeds is not None and not (embeds and embeds[0]):
        return "input_embeds must have at least one vector of a token."
    return None


def sampling_faults(given: object) -> str | None:
    """What is wrong with the sampling parameters of a request, one object or one for each prompt, or None."""
    if not isinstance(given, list):
        return sampling_fault(given)
    if not given:
        return "sampling_params must not be an empty list; give an object, or one for each prompt."
    faults = (sampling_fault(one, f"sampling_params[{at}].") for at, one in enumerate(given))
    return next((fault for fault in faults if fault is not None), None)


def lists_fault(obj: Any) -> str | None:
    """Which list of a request does not fit its prompts, or None.

    Args:
        obj: stock GenerateReqInput, normalised.
    """
    if obj.is_single:
        names = [name for name in _FOR_EACH if isinstance(getattr(obj, name), list)]
        return f"{names[0]} must not be a list, since there is one prompt." if names else None
    samples = obj.batch_size * obj.parallel_sample_num
    for name in _FOR_EACH:
        value = getattr(obj, name)
        if not isinstance(value, list):
            continue
        needed = obj.batch_size if name == "rid" else samples
        if len(value) != needed:
            share = "" if needed == obj.batch_size else f" with n={obj.parallel_sample_num}"
            return f"{name} must have {needed} entries for {obj.batch_size} prompts{share}, got {len(value)}."
    return None


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
