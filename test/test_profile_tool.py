"""What `python -m sglang_adapt.profile` measures, and how it reads what it sees."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from sglang_adapt.core.profile import (
    DecodePoint,
    PrefillPoint,
    Profile,
    ProfileKey,
    SequenceProfile,
    TpProfile,
    read_profile,
    write_profile,
)
from sglang_adapt.profile import (
    NoOverlapError,
    ProfilingError,
    Server,
    decode_sizes,
    held_up_ms,
    main,
    middle_step_ms,
    prefill_sizes,
    sequence_sizes,
    with_sequences,
)


def test_what_fits_is_measured() -> None:
    assert prefill_sizes(2048, 2048) == [
        (16, 0),
        (64, 0),
        (250, 0),
        (700, 0),
        (1500, 0),
        (16, 1024),
        (64, 1024),
        (250, 1024),
        (700, 1024),
    ]
    assert prefill_sizes(10, 10) == [(5, 0)]
    # Of eight that run, seven are asked for.
    assert decode_sizes(600, 4000, 8) == [(1, 64), (4, 64), (7, 64), (1, 512)]
    assert decode_sizes(10, 100, 1) == [(1, 1)]


class OneByOne(Server):
    """A server whose requests never decode together."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        super().__init__(session, "http://nowhere", seed=1)
        self.asked: list[int] = []

    async def stream(
        self, prompt: list[int], output: int, *, each_token: bool = True
    ) -> tuple[float, list[tuple[float, int]]]:
        self.asked.append(len(prompt) + output)
        number = float(len(self.asked))
        return number, [(number, 1), (number + 0.5, output)]


def test_requests_that_do_not_decode_together_are_not_made_longer_than_the_pool_holds() -> None:
    """Twice as many tokens each time would fill it, and requests would be thrown out and read again for long."""

    async def asked() -> list[int]:
        async with aiohttp.ClientSession() as session:
            server = OneByOne(session)
            with pytest.raises(NoOverlapError, match="2 requests never decoded at the same time"):
                await server.decode_ms(engines=1, batch=2, context=64, longest=10**6, capacity=1000)
            return server.asked

    asked_tokens = asyncio.run(asked())
    assert 2 * max(asked_tokens) <= 1000
    assert len(asked_tokens) > 2, "they were tried with more tokens"


def test_a_step_is_timed_while_all_decode() -> None:
    early = [(0.0, 1), (1.0, 2), (1.1, 3), (1.2, 4), (1.3, 5)]
    late = [(1.1, 1), (1.2, 2), (1.3, 3), (1.8, 4)]
    assert middle_step_ms([early, late]) == pytest.approx(100.0)
    # A chunk may have several tokens.
    assert middle_step_ms([[(0.0, 1), (0.4, 5)]]) == pytest.approx(100.0)
    with pytest.raises(ProfilingError, match="never decoded at the same time"):
        middle_step_ms([[(0.0, 1), (0.1, 2)], [(0.2, 1), (0.3, 2)]])


def test_a_prompt_holds_up_what_decodes_beside_it() -> None:
    def stream(*held_up: int) -> list[tuple[float, int]]:
        """Twenty steps of 10 ms, those with these numbers 7 ms longer."""
        at, chunks = 0.0, [(0.0, 1)]
        for step in range(20):
            at += 0.017 if step in held_up else 0.010
            chunks.append((at, step + 2))
        return chunks

    sent = [0.035, 0.085, 0.13]
    assert held_up_ms([stream(4, 9)], sent) == pytest.approx([7.0, 7.0])
    # Of two engines each has read one.
    assert held_up_ms([stream(4), stream(9)], sent) == pytest.approx([7.0, 7.0])
    # Prompts before all streams decoded do not count.
    late = [(0.036, 4), (0.086, 9), (0.2, 20)]
    assert len(held_up_ms([stream(4), late], [0.01, 0.02, *sent])) == 1
    assert held_up_ms([stream()], [0.035]) == []


KEY = ProfileKey("m", "float32", "virtual GPU", "0", "0", "torch_native")


def size(tp: int, ms: float) -> TpProfile:
    return TpProfile(tp, (PrefillPoint(16, 0, ms),), (DecodePoint(1, 24, ms),))


def test_sequence_parallel_batches_are_added_to_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    known = Profile(KEY, (size(1, 8.0), size(2, 5.0)))
    assert sequence_sizes({}, None, KEY, file) == ()
    assert sequence_sizes({"2": 0}, known, KEY, file) == (2,)
    both = with_sequences(known, [size(2, 3.0)], 1)
    halves = with_sequences(known, [size(2, 3.0)], 2).size(2).sequence
    assert halves is not None and halves.base_tp == 2
    assert both.size(1) == known.size(1)
    assert both.size(2).prefill == known.size(2).prefill
    assert both.size(2).sequence == SequenceProfile((PrefillPoint(16, 0, 3.0),), (DecodePoint(1, 24, 3.0),))
    write_profile(file, both)
    assert read_profile(file) == both
    with pytest.raises(ProfilingError, match="measure with --adapt-sp off first"):
        sequence_sizes({"2": 0}, None, KEY, file)
    with pytest.raises(ProfilingError, match="some of its batches"):
        sequence_sizes({"2": 0, "4": 2048}, known, KEY, file)
    with pytest.raises(ProfilingError, match="nothing of TP size 4"):
        sequence_sizes({"2": 1, "4": 1}, known, KEY, file)


def test_no_server(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--output", str(tmp_path / "p.json")]) == 1
    assert "http://127.0.0.1:9 cannot be measured" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
