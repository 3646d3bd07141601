"""What of a request is carried, rebuilt or refused, and that penalties follow the tokens alone."""

from __future__ import annotations

import multiprocessing.context

import handoff_children as children
import pytest
from weights_engines import forkserver, in_child


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    return forkserver()


def test_the_lists_name_every_attribute_of_this_sglang(context: multiprocessing.context.ForkServerContext) -> None:
    in_child(context, children.check_attributes)


def test_other_attributes_stop_the_start(context: multiprocessing.context.ForkServerContext) -> None:
    with pytest.raises(RuntimeError, match=r"UnknownReqStateError.*unknown: brand_new; gone: surr_offset"):
        in_child(context, children.check_changed_attributes)


def test_carried_attributes_arrive_and_rebuilt_ones_do_not(
    context: multiprocessing.context.ForkServerContext,
) -> None:
    assert in_child(context, children.lists_are_used) == ([], [])


def test_usual_values_arrive_without_being_carried(context: multiprocessing.context.ForkServerContext) -> None:
    attributes, clocks, size = in_child(context, children.what_is_not_carried)
    assert (attributes, clocks) == ([], [])
    assert size < 2000, "a switch under load moves hundreds of requests"


def test_a_delta_has_whatever_has_changed(context: multiprocessing.context.ForkServerContext) -> None:
    missed, size = in_child(context, children.what_a_delta_misses)
    assert missed == []
    assert size < 400, "a switch tells of each request that is there"


def test_what_cannot_be_told_as_a_delta_is_packed_anew(context: multiprocessing.context.ForkServerContext) -> None:
    assert in_child(context, children.what_has_no_delta) == [
        "sampling parameters",
        "custom parameters",
        "an attribute that is gone",
    ]


def test_a_request_comes_through_its_message(context: multiprocessing.context.ForkServerContext) -> None:
    assert in_child(context, children.packed_details) == {
        "same tokens": True,
        "alias": True,
        "hash of an image": [5, 1 << 40],
        "clock": 12.5,
        "budget": 3,
        "way back": True,
        "source unchanged": True,
        "tokenizer": "the adopting engine's",
        "grammar": False,
        "message": ("r", 7, 8, 25, 4),
    }


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        (children.unpack_bytes, (b"no pickle",), r"UnpackError: request r: its state cannot be read"),
        (children.unpack_another, (), r"UnpackError: request r: its state is not that of this request"),
        (children.unpack_a_dict, (), r"UnpackError: request r: its state is not that of this request"),
    ],
)
def test_states_that_are_none_are_refused(
    context: multiprocessing.context.ForkServerContext, function: object, args: tuple[bytes, ...], text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        in_child(context, function, *args)  # type: ignore[arg-type]


def test_reasons_to_stay(context: multiprocessing.context.ForkServerContext) -> None:
    reasons = in_child(context, children.reasons)
    assert reasons.pop("plain") is None
    assert reasons == {
        "session": "it belongs to a session",
        "lora_id": "it uses a LoRA adapter",
        "multimodal_inputs": "it has multimodal inputs",
        "mamba_pool_idx": "it has Mamba state",
        "return_routed_experts": "it returns routed experts, which are captured by slot",
        "dllm_config": "it is for a diffusion model",
        "bootstrap_room": "it is split between a prefill and a decode server",
        "spec_verify_ct": "it was decoded speculatively",
        "unheard_of": "its attribute unheard_of is not known",
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_are_the_same_by_steps_and_at_once(
    context: multiprocessing.context.ForkServerContext, overlap: bool
) -> None:
    lags = [[True] * 6, [False] * 6, [True, False, False, True, False, True], [True]]
    for lag, same in zip(lags, in_child(context, children.penalties_by_steps_and_at_once, overlap, lags), strict=True):
        assert len(same) >= 8
        assert all(same.values()), (lag, same)
