"""How fast the engines of a simulated deployment are, and what they hold: of a profile, or reckoned for model and card.

Cards and models are those of `policy/profile.py` and a short table here; any other is simulated with a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_adapt.core.profile import Profile, ProfileError, read_profile
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import GPU_PRICE, Price
from sglang_adapt.policy.profile import ModelFigures, ReckonedTimes, Times, gpu_figures
from sglang_adapt.policy.sequence import (
    NoSequenceProfileError,
    measured_times,
    require_sequence,
    sequence_lines,
    thresholds,
)

MEMORY_BYTES = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "A100": 80e9, "L40S": 48e9}
_FOR_KV = 0.85
"""Of a card's memory is there for weights and KV."""


class HardwareError(ValueError):
    """A deployment cannot be simulated; the text names the flag and what would do."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model: `layers`, bytes of weights, of a weight and of a token's KV (over all layers and heads), and
    how many numbers a token is between layers."""

    layers: int
    weight_bytes: int
    token_bytes: int
    itemsize: int = 2
    hidden: int = 4096


MODELS: Mapping[str, Model] = {
    "llama-3.1-8b": Model(32, 16_060_522_496, 131_072),
    "qwen2.5-14b": Model(48, 29_540_067_328, 196_608, hidden=5120),
    "llama-3.1-70b": Model(80, 141_107_412_992, 327_680, hidden=8192),
}


@dataclass(frozen=True, slots=True)
class Linked:
    """Times with the volume of the sums over an engine's GPUs, `token_ms` for each token, which reckoned ones lack."""

    times: Times
    token_ms: float

    @property
    def latency_ms(self) -> float:
        return self.times.latency_ms

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return self.times.prefill_ms(tokens, prefix) + self.token_ms * tokens

    def decode_ms(self, batch: float, context: float) -> float:
        return self.times.decode_ms(batch, context) + self.token_ms * batch


@dataclass(frozen=True)
class Hardware:
    """What engines of each TP size can do.

    Attributes:
        times: how fast, by TP size.
        bounds: of their iterations, by TP size.
        kv_tokens: that an engine holds, by TP size.
        token_bytes: of the KV of a token, over all ranks.
        price: of a switch.
        source: where this is from, in words.
        profile: where it is of one; times that are reckoned may be corrected further.
        swiftness: how fast engines really are, where it is not what the decisions believe; None: it is.
    """

    times: Mapping[int, Times]
    bounds: Mapping[int, Bounds]
    kv_tokens: Mapping[int, int]
    token_bytes: int
    price: Price
    source: str
    profile: Profile | None = None
    swiftness: Mapping[int, Times] | None = None

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.times))

    @property
    def request_tokens(self) -> int:
        """The longest request, the same at every TP size: what the smallest engine holds, less two pages."""
        smallest = min(self.kv_tokens)
        return self.kv_tokens[smallest] - 2 * self.bounds[smallest].page_tokens

    def real(self, tp: int) -> Times:
        return (self.swiftness or self.times)[tp]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the engines, as the server's flags say.

    Attributes:
        chunk: prompt tokens of an iteration (`--chunked-prefill-size`).
        page: tokens of a page at the smallest TP size (`--page-size`).
        requests: that run at a time (`--max-running-requests`).
        kv_tokens: that a GPU holds at the smallest TP size (`--max-total-tokens`); None: reckoned.
        sp: which batches run sequence-parallel (`--adapt-sp`), as `policy.sequence.thresholds` takes it.
    """

    chunk: int = 8192
    page: int = 16
    requests: int = 2048
    kv_tokens: int | None = None
    sp: str | int | None = None


def reckoned(
    model: str,
    card: str,
    tp_sizes: tuple[int, ...],
    shape: Shape,
    price: Price = GPU_PRICE,
    link_bytes_per_s: float | None = None,
) -> Hardware:
    """A deployment of a model on a card, by the roofline of `policy/profile.py`.

    Args:
        model, card: of `MODELS` and `MEMORY_BYTES`.
        tp_sizes: that are served.
        shape: of the engines.
        price: of a switch.
        link_bytes_per_s: that a GPU sends to the others of its engine; None: what sums send takes no time.

    Raises:
        HardwareError: the model or the card is not known, the weights do not fit, or batches are to run
            sequence-parallel, of which nothing is reckoned.
    """
    if shape.sp is not None:
        raise HardwareError(
            f"--sp {shape.sp}: times of sequence-parallel batches are not reckoned; give a --profile with both ways"
        )
    if model not in MODELS:
        raise HardwareError(f"--model {model} is not known; give one of {', '.join(MODELS)}, or --profile")
    if card not in MEMORY_BYTES:
        raise HardwareError(f"--card {card} is not known; give one of {', '.join(MEMORY_BYTES)}, or --profile")
    size, figures = MODELS[model], gpu_figures(card)[0]
    times: dict[int, Times] = {
        tp: ReckonedTimes(
            ModelFigures(tp, size.layers, size.weight_bytes // tp, size.token_bytes // tp, size.itemsize), figures
        )
        for tp in tp_sizes
    }
    if link_bytes_per_s is not None:
        # Two sums a layer, each of which sends 2 (tp - 1) / tp of what is summed (a ring).
        sent = 4 * size.layers * size.hidden * size.itemsize
        times = {tp: Linked(one, 1e3 * sent * (tp - 1) / tp / link_bytes_per_s) for tp, one in times.items()}
    kv_tokens = shape.kv_tokens
    if kv_tokens is None:
        # A GPU has one copy of all that its engines share: the shards of the smallest TP size that is served.
        free = _FOR_KV * MEMORY_BYTES[card] - size.weight_bytes / min(tp_sizes)
        kv_tokens = int(free / (size.token_bytes / min(tp_sizes)))
        if kv_tokens < 8192:
            raise HardwareError(
                f"--tp-sizes {min(tp_sizes)}: {model} does not fit on a {card}; begin with a larger size"
            )
    return _made(times, shape, kv_tokens, size.token_bytes, price, f"reckoned for {model} on {card}")


def measured(
    path: Path, tp_sizes: tuple[int, ...] | None, shape: Shape, token_bytes: int, price: Price = GPU_PRICE
) -> Hardware:
    """A deployment as a profile has it (`python -m sglang_adapt.profile`).

    Args:
        path: of the profile.
        tp_sizes: that are served; None: all that it has.
        shape: `kv_tokens` must be given.
        token_bytes: of the KV of a token; only the price of switches depends on it.

    Raises:
        HardwareError: the profile cannot be used, or `kv_tokens` is not known.
    """
    try:
        profile = read_profile(path)
    except ProfileError as error:
        raise HardwareError(f"--profile {error}") from None
    known = tuple(sorted(size.tp for size in profile.sizes))
    missing = sorted(set(tp_sizes or known) - set(known))
    if missing:
        raise HardwareError(f"--tp-sizes {missing[0]}: {path} has only {', '.join(map(str, known))}")
    return of_profile(profile, path.name, tp_sizes or known, shape, token_bytes, price)


def of_profile(
    profile: Profile, name: str, tp_sizes: tuple[int, ...], shape: Shape, token_bytes: int, price: Price = GPU_PRICE
) -> Hardware:
    """As `measured`, of a profile that has been read, called `name`, and has these TP sizes.

    Raises:
        HardwareError: `kv_tokens` is not known, a number is not above 0, or the profile does not say how quick
            sequence-parallel batches of engines with these TP sizes are, and some are to run so.
    """
    if shape.kv_tokens is None:
        raise HardwareError("--kv-tokens is not given: a profile does not say how many tokens a GPU holds")
    base_tp, *wide = tp_sizes
    try:
        # A number alone would be taken for times that are no quicker.
        sp_tokens = thresholds(shape.sp, tp_sizes, profile)
        if shape.sp is not None:
            for tp in wide:
                require_sequence(profile.size(tp), base_tp)
    except NoSequenceProfileError as error:
        raise HardwareError(f"--sp {shape.sp}: {name}: {error}; measure both ways to run a batch") from None
    times: dict[int, Times] = {tp: measured_times(profile.size(tp), sp_tokens.get(tp), base_tp) for tp in tp_sizes}
    lines = sequence_lines(shape.sp, tp_sizes, sp_tokens)
    source = "; ".join((f"{name}: {profile.key.model} on {profile.key.gpu}", *lines))
    return _made(times, shape, shape.kv_tokens, token_bytes, price, source, profile)


def _made(
    times: Mapping[int, Times],
    shape: Shape,
    kv_tokens: int,
    token_bytes: int,
    price: Price,
    source: str,
    profile: Profile | None = None,
) -> Hardware:
    for name, value in (("--chunk", shape.chunk), ("--page", shape.page), ("--requests", shape.requests)):
        if value < 1:
            raise HardwareError(f"{name} {value}: give a number above 0")
    smallest = min(times)
    bounds = {tp: Bounds(shape.page * tp // smallest, shape.chunk, shape.requests) for tp in times}
    held = {tp: kv_tokens * tp // smallest for tp in times}
    made = Hardware(dict(times), bounds, held, token_bytes, price, source, profile)
    if made.request_tokens < 2:
        raise HardwareError(f"--kv-tokens {kv_tokens}: an engine holds not even one request; give more")
    return made
