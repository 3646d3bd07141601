"""Parts of the hand-over that need stock sglang but no engine; run in processes that have it loaded."""

from __future__ import annotations

import pickle
import random
import types
from array import array
from typing import Any

import torch

from sglang_adapt.core.handoff import CarriedRequest, RequestKind


def request(rid: str = "r", prompt: int = 5, output: int = 0, **params: Any) -> Any:
    """A request of stock's with random tokens, different for each `rid`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    rng = random.Random(rid)
    req = Req(rid, "", array("q", [rng.randrange(50) for _ in range(prompt)]), SamplingParams(**params))
    req.output_ids.extend(rng.randrange(50) for _ in range(output))
    return req


def scheduler() -> Any:
    """What `unpack` reads of a scheduler."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    return types.SimpleNamespace(
        disaggregation_mode=DisaggregationMode.NULL,
        metrics_collector=None,
        metrics_reporter=types.SimpleNamespace(enable_metrics=False),
        tokenizer="the adopting engine's",
    )


def check_attributes() -> None:
    from sglang_adapt.upstream.handoff.state import check_req_attributes

    check_req_attributes()


def check_changed_attributes() -> None:
    """A stock whose requests have one attribute more and one less."""
    from sglang_adapt.upstream.handoff import state

    changed = request()
    changed.brand_new = 1
    del changed.surr_offset
    state.new_req = lambda: changed  # type: ignore[assignment]
    state.check_req_attributes()


def lists_are_used() -> tuple[list[str], list[str]]:
    """Attributes that come through a pickle with another value than a new request's, and those that do not.

    Every attribute of CARRIED is given a value of its own first, every one of REBUILT one that must not arrive.
    """
    from sglang_adapt.upstream.handoff.pack import pack, unpack
    from sglang_adapt.upstream.handoff.state import CARRIED, REBUILT

    req = request(output=3)
    special = {"rid", "origin_input_ids", "output_ids", "sampling_params", "logprob"}
    for name in CARRIED - special:
        setattr(req, name, f"value of {name}")
    for name in REBUILT - {"time_stats", "grammar"}:
        setattr(req, name, "must not arrive")
    req.priority = 4
    there = unpack(pack(req, RequestKind.WAITING, 0), scheduler()).req
    arrived = [name for name in CARRIED if name not in special and getattr(there, name) == getattr(req, name)]
    leaked = [name for name in REBUILT if getattr(there, name) == "must not arrive"]
    return sorted(CARRIED - special - set(arrived)), leaked


def packed_details() -> dict[str, Any]:
    """What becomes of tokens, clocks, custom parameters and aliases."""
    from sglang_adapt.upstream.handoff.pack import pack, unpack

    req = request(output=3, max_new_tokens=20, custom_params={"budget": 3})
    hashed = request(output=3)
    hashed.origin_input_ids = array("q", [5, 1 << 40])
    req.time_stats.forward_entry_time = 12.5
    req.priority = 4
    carried = pack(req, RequestKind.RUNNING, 7)
    unpacked = unpack(carried, scheduler())
    there = unpacked.req
    return {
        "same tokens": (there.origin_input_ids, there.output_ids) == (req.origin_input_ids, req.output_ids),
        "alias": there.origin_input_ids_unpadded is there.origin_input_ids,
        "hash of an image": list(unpack(pack(hashed, RequestKind.RUNNING, 7), scheduler()).req.origin_input_ids),
        "clock": there.time_stats.forward_entry_time,
        "budget": there.sampling_params.custom_params["budget"],
        "way back": there.sampling_params.custom_params["__req__"] is there,
        "source unchanged": req.sampling_params.custom_params["__req__"] is req,
        "tokenizer": there.tokenizer,
        "grammar": unpacked.has_grammar,
        "message": (carried.rid, carried.kv_tokens, carried.length, carried.most_tokens, carried.priority),
    }


def what_a_delta_misses() -> tuple[list[str], int]:
    """Changes after which a request that was packed before, brought up to date, is another than the one that changed,
    each made by itself; and the bytes of the delta of one that has given two tokens."""
    from sglang_adapt.upstream.handoff.delta import apply, delta_of, state_of
    from sglang_adapt.upstream.handoff.pack import describe, pack, unpack
    from sglang_adapt.upstream.handoff.state import CARRIED, LATE

    changes: dict[str, Any] = {
        f"{name} is {value!r}": lambda req, name=name, value=value: setattr(req, name, value)
        for name in CARRIED - {"rid", "sampling_params", "output_ids", "origin_input_ids"}
        for value in (5_000, True, 1, 1.0, "x", None, array("q", [4, 5]), [6], {"a": 7})
    }
    changes |= {
        "tokens": lambda req: req.output_ids.extend([8, 1 << 40]),
        "another list": lambda req: setattr(req, "output_ids", array("q", [1, 2, 3, 4])),
        "a shorter list": lambda req: req.output_ids.pop(),
        "inside a list": lambda req: req.cached_tokens.append(5),
        "inside an object": lambda req: setattr(req.logprob, "top_logprobs_num", 3),
        "inside a set": lambda req: req.eos_token_ids.add(11),
        "a clock": lambda req: setattr(req.time_stats, "decode_ct", 41),
        "nothing": lambda req: None,
    }
    missed = []
    for what, change in changes.items():
        req = request(output=3)
        # What may be a number, a flag or nothing is each of them once; the rest is as in a request that decodes.
        req.cached_tokens, req.eos_token_ids, req.already_computed, req.stream = [4], {2}, 1, True
        for name in LATE if what != "nothing" and not what.startswith(tuple(LATE)) else ():
            setattr(req, name, array("q", [3]) if name == "surr_and_decode_ids" else 1)
        before, there = state_of(req), unpack(pack(req, RequestKind.RUNNING, 7), scheduler())
        change(req)
        delta = delta_of(req, before)
        assert delta is not None, what
        carried = describe(req, RequestKind.RUNNING, 7, b"", delta)
        arrived = apply(there, carried).req
        if _content(arrived) != _content(req):
            missed.append(what)
    req = request(output=3)
    before = state_of(req)
    req.output_ids.extend([1, 2])
    req.send_token_offset += 2
    delta = delta_of(req, before)
    assert delta is not None
    return missed, len(delta)


def what_has_no_delta() -> list[str]:
    """Changes that are not told as a delta, because it would not be exact."""
    from sglang_adapt.upstream.handoff.delta import delta_of, state_of

    changes: dict[str, Any] = {
        "sampling parameters": lambda req: setattr(req.sampling_params, "max_new_tokens", 5),
        "custom parameters": lambda req: setattr(req.sampling_params, "custom_params", {"a": 1}),
        "an attribute that is gone": lambda req: delattr(req, "read_offset"),
        "a token": lambda req: req.output_ids.append(4),
    }
    told = []
    for what, change in changes.items():
        req = request(output=3)
        before = state_of(req)
        change(req)
        if delta_of(req, before) is None:
            told.append(what)
    return told


def _content(req: Any) -> tuple[Any, ...]:
    """What is carried of a request, with types."""
    from sglang_adapt.upstream.handoff.pack import clocks_of
    from sglang_adapt.upstream.handoff.state import CARRIED

    there = {name: value for name, value in vars(req).items() if name in CARRIED and name != "sampling_params"}
    plain = {name: vars(value) if hasattr(value, "__dict__") else value for name, value in there.items()}
    return {name: (type(value), value) for name, value in plain.items()}, clocks_of(req)


def what_is_not_carried() -> tuple[list[str], list[str], int]:
    """(attributes, clocks) that arrive with another value or type, and the bytes of a plain request beyond its tokens.

    One request is as new, one has no usual value left, one has another one in every second attribute.
    """
    from sglang_adapt.upstream.handoff.pack import pack, unpack
    from sglang_adapt.upstream.handoff.state import CARRIED, usual

    changed = {bool: True, int: 9, float: 0.25, str: "else", type(None): 3}
    plain = request(prompt=500, output=3, stop=["a"], temperature=0.5)
    plain.time_stats.scheduler_recv_time = 0.0
    odd, half = request(output=3, max_new_tokens=20, json_schema="{}"), request()
    for at, (name, value) in enumerate(sorted(usual().items())):
        other = not value if type(value) is bool else changed[type(value)]
        setattr(odd, name, other)
        if at % 2:
            setattr(half, name, other)
    odd.time_stats.decode_ct = 4
    attributes, clocks = [], []
    for req in (plain, odd, half):
        there = unpack(pack(req, RequestKind.RUNNING, 7), scheduler()).req
        for name in CARRIED & vars(req).keys() - {"sampling_params", "logprob", "return_hidden_states_mode"}:
            here, arrived = getattr(req, name), getattr(there, name)
            if type(here) is not type(arrived) or here != arrived:
                attributes.append(name)
        for name, here in vars(req.time_stats).items():
            if type(here) in (int, float) and getattr(there.time_stats, name) != here:
                clocks.append(name)
    return attributes, clocks, len(pack(plain, RequestKind.RUNNING, 7).state) - 4 * 503


def unpack_bytes(state: bytes) -> None:
    from sglang_adapt.upstream.handoff.pack import unpack

    unpack(CarriedRequest("r", RequestKind.WAITING, 0, 5, 9, None, state), scheduler())


def unpack_another() -> None:
    from sglang_adapt.upstream.handoff.pack import pack

    unpack_bytes(pack(request("other"), RequestKind.WAITING, 0).state)


def unpack_a_dict() -> None:
    unpack_bytes(pickle.dumps({"rid": "r"}))


def reasons() -> dict[str, str | None]:
    """The reason to stay of a plain request, and of one for each way to be refused."""
    from sglang_adapt.upstream.handoff.refusals import reason_to_stay

    found = {"plain": reason_to_stay(request(output=2))}
    for name, value in (
        ("session", object()),
        ("lora_id", "adapter"),
        ("multimodal_inputs", object()),
        ("mamba_pool_idx", torch.tensor(1)),
        ("return_routed_experts", True),
        ("dllm_config", object()),
        ("bootstrap_room", 3),
        ("spec_verify_ct", 1),
        ("unheard_of", None),
    ):
        req = request()
        setattr(req, name, value)
        found[name] = reason_to_stay(req)
    return found


def _batch(reqs: list[Any], overlap: bool) -> Any:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = ScheduleBatch(reqs=reqs, device="cpu", enable_overlap=overlap)
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, 50)
    return batch


def _penalties(batch: Any) -> dict[str, Any]:
    """Every tensor of every penalizer."""
    return {
        f"{kind.__name__}.{name}": value
        for kind, penalizer in batch.sampling_info.penalizer_orchestrator.penalizers.items()
        for name, value in vars(penalizer).items()
        if isinstance(value, torch.Tensor)
    }


def penalties_by_steps_and_at_once(overlap: bool, lags: list[list[bool]]) -> list[dict[str, bool]]:
    """For each of `lags`, whether each penalty tensor is the same (a) counted step by step, with the results of a
    step unknown before the next where its entry says so, and (b) counted at once for requests that have the tokens."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    from sglang_adapt.demo import demo_model_path
    from sglang_adapt.upstream.patch import PATCHES
    from sglang_adapt.upstream.penalties import PENALTY_PATCHES

    PATCHES.apply(*PENALTY_PATCHES)
    publish(ServerArgs(model_path=str(demo_model_path()), device="cpu"), role="scheduler")
    found = []
    for lag in lags:
        steps, at_once = _by_steps(overlap, lag), _at_once(overlap, len(lag))
        assert steps.keys() == at_once.keys()
        found.append({name: torch.allclose(steps[name], at_once[name]) for name in steps})
    return found


def _penalised(steps: int) -> list[Any]:
    """Requests that have given `steps` tokens and one."""
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25, "min_new_tokens": 3}
    reqs = [request(f"q{row}", prompt=4 + row, output=steps + 1, **params) for row in range(3)]
    for req in reqs:
        req.tokenizer = types.SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
        req.kv_committed_len = len(req.origin_input_ids) + steps
    return reqs


def _at_once(overlap: bool, steps: int) -> dict[str, Any]:
    return _penalties(_batch(_penalised(steps), overlap))


def _by_steps(overlap: bool, lag: list[bool]) -> dict[str, Any]:
    reqs = _penalised(len(lag))
    outputs = [req.output_ids[:] for req in reqs]
    for req in reqs:
        del req.output_ids[:]
        req.kv_committed_len = len(req.origin_input_ids)
    batch = _batch(reqs, overlap)
    for step, unknown in enumerate(lag, start=1):
        for req, output in zip(reqs, outputs, strict=True):
            del req.output_ids[:]
            req.output_ids.extend(output[: step - 1 if unknown and overlap else step])
        batch.cumulate_penalty_output_tokens()
        for req in reqs:
            req.kv_committed_len += 1
    return _penalties(batch)
