"""Which run comes when, and which are done already. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class OtherComparisonError(ValueError):
    """A result is of another comparison; the text says what differs and what to do."""


@dataclass(frozen=True)
class Turn:
    """One start of a system, for all loads that are not measured yet in a repeat (both count from 0)."""

    repeat: int
    system: str
    loads: tuple[tuple[str, float], ...]


def turns(
    systems: Sequence[str],
    loads: Sequence[tuple[str, float]],
    repeats: int,
    done: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[Turn]:
    """Every system for every load, `repeats` times, the first one another one each time; without what is done.

    Args:
        systems: their names, in the order of the first repeat.
        loads: name and multiple of the rate of each.
        repeats: times that all is measured.
        done: the runs of each system so far, with `repeat`, `load` and `times`.
    """
    for repeat in range(repeats):
        first = repeat % len(systems)
        for system in (*systems[first:], *systems[:first]):
            known = {(run["load"], run["times"]) for run in done.get(system, ()) if run["repeat"] == repeat}
            left = tuple(load for load in loads if load not in known)
            if left:
                yield Turn(repeat, system, left)


def runs_done(result: Mapping[str, Any], asked: Mapping[str, Any], path: object) -> dict[str, list[dict[str, Any]]]:
    """The runs of an earlier result that this comparison goes on with.

    Args:
        result: what is in the file; empty if there is none.
        asked: what this comparison is of; all of it has to be in the result as it is here.
        path: of the file, for the message.

    Raises:
        OtherComparisonError: they are of something else.
    """
    if not result:
        return {}
    for name, value in asked.items():
        if result.get(name) != value:
            raise OtherComparisonError(
                f"{path} is of another comparison: its {name} is {result.get(name)!r}, asked for is {value!r}; "
                "give another --json, or remove the file"
            )
    return {name: list(system["runs"]) for name, system in result.get("systems", {}).items()}


def left_s(spent_s: float, over: int, left: int) -> float:
    """Seconds that `left` runs will take, when `over` of them (at least 1), with the starts between, took `spent_s`."""
    return spent_s / over * left
