"""What prefill and decode take at each TP size, as measured by `python -m sglang_adapt.profile`: a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sglang_adapt.core.files import replace_file

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Ms = Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]


class ProfileError(ValueError):
    """A profile cannot be used; the text names the file and says what to do."""


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile holds for. Any difference makes it another deployment's.

    Attributes:
        model: path or name of the model, as the server was given it.
        dtype: of its weights, e.g. `bfloat16`.
        gpu: name of the GPU, as NVML gives it, or `virtual GPU`.
        sglang, torch: versions.
        backend: stock's attention backend.
    """

    model: str
    dtype: str
    gpu: str
    sglang: str
    torch: str
    backend: str


class PrefillPoint(msgspec.Struct, frozen=True):
    """`tokens` new tokens behind `prefix` cached ones took `ms`, alone on an engine."""

    tokens: _Count
    prefix: Annotated[int, msgspec.Meta(ge=0)]
    ms: _Ms


class DecodePoint(msgspec.Struct, frozen=True):
    """A step of `batch` requests, which have `context` tokens together, took `ms`."""

    batch: _Count
    context: _Count
    ms: _Ms


class SequenceProfile(msgspec.Struct, frozen=True):
    """The points of engines all of whose batches ran sequence-parallel; at least one of each kind.

    Attributes:
        base_tp: TP size whose shards of the weights the batches ran on; 1: on all of them.
    """

    prefill: Annotated[tuple[PrefillPoint, ...], msgspec.Meta(min_length=1)]
    decode: Annotated[tuple[DecodePoint, ...], msgspec.Meta(min_length=1)]
    base_tp: _Count = 1


class TpProfile(msgspec.Struct, frozen=True):
    """The points of one TP size; at least one of each kind. Those of `sequence` only if they were measured as well.

    Attributes:
        beside_ms: by so much the smallest prompt without a cached beginning holds up a request that decodes on the same
            engine; None: not measured.
    """

    tp: _Count
    prefill: Annotated[tuple[PrefillPoint, ...], msgspec.Meta(min_length=1)]
    decode: Annotated[tuple[DecodePoint, ...], msgspec.Meta(min_length=1)]
    sequence: SequenceProfile | None = None
    beside_ms: _Ms | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of measurements."""

    key: ProfileKey
    sizes: Annotated[tuple[TpProfile, ...], msgspec.Meta(min_length=1)]

    def size(self, tp: int) -> TpProfile:
        """The points of a TP size. Raises KeyError."""
        for size in self.sizes:
            if size.tp == tp:
                return size
        raise KeyError(tp)


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        ProfileError: it cannot be read, or is no profile.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}); measure one: {_COMMAND}") from None
    except msgspec.DecodeError as error:
        raise ProfileError(f"{path} is not a profile ({error}); measure one: {_COMMAND}") from None


def profile_fault(profile: Profile, key: ProfileKey, tp_sizes: tuple[int, ...]) -> str | None:
    """Why a profile is not one of this deployment, by name, or None."""
    differing = [
        f"{name} {getattr(profile.key, name)!r}, which is {getattr(key, name)!r} here"
        for name in ProfileKey.__struct_fields__
        if getattr(profile.key, name) != getattr(key, name)
    ]
    missing = sorted(set(tp_sizes) - {size.tp for size in profile.sizes})
    if differing:
        return f"it was measured with {' and '.join(differing)}; measure one here: {_COMMAND}"
    if missing:
        return f"it has nothing of TP size {', '.join(map(str, missing))}; measure them as well: {_COMMAND}"
    return None


def write_profile(path: Path, profile: Profile) -> None:
    """Put a profile into a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=1))


_COMMAND = "python -m sglang_adapt.profile --help"
