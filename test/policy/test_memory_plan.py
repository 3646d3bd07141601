"""What goes where in memory, what does not fit, and which value would."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.policy.memory_plan import Charge, MemoryPlan, Place, plan_fault, plan_lines, plan_memory

GB = 10**9

charges = st.lists(st.builds(Charge, st.sampled_from(["weights", "TP 1 engine"]), st.integers(0, 40 * GB)), max_size=4)
places = st.lists(
    st.builds(Place, st.just("GPU 0"), st.integers(0, 200 * GB), charges.map(tuple), st.integers(1, 10**6)),
    min_size=1,
    max_size=4,
)
shares = st.floats(0.05, 1.0)
pages = st.sampled_from([1, 16, 64])


def h100(tokens: int | None, *charges: Charge, free: int = 80 * GB) -> MemoryPlan:
    fixed = charges or (Charge("weights", 16 * GB), Charge("TP 1 engine", 2 * GB), Charge("TP 2 engine", 4 * GB))
    return plan_memory([Place("GPU 0 (H100)", free, fixed, 200_000)], tokens, share=0.9, page=16, least=16)


@given(places, shares, pages)
def test_what_is_reckoned_fits_everywhere_and_one_page_more_would_pass_the_share(
    found: list[Place], share: float, page: int
) -> None:
    plan = plan_memory(found, None, share, page, page)
    assert plan.tokens is not None and plan.tokens % page == 0
    if plan.tokens == 0:
        assert plan_fault(plan, {}) is not None
        return
    assert plan_fault(plan, {}) is None
    left = [(place.free_bytes - place.fixed_bytes, place.kv_bytes_per_token) for place in found]
    assert all(plan.tokens * per_token <= rest for rest, per_token in left)
    assert any((plan.tokens + page) * per_token > rest * share for rest, per_token in left)


@given(places, shares, pages, st.integers(1, 10**7))
def test_a_refusal_names_a_value_that_is_not_refused(found: list[Place], share: float, page: int, tokens: int) -> None:
    plan = plan_memory(found, tokens, share, page, page)
    fault = plan_fault(plan, {})
    over = any(place.fixed_bytes + tokens * place.kv_bytes_per_token > place.free_bytes for place in found)
    assert (fault is not None) == over
    if fault is None:
        return
    named = re.search(r"Lower --max-total-tokens to (\d+)$", fault)
    if named is None:
        assert "no room for KV, whatever --max-total-tokens" in fault
        assert plan_memory(found, None, share, page, page).tokens == 0
    else:
        assert 0 < int(named[1]) < tokens
        assert plan_fault(plan_memory(found, int(named[1]), share, page, page), {}) is None


@given(places, shares, pages, st.integers(0, 10**7))
def test_the_parts_of_a_line_add_up(found: list[Place], share: float, page: int, tokens: int) -> None:
    plan = plan_memory(found, tokens, share, page, page)
    for line, place in zip(plan_lines(plan), found, strict=False):
        total, parts = line.removeprefix(f"{place.name}: ").split(" GB free = ")
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d\d", parts)]
        assert sum(numbers) == pytest.approx(float(total), abs=0.01 * (len(numbers) + 1))


def test_a_gpu_has_one_line_with_everything() -> None:
    assert plan_lines(h100(100_000)) == [
        "GPU 0 (H100): 80.00 GB free = weights 16.00 + TP 1 engine 2.00 + TP 2 engine 4.00 + KV 20.00 (100000 tokens)"
        " + 38.00 spare"
    ]


def test_what_is_assumed_is_marked_and_said_once() -> None:
    assumed = Charge("TP 4 engine", 4 * GB, "assumed for TP 4: as measured for TP 2")
    place = Place("GPU 0", 80 * GB, (Charge("weights", 16 * GB), assumed), 1000)
    plan = plan_memory([place, replace(place, name="GPU 1")], 1000, share=0.9, page=1, least=1)
    assert plan.has_assumed
    first, second, why = plan_lines(plan)
    assert "TP 4 engine 4.00* " in first and "TP 4 engine 4.00* " in second
    assert why == "* assumed for TP 4: as measured for TP 2"
    assert not h100(None).has_assumed


def test_a_size_that_was_not_given_is_said() -> None:
    # 58 GB are left, of which 0.9 are 261,000 tokens, or 16,312 pages.
    plan = h100(None)
    assert plan.tokens == 260_992
    assert plan_lines(plan)[-1] == ("--max-total-tokens is not given: 260992 is 0.90 of what the fullest GPU leaves")


def test_too_many_tokens_are_refused_with_the_number_that_fits() -> None:
    assert plan_fault(h100(400_000), {}) == (
        "GPU 0 (H100) has 80.00 GB free, and 102.00 GB are to go there: weights 16.00 + TP 1 engine 2.00 + "
        "TP 2 engine 4.00 + KV 80.00 (400000 tokens). Lower --max-total-tokens to 260992"
    )
    assert plan_fault(h100(260_992), {}) is None
    # What leaves no spare share is allowed: it was asked for.
    assert plan_fault(h100(290_000), {}) is None
    assert plan_fault(h100(290_001), {}) is not None


@pytest.mark.parametrize("tokens", [None, 1000])
def test_no_room_for_any_kv_names_the_first_set_of_tp_sizes_that_has_room(tokens: int | None) -> None:
    full = (Charge("weights", 78 * GB), Charge("engines", 6 * GB))
    two, four = h100(None, Charge("weights", 39 * GB)), h100(None, Charge("weights", 20 * GB))
    text = plan_fault(h100(tokens, *full), {(2, 4): h100(None, *full), (2,): two, (4,): four})
    assert text is not None
    assert text.endswith("no room for KV, whatever --max-total-tokens: give --adapt-tp-sizes 2, which leaves room for "
                         f"{two.tokens_that_fit} tokens")  # fmt: skip
    assert "use GPUs with more free memory" in (plan_fault(h100(tokens, *full), {(2,): h100(None, *full)}) or "")


def test_a_pool_that_stock_sizes_needs_room_for_a_page_only() -> None:
    fixed = (Charge("weights", 16 * GB),)
    plan = plan_memory([Place("GPU 0", 80 * GB, fixed, 1000)], None, 0.9, 1, 1, leave_to_stock=True)
    assert plan.tokens is None and plan_fault(plan, {}) is None
    assert plan_lines(plan) == ["GPU 0: 80.00 GB free = weights 16.00 + 64.00 for KV as stock sizes it, and spare"]
    full = plan_memory([Place("GPU 0", 16 * GB, fixed, 1000)], None, 0.9, 1, 1, leave_to_stock=True)
    assert "no room for KV" in (plan_fault(full, {}) or "")


def test_less_than_the_least_is_no_room() -> None:
    place = Place("GPU 0", 20 * GB, (Charge("weights", 19 * GB),), 100_000_000)
    assert plan_memory([place], None, 0.9, 1, least=9).tokens == 9
    plan = plan_memory([place], None, 0.9, 1, least=10)
    assert plan.tokens == 0 and "no room for KV" in (plan_fault(plan, {}) or "")


def test_a_plan_needs_places_a_share_and_a_page() -> None:
    for found, share, page in (([], 0.9, 1), ([Place("x", 1, (), 1)], 1.5, 1), ([Place("x", 1, (), 1)], 0.9, 0)):
        with pytest.raises(ValueError, match="make no plan"):
            plan_memory(found, None, share, page, 1)
