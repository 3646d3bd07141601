"""What is known of every unfinished request, so that another engine can go on with it: its message and its tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from sglang_adapt.policy.suspects import Record


@dataclass(slots=True)
class Entry:
    """One request.

    Attributes:
        data: the stock message by which it came.
        tokens: about how many tokens its prompt has.
        ids: the output tokens that have passed here, int64.
        deaths: how many engines died while they ran it.
        died_at: how many output tokens had passed here when the last of them did.
    """

    data: bytes
    tokens: int
    ids: array[int] = field(default_factory=lambda: array("q"))
    deaths: int = 0
    died_at: int = 0

    @property
    def record(self) -> Record:
        """What tells whether it may be why they died."""
        return Record(self.deaths, len(self.ids), self.died_at)

    def append(self, decoded: bytes, total: int) -> None:
        """Note new output tokens.

        Args:
            decoded: int64, of which the last are new. Stock's first message of a request begins with the end of its
                prompt, which the detokenizer needs.
            total: how many output tokens the request has now.
        """
        new = total - len(self.ids)
        if new > 0:
            self.ids.frombytes(decoded[len(decoded) - new * self.ids.itemsize :])
