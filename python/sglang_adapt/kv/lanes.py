"""Order of work on a device: a lane is a CUDA stream on a GPU, and nothing on a CPU, where work ends at
once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a lane: reached when all that was put into the lane before it has ended."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Block the calling thread until the mark is reached."""
        if self.event is not None:
            self.event.synchronize()

    def reached(self) -> bool:
        return self.event is None or bool(self.event.query())

    def hold_back(self, stream: Any) -> None:
        """What is put into a CUDA stream from now on starts when the mark is reached. The calling thread goes on."""
        if self.event is not None:
            stream.wait_event(self.event)


NOW = Mark(None)
"""A mark that is reached."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Several marks as one, which is reached when all of them are."""

    marks: Sequence[Mark]

    def wait(self) -> None:
        for mark in self.marks:
            mark.wait()

    def hold_back(self, stream: Any) -> None:
        for mark in self.marks:
            mark.hold_back(stream)


class Lane:
    """A stream of its own on `device`, so that copies run beside an engine's work.

    Use as `with lane.use():` around what is to run in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """A mark after all that the lane holds now."""
        if self._stream is None:
            return NOW
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def after(self, mark: Mark) -> None:
        """What is put into the lane from now on starts when `mark` is reached."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)

    def after_current(self) -> None:
        """What is put into the lane from now on starts after the work of the current stream of its device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
