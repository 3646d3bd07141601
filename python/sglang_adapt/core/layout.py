"""Layouts: which engine serves on which GPUs, as text and as data.

An engine is written `tp2@0-1` (TP size, first and last GPU) or `tp1@0`; a layout is a comma-separated list of
engines that covers every GPU once. GPU groups are aligned: an engine of TP size t starts at a multiple of t.

In a layout an engine may have a role, written behind it: `tp2@0-1:prefill,tp1@2:decode,tp1@3:decode`. No role is
`mixed`: it reads prompts and decodes. A role belongs to the layout, not to the engine, which is the same in any role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise


class LayoutError(ValueError):
    """A layout or a set of TP sizes cannot be served; the text says why and shows one that can."""


@dataclass(frozen=True, order=True)
class EngineSpec:
    """One engine: `tp` GPUs from `first_gpu` on (GPU indices count from 0 within the deployment).

    Which rank is on which GPU is the same for every engine of a TP size, and nests (see `nesting`): the part of the
    model that a GPU has as a rank of a wide engine is within the one that it has as a rank of a narrow one. So wider
    engines need no other weights on it, and of its KV they need the part that is theirs there.
    """

    first_gpu: int
    tp: int

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPU of each rank."""
        return tuple(self.first_gpu + place for place in _places(self.tp))

    @property
    def name(self) -> str:
        last = self.first_gpu + self.tp - 1
        return f"tp{self.tp}@{self.first_gpu}" if self.tp == 1 else f"tp{self.tp}@{self.first_gpu}-{last}"

    def __str__(self) -> str:
        return self.name


@cache
def _places(tp: int) -> tuple[int, ...]:
    """On which of an engine's GPUs each rank is: with the digits of its number turned round, 0, 2, 1, 3 for TP 4.

    The digits are those of a number system whose bases are the prime factors of `tp`, the smallest ones first.
    """
    places = [0]
    step = 1
    for prime in _prime_factors(tp):
        # Of what a rank had so far, it has a part now; the other parts are on GPUs that lie `step` apart.
        places = [place + step * digit for place in places for digit in range(prime)]
        step *= prime
    return tuple(places)


def _prime_factors(number: int) -> list[int]:
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors


def shard_on(gpu: int, tp: int) -> int:
    """The rank that a GPU has in an engine of TP size `tp`."""
    return _places(tp).index(gpu % tp)


def nesting(tp_sizes: Sequence[int]) -> int:
    """In how many parts the model lies on the GPUs: each has one of them, and needs no other at any of the TP sizes.

    The smallest size; 1 if its ranks and those of a larger one do not nest, as 3 and 6 do not.
    """
    smallest, largest = min(tp_sizes), max(tp_sizes)
    nests = all(
        shard_on(gpu, tp) * smallest // tp == shard_on(gpu, smallest) for tp in tp_sizes for gpu in range(largest)
    )
    return smallest if nests else 1


class Role(StrEnum):
    """What an engine does in a layout.

    MIXED: reads prompts and decodes them.
    PREFILL: reads prompts, and hands requests over when they have their first token.
    DECODE: takes requests over from there; it gets no new ones.
    """

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Layout:
    """Engines that partition the GPUs, ordered by first GPU.

    Attributes:
        engines: which serve.
        roles: of each engine, in their order; empty, and only then, if all are mixed.
    """

    engines: tuple[EngineSpec, ...]
    roles: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        if self.roles and all(role is Role.MIXED for role in self.roles):
            object.__setattr__(self, "roles", ())
        if self.roles and len(self.roles) != len(self.engines):
            raise ValueError(f"{len(self.roles)} roles are given for {len(self.engines)} engines")

    def __str__(self) -> str:
        if not self.roles:
            return ",".join([engine.name for engine in self.engines])
        return ",".join(
            engine.name if role is Role.MIXED else f"{engine.name}:{role}"
            for engine, role in zip(self.engines, self.roles, strict=True)
        )

    @property
    def role_of(self) -> dict[EngineSpec, Role]:
        """The role of each engine, in order."""
        return dict(zip(self.engines, self.roles or (Role.MIXED,) * len(self.engines), strict=True))


_ENGINE = re.compile(r"tp(\d{1,6})@(\d{1,6})(?:-(\d{1,6}))?(?::(\w+))?", re.ASCII)
_ROLE_FIRST = re.compile(r"\w+:tp\d+@[\d-]+", re.ASCII)
_MOST_SHOWN = 200
"""Characters of a text that is no layout that its fault repeats."""


def uniform_layout(tp: int, gpus: int) -> Layout:
    """All GPUs in engines of TP size `tp`."""
    return Layout(tuple(EngineSpec(first, tp) for first in range(0, gpus, tp)))


def candidate_engines(tp_sizes: Sequence[int], gpus: int) -> tuple[EngineSpec, ...]:
    """Every aligned engine of every TP size, ordered by TP size, then by GPU."""
    return tuple(EngineSpec(first, tp) for tp in sorted(tp_sizes) for first in range(0, gpus - tp + 1, tp))


def parse_layout(text: str, tp_sizes: Sequence[int], gpus: int) -> Layout:
    """Parse and check a layout for `gpus` GPUs and the allowed TP sizes.

    Raises:
        LayoutError: bad syntax, a TP size not in `tp_sizes`, a GPU that does not exist, an unaligned group,
            an overlap or a gap, an unknown role, or roles that do not go together. The text gives the reason and a
            valid layout.
    """
    example = _example(tp_sizes, gpus, with_roles=":" in text)
    # One engine may be named twice: that is an overlap, which is found below.
    pairs = sorted(_parse_engine(part.strip(), tp_sizes, gpus, example) for part in text.split(","))
    engines = [engine for engine, _ in pairs]
    owner: dict[int, EngineSpec] = {}
    for engine in engines:
        for gpu in engine.gpus:
            if gpu in owner:
                raise LayoutError(f"layout {_shown(text)}: {owner[gpu]} and {engine} both use GPU {gpu}; {example}")
            owner[gpu] = engine
    missing = [gpu for gpu in range(gpus) if gpu not in owner]
    if missing:
        raise LayoutError(f"layout {_shown(text)}: no engine uses GPU {_list(missing)}; {example}")
    layout = Layout(tuple(engines), tuple(role for _, role in pairs))
    _check_roles(text, layout, example)
    return layout


def _check_roles(text: str, layout: Layout, example: str) -> None:
    """Raises LayoutError if no engine can finish what one prefills, or none prefills for one that decodes."""
    roles = set(layout.roles)
    if roles == {Role.PREFILL}:
        raise LayoutError(
            f"layout {_shown(text)}: all engines only prefill, so no request would get more than its first token; "
            f"give one the role decode, or none; {example}"
        )
    if Role.DECODE in roles and Role.PREFILL not in roles:
        raise LayoutError(
            f"layout {_shown(text)}: engines that only decode get their requests from those that prefill, and there is "
            f"none; give one the role prefill; {example}"
        )


def _parse_engine(part: str, tp_sizes: Sequence[int], gpus: int, example: str) -> tuple[EngineSpec, Role]:
    match = _ENGINE.fullmatch(part)
    if match is None:
        if _ROLE_FIRST.fullmatch(part):
            role, _, engine = part.partition(":")
            raise LayoutError(f"{part!r} is not an engine; write the role behind it, {engine}:{role}; {example}")
        raise LayoutError(
            f"{_shown(part)} is not an engine; write tp<size>@<first GPU>-<last GPU>, and, if it has a role, :<role> "
            f"behind it; {example}"
        )
    if match[4] is not None and match[4] not in list(Role):
        raise LayoutError(f"{part}: {match[4]!r} is no role; roles are {', '.join(Role)}; {example}")
    role = Role(match[4] or Role.MIXED)
    part = part.partition(":")[0]
    tp, first = int(match[1]), int(match[2])
    last = first if match[3] is None else int(match[3])
    if tp not in tp_sizes:
        raise LayoutError(f"{part}: TP size {tp} is not among --adapt-tp-sizes {_list(tp_sizes)}; {example}")
    if last < first:
        raise LayoutError(f"{part}: write the first GPU first, tp{tp}@{last}-{first}; {example}")
    if last - first + 1 != tp:
        raise LayoutError(
            f"{part}: TP size {tp} needs {tp} GPUs, but {part.split('@')[1]} names {last - first + 1}; {example}"
        )
    if last >= gpus:
        raise LayoutError(f"{part}: GPU {last} does not exist, there are {gpus} (0 to {gpus - 1}); {example}")
    if first % tp:
        raise LayoutError(f"{part}: a TP {tp} group starts at a multiple of {tp}, not at GPU {first}; {example}")
    return EngineSpec(first, tp), role


def _example(tp_sizes: Sequence[int], gpus: int, with_roles: bool) -> str:
    """A layout that can be asked for, in the form in which layouts are told: by GPU, without `mixed`."""
    layout = uniform_layout(min(tp_sizes), gpus)
    if with_roles and len(layout.engines) > 1:
        decoding = (Role.DECODE,) * (len(layout.engines) - 1)
        return f"a valid layout with roles here is {Layout(layout.engines, (Role.PREFILL, *decoding))}"
    return f"a valid layout here is {layout}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def default_tp_sizes(gpus: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Powers of two up to the GPU count that the model's heads allow (always at least TP 1)."""
    sizes = []
    tp = 1
    while tp <= gpus:
        if gpus % tp == 0 and tp_size_fault(tp, heads, kv_heads) is None:
            sizes.append(tp)
        tp *= 2
    return tuple(sizes)


def check_tp_sizes(tp_sizes: Iterable[int], gpus: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the sizes sorted; every size divides the GPU count, the heads, and the next larger size.

    Raises:
        LayoutError: naming the size, the reason and the sizes that would do.
    """
    sizes = sorted(tp_sizes)
    fits = f"--adapt-tp-sizes {','.join(map(str, default_tp_sizes(gpus, heads, kv_heads)))} would do here"
    if not sizes:
        raise LayoutError(f"--adapt-tp-sizes is empty; {fits}")
    for tp in sizes:
        if tp < 1:
            raise LayoutError(f"TP size {tp} is not positive; {fits}")
        if sizes.count(tp) > 1:
            raise LayoutError(f"TP size {tp} is given twice; {fits}")
        if gpus % tp:
            raise LayoutError(f"TP size {tp} does not divide the {gpus} GPUs; {fits}")
        fault = tp_size_fault(tp, heads, kv_heads)
        if fault is not None:
            raise LayoutError(f"TP size {tp} {fault}; {fits}")
    for small, large in pairwise(sizes):
        if large % small:
            raise LayoutError(f"TP size {large} is not a multiple of {small}, so their shards do not nest; {fits}")
    return tuple(sizes)


def tp_size_fault(tp: int, heads: int, kv_heads: int) -> str | None:
    """Why a model with these heads cannot be split `tp` ways, or None if it can."""
    if heads % tp:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads % tp and tp % kv_heads:
        return f"neither divides the model's {kv_heads} KV heads nor is a multiple of them"
    return None


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
