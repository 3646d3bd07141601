"""What planning remembers from one window to the next: the same in the router and in the simulator.

Lengths of requests that were seen, what was wanted, the price of switches as it was learned, and the rest after one
that could not be made. The clock and the switches are the caller's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from sglang_adapt.core.layout import Layout
from sglang_adapt.policy.demand import Demand, Terms, Unfinished, Window, demands
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.price import Price, Running
from sglang_adapt.policy.situation import CALM, History, Plan, Situation
from sglang_adapt.policy.stages import HANDOVER_MS

WINDOWS = 5
"""Windows by which a rate is judged."""
CALM_S = 3.0
"""A layout that only answers sooner is wanted for this time before it is gone over to, or for `CALM` windows."""
REST_WINDOWS = 5
"""After a switch that was refused the planner waits so many windows."""


_LEARN_HANDOVER = 0.05
"""By so much of the difference, in the logarithm, one hand-over changes what they are believed to take."""
_MOST_HANDOVER_MS = 1000.0


class Pilot:
    """See the module.

    Args:
        price: of a switch, before any has been made.
        interval_s: of a window.
    """

    def __init__(self, price: Price, interval_s: float, *, gives_roles: bool) -> None:
        self._price = price
        self._gives_roles = gives_roles
        self._handover_ms = HANDOVER_MS
        self._unfinished: deque[int] = deque(maxlen=WINDOWS)
        self._interval_s = interval_s
        self._history = History()
        self._demands: dict[str, Demand] = {}
        self._rest = 0
        self._asked = False

    def situation(
        self,
        terms: Sequence[Terms],
        windows: Sequence[Window],
        unfinished: Mapping[str, Unfinished],
        speeds: tuple[Speed, ...],
        gpus: int,
        layout: Layout,
        running: Mapping[str, Running],
        longest_tokens: int,
    ) -> Situation:
        """All that the next plan depends on; the arguments are as in `demand.demands` and `planner.Situation`."""
        asked = demands(terms, windows, unfinished, self._demands)
        self._demands = {demand.terms.tier: demand for demand in asked}
        self._asked = self._asked or any(demand.is_there for demand in asked)
        return Situation(
            demands=asked,
            speeds=speeds,
            gpus=gpus,
            layout=layout,
            running=running,
            price=self._price,
            longest_tokens=longest_tokens,
            horizon_s=WINDOWS * self._interval_s,
            window_s=self._interval_s,
            history=self._history,
            asked=self._asked,
            calm=min(CALM, max(1, math.ceil(CALM_S / self._interval_s))),
            handover_ms=self._handover_ms,
            gives_roles=self._gives_roles,
            steady=self._is_steady(sum(demand.unfinished.requests for demand in asked)),
        )

    def may_follow(self, decided: Plan, *, in_turn: bool = True) -> bool:
        """Note a plan; is a switch to be made now?

        Args:
            in_turn: a window is over; else the plan is one between two windows, and counts for no other one.
        """
        if in_turn:
            self._history = decided.history
            self._unfinished.append(sum(row.demand.unfinished.requests for row in decided.rows))
        if self._rest:
            self._rest -= in_turn
            return False
        return decided.move

    def _is_steady(self, unfinished: int) -> bool:
        """Do about as many requests end as arrive? Else of long answers none has ended yet, and all look short."""
        if len(self._unfinished) < WINDOWS:
            return False
        before = self._unfinished[0]
        return unfinished <= before + max(0.1 * before, 1.5 * math.sqrt(before), 3.0)

    def rest(self) -> None:
        """A switch could not be made: none for `REST_WINDOWS`."""
        self._rest = REST_WINDOWS

    def learn(self, pause_ms: float, kv_bytes: float) -> None:
        """A switch was made, which copied `kv_bytes` and paused requests for `pause_ms`."""
        self._price = self._price.learned(pause_ms, kv_bytes)

    def learn_handover(self, took_ms: float) -> None:
        """A request went from an engine that had read it to one that decodes."""
        took_ms = min(max(took_ms, 0.1), _MOST_HANDOVER_MS)
        self._handover_ms *= (took_ms / self._handover_ms) ** _LEARN_HANDOVER
