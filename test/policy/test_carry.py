"""What becomes of requests in a switch: every one has a place, and no engine gets more KV than it has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.policy.carry import HEADROOM_BLOCKS, Costs, Mover, NoRoomError, Room, Strategy, carry, costs_by

GPUS = st.sampled_from([(0,), (1,), (0, 1)])
MOVERS = st.lists(
    st.builds(Mover, st.uuids().map(str), GPUS, st.integers(0, 200), st.integers(1, 300)),
    max_size=12,
    unique_by=lambda mover: mover.rid,
)
ROOMS = st.lists(
    st.builds(
        Room,
        st.sampled_from(["tp1@0", "tp1@1", "tp2@0-1"]),
        GPUS,
        st.integers(0, 40),
        st.sampled_from([4, 8, 16]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda room: room.engine,
)


@given(MOVERS, ROOMS, st.sampled_from([Strategy.AUTO, Strategy.RECOMPUTE]))
def test_every_request_has_a_place_and_its_kv_fits(movers, rooms, strategy) -> None:
    by_name = {room.engine: room for room in rooms}
    carriages = carry(movers, rooms, strategy)
    assert [carriage.rid for carriage in carriages] == [mover.rid for mover in movers]
    used = dict.fromkeys(by_name, 0)
    for mover, carriage in zip(movers, carriages, strict=True):
        if carriage.migrate:
            assert mover.kv_tokens > 0 and strategy is Strategy.AUTO
            used[carriage.engine] += -(-mover.kv_tokens // by_name[carriage.engine].page) + HEADROOM_BLOCKS
    assert all(used[name] <= room.free_blocks for name, room in by_name.items())


@given(MOVERS, ROOMS)
def test_forced_migration_moves_all_kv_or_says_what_has_no_room(movers, rooms) -> None:
    try:
        carriages = carry(movers, rooms, Strategy.MIGRATE)
    except NoRoomError as error:
        assert any(mover.rid in str(error) for mover in movers)
        assert not all(carriage.migrate for carriage in carry(movers, rooms, Strategy.AUTO))
        return
    assert all(carriage.migrate == (mover.kv_tokens > 0) for mover, carriage in zip(movers, carriages, strict=True))


def test_requests_stay_on_their_gpus_and_spread_over_equal_engines() -> None:
    rooms = [Room("tp1@0", (0,), 100, 8), Room("tp1@1", (1,), 100, 8)]
    stay = carry([Mover("a", (1,), 50, 60), Mover("b", (0,), 50, 60)], rooms, Strategy.AUTO)
    assert [carriage.engine for carriage in stay] == ["tp1@1", "tp1@0"]
    spread = carry([Mover(str(n), (0, 1), 50, 60) for n in range(6)], rooms, Strategy.AUTO)
    assert [carriage.engine for carriage in spread].count("tp1@0") == 3


@given(MOVERS, ROOMS, st.sampled_from([Strategy.AUTO, Strategy.MIGRATE, Strategy.RECOMPUTE]))
def test_no_request_goes_to_an_engine_that_does_not_hold_it(movers, rooms, strategy) -> None:
    movers = [replace(mover, most_tokens=mover.length + 100) for mover in movers]
    rooms = [replace(room, request_tokens=50 * room.page) for room in rooms]
    by_name = {room.engine: room for room in rooms}
    try:
        carriages = carry(movers, rooms, strategy)
    except NoRoomError as error:
        most = max(room.request_tokens for room in rooms)
        too_long = [mover for mover in movers if mover.most_tokens > most]
        assert any(mover.rid in str(error) for mover in too_long) or strategy is Strategy.MIGRATE
        return
    for mover, carriage in zip(movers, carriages, strict=True):
        assert mover.most_tokens <= by_name[carriage.engine].request_tokens


def test_a_request_that_is_too_long_for_all_is_named_with_ways_out() -> None:
    mover = Mover("long", (0, 1), 150, 151, 180)
    with pytest.raises(NoRoomError, match=r"request long may come to have 180 tokens.*tp1@0 holds 100.*strategy drain"):
        carry([mover], [Room("tp1@0", (0,), 99, 16, request_tokens=100)], Strategy.AUTO)


def test_where_there_is_no_room_at_home_kv_goes_elsewhere() -> None:
    rooms = [Room("tp1@0", (0,), 2, 8), Room("tp1@1", (1,), 100, 8)]
    assert carry([Mover("a", (0,), 50, 60)], rooms, Strategy.AUTO)[0].engine == "tp1@1"


def test_what_is_cheaper_to_compute_than_to_copy_is_computed() -> None:
    rooms = [Room("tp1@0", (0,), 100, 8)]
    assert not carry([Mover("a", (0,), 50, 60)], rooms, Strategy.AUTO, Costs(copy=1, prefill=2))[0].migrate


@pytest.mark.parametrize("strategy", [Strategy.KEEP, Strategy.DRAIN])
def test_what_does_not_move_is_not_placed(strategy) -> None:
    with pytest.raises(ValueError, match=strategy):
        carry([], [Room("tp1@0", (0,), 1, 8)], strategy)


def test_kv_is_copied_by_any_way_that_is_quicker_than_to_read_it_again() -> None:
    by = {path: costs_by(path) for path in CopyPath}
    # 392 and 21 GB/s, and 128 KiB a token.
    assert (round(by[CopyPath.PEER].copy, -4), round(by[CopyPath.STAGED].copy, -3)) == (2_990_000, 160_000)
    rooms = [Room("tp1@0", (0,), 100, 16)]
    for costs in by.values():
        assert carry([Mover("a", (0,), 50, 60)], rooms, Strategy.AUTO, costs)[0].migrate
    slow = replace(by[CopyPath.STAGED], prefill=2e5)
    assert not carry([Mover("a", (0,), 50, 60)], rooms, Strategy.AUTO, slow)[0].migrate
    quick = replace(slow, copy=by[CopyPath.PEER].copy)
    assert carry([Mover("a", (0,), 50, 60)], rooms, Strategy.AUTO, quick)[0].migrate
