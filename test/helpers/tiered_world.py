"""A router with tiers, engines that a test answers for, and a clock that it sets."""

from __future__ import annotations

from router_fakes import World

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation
from sglang_adapt.core.messages import AdmitRequest, RequestReport
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, TpProfile
from sglang_adapt.core.slo import SloConfig, Tier, WhenInfeasible, request_terms
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.admission import Admission
from sglang_adapt.upstream import wire

CONFIG = SloConfig(
    (
        Tier("strict", 100.0, 10.0),
        Tier("picky", 100.0, 10.0, when_infeasible=WhenInfeasible.REJECT, queue_limit=5),
        Tier("night", background=True),
    ),
    "strict",
    background_wait_s=30.0,
)
KEY = ProfileKey("m", "float32", "g", "0.5.17", "2.11.0", "torch_native")
# A token of a prompt takes 1 ms, a step 1 ms a request (and never less than 2).
PROFILE = Profile(
    KEY,
    tuple(
        TpProfile(
            tp,
            (PrefillPoint(1, 0, 1.0), PrefillPoint(1000, 0, 1000.0)),
            (DecodePoint(1, 1, 2.0), DecodePoint(2, 1, 2.0), DecodePoint(100, 1, 100.0), DecodePoint(1, 10**6, 2.0)),
        )
        for tp in (1, 2)
    ),
)


class Tiered(World):
    """A world with tiers and a clock that the test sets."""

    def __init__(self, layout: str = "tp1@0,tp1@1", slots: int = 16, ablation: Ablation = NOTHING_OFF) -> None:
        self.now = 1000.0
        self.reports: list[RequestReport] = []
        settings = TierSettings(CONFIG, "test", KEY, (1, 2), 2, PROFILE, ())
        self.admission = Admission(
            settings,
            {"tp1@0": 1, "tp1@1": 1, "tp2@0-1": 2},
            dict.fromkeys((1, 2), Bounds(1, 512, slots)),
            self.reports.append,
            lambda: self.now,
            ablation,
        )
        super().__init__(layout, self.admission)
        self._tickets = 0
        self.warm()
        for received in self.received.values():
            received.clear()

    def ask(self, tier: str, tokens: int = 8) -> tuple[AdmitRequest, bool, int]:
        """(as it was asked, admitted, retry after) of a request that has just arrived."""
        self._tickets += 1
        terms = request_terms(CONFIG, tier)
        request = AdmitRequest(self._tickets, terms, tokens, 4, self.now)
        answer = self.router.ask(request)
        return request, answer.admitted, answer.retry_after_s

    def arrive(self, rid: str, tier: str, tokens: int = 8) -> bool:
        ticket, admitted, _ = self.ask(tier, tokens)
        if admitted:
            self.router.on_front_message(wire.encode_ticket(rid, ticket))
            self.request(rid, tokens)
        return admitted

    def placed(self) -> dict[str, list[str]]:
        return {name: self.seen(name) for name in self.received if self.received[name]}
