"""Taking running requests out of a stock scheduler and putting them into another one.

`state` says what a request consists of, `pack` turns one into bytes and back, `refusals` names what cannot be carried;
`quiesce` stops a scheduler, `soon` lets one look for messages between batches before that, `held` keeps what it has
given out, `export` and `adopt` are the two ends of a switch, `leave` and `arrive` those of a hand-over while all serve,
`reading` and `early` those of what goes ahead of it, `batch` makes requests run whose KV is there.
`engine.handoff` and `engine.handover` are the ways in.
"""

from sglang_adapt.upstream.handoff.adopt import AdoptError
from sglang_adapt.upstream.handoff.agree import OtherRankFailedError
from sglang_adapt.upstream.handoff.export import ExportError
from sglang_adapt.upstream.handoff.grammar import GrammarError
from sglang_adapt.upstream.handoff.pack import UnpackError

REFUSALS = (AdoptError, ExportError, GrammarError, OtherRankFailedError, UnpackError)
"""Errors that say that nothing has changed."""
