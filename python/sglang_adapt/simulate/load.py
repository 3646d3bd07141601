"""What arrives: requests of traces or of a Poisson process, each with a tier."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("arrival_ms", "input_tokens", "output_tokens")


class LoadError(ValueError):
    """A load cannot be made; the text names the file and the line, or the flag."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at_ms: from the start of the load.
        prompt, output: tokens; at least 1.
        tier: its name.
    """

    at_ms: float
    prompt: int
    output: int
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a trace is taken, in this order.

    Attributes:
        start_s, end_s: of its own time; a window of it.
        count: requests at most; None: all.
        divide: lengths are divided by this, and are at least 1.
        longest: what has more tokens, prompt and output, is left out.
        speed: requests arrive so many times as fast.
    """

    start_s: float = 0.0
    end_s: float = float("inf")
    count: int | None = None
    divide: int = 1
    longest: int = 1 << 60
    speed: float = 1.0


def read_trace(path: Path, cut: Cut) -> list[Arrival]:
    """The requests of a trace (CSV with `arrival_ms,input_tokens,output_tokens`), in order, from 0 ms on.

    Raises:
        LoadError: the file cannot be read, a line is none of a trace, or nothing is left.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise LoadError(f"{path} is no trace: it has no column {', '.join(missing)}")
            taken = [_row(path, rows.line_num, row) for row in rows]
    except OSError as error:
        raise LoadError(f"trace {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"{path} is no trace: {error}") from None
    began = min((at for at, _, _ in taken), default=0.0)
    taken.sort(key=lambda row: row[0])
    taken = [row for row in taken if cut.start_s * 1e3 <= row[0] - began < cut.end_s * 1e3][: cut.count]
    if not taken:
        raise LoadError(f"trace {path}: no request is between {cut.start_s:g} and {cut.end_s:g} s")
    first = taken[0][0]
    arrivals = [
        Arrival((at - first) / cut.speed, max(1, prompt // cut.divide), max(1, output // cut.divide))
        for at, prompt, output in taken
    ]
    kept = [one for one in arrivals if one.prompt + one.output <= cut.longest]
    if not kept:
        raise LoadError(f"trace {path}: no request has at most {cut.longest} tokens")
    return kept


def _row(path: Path, line: int, row: Mapping[str, str]) -> tuple[float, int, int]:
    try:
        at, prompt, output = float(row[_COLUMNS[0]]), int(row[_COLUMNS[1]]), int(row[_COLUMNS[2]])
    except (TypeError, ValueError):
        raise LoadError(f"{path}:{line}: {', '.join(_COLUMNS)} are numbers in a trace") from None
    if not 0 <= at < float("inf") or prompt < 1 or output < 1:
        raise LoadError(f"{path}:{line}: a request arrives at 0 ms or later and has at least one token of each kind")
    return at, prompt, output


def poisson(rate: float, seconds: float, prompt: int, output: int, seed: int) -> list[Arrival]:
    """Arrivals at `rate` a second; lengths between half and one and a half of those given.

    The same requests as `benchmark/bench_goodput.py` sends for these figures.
    """
    rng, at, made = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        tokens, given = (max(1, round(length * rng.uniform(0.5, 1.5))) for length in (prompt, output))
        made.append(Arrival(at * 1e3, tokens, given))
    if not made:
        raise LoadError(f"no request arrives within {seconds:g} s at {rate:g} a second; give more of either")
    return made


def with_tiers(arrivals: Sequence[Arrival], shares: Mapping[str, float], seed: int) -> list[Arrival]:
    """Draw a tier for each, as `benchmark/bench_goodput.py` does with the same seed."""
    chosen = random.Random(seed).choices(list(shares), list(shares.values()), k=len(arrivals))
    return [Arrival(one.at_ms, one.prompt, one.output, tier) for one, tier in zip(arrivals, chosen, strict=True)]


def of_tier(arrivals: Sequence[Arrival], tier: str) -> list[Arrival]:
    """The same requests, all of one tier."""
    return [Arrival(one.at_ms, one.prompt, one.output, tier) for one in arrivals]


def merged(loads: Sequence[Sequence[Arrival]]) -> list[Arrival]:
    """Several loads at once, in order of time; of equal times the load that comes first."""
    return sorted((one for load in loads for one in load), key=lambda one: one.at_ms)


def repeated(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """A load so many times in a row, with the mean gap between; a day of an hour."""
    period_ms = arrivals[-1].at_ms * (1 + 1 / max(1, len(arrivals) - 1))
    return [
        Arrival(one.at_ms + turn * period_ms, one.prompt, one.output, one.tier)
        for turn in range(times)
        for one in arrivals
    ]


@dataclass(frozen=True, slots=True)
class Phase:
    """A time of a load that changes: how long, and requests/s by tier in it."""

    seconds: float
    rates: Mapping[str, float]


def phased(lengths: Sequence[Arrival], phases: Sequence[Phase], seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals whose rates change: the phases by turns, for so many seconds.

    Args:
        lengths: requests of each tier, of which the lengths are taken, in their order and then again from the first.
        phases: at least one.
        seconds: of the whole load.
        seed: of the arrivals.

    Raises:
        LoadError: a tier has no lengths, or nothing arrives.
    """
    rng, made = random.Random(seed), []
    known = {tier: [one for one in lengths if one.tier == tier] for tier in sorted({one.tier for one in lengths})}
    taken = dict.fromkeys(known, 0)
    began, turn = 0.0, 0
    while began < seconds:
        phase = phases[turn % len(phases)]
        ends = min(seconds, began + phase.seconds)
        for tier, rate in phase.rates.items():
            if not known.get(tier):
                raise LoadError(f"a phase has requests of tier {tier}, of which no trace says how long they are")
            at = began
            while rate > 0 and (at := at + rng.expovariate(rate)) < ends:
                one = known[tier][taken[tier] % len(known[tier])]
                taken[tier] += 1
                made.append(Arrival(at * 1e3, one.prompt, one.output, tier))
        began, turn = ends, turn + 1
    if not made:
        raise LoadError(f"no request arrives in {seconds:g} s of these phases")
    made.sort(key=lambda one: one.at_ms)
    return made


def faster(arrivals: Sequence[Arrival], times: float) -> list[Arrival]:
    """The same requests, arriving so many times as fast."""
    return [Arrival(one.at_ms / times, one.prompt, one.output, one.tier) for one in arrivals]


def overlaid(arrivals: Sequence[Arrival], copies: int, seed: int = 0) -> list[Arrival]:
    """So many loads like this one at once, as of so many times the users: each copy is turned by a time of its own."""
    period, rng, made = arrivals[-1].at_ms + 1.0, random.Random(seed), list(arrivals)
    for _ in range(copies - 1):
        turn = rng.uniform(0.0, period)
        made += [Arrival((one.at_ms + turn) % period, one.prompt, one.output, one.tier) for one in arrivals]
    made.sort(key=lambda one: one.at_ms)
    return made
