"""How many tokens requests of each tier give: a running mean, which is what a new one is expected to give."""

from __future__ import annotations

from collections.abc import Container

_FIRST_GUESS = 128.0
_WEIGHT = 0.05
"""Of each request that ends, in the mean."""


class Outputs:
    """See the module."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def expect(self, tier: str, most: int | None) -> float:
        """Tokens that a request will give about, which asks for no more than `most`, if it says so."""
        mean = self._mean.get(tier, _FIRST_GUESS)
        return mean if most is None else min(mean, most)

    def finished(self, tier: str, tokens: int) -> None:
        """A request has given so many."""
        known = self._mean.get(tier, float(tokens))
        self._mean[tier] = known + _WEIGHT * (tokens - known)

    def keep_only(self, tiers: Container[str]) -> None:
        """Forget all other tiers."""
        self._mean = {tier: mean for tier, mean in self._mean.items() if tier in tiers}
