"""The grammar of a carried request: compiled by the engine that takes it up, then fed with the tokens so far."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class GrammarError(RuntimeError):
    """A carried request's grammar cannot be built here; the text names the request and says why."""


def rebuild_grammar(scheduler: Any, req: Any) -> None:
    """Give `req` its grammar, in the state after its output tokens. Waits for the compiler if this engine has not met
    the grammar yet; nothing but its cache of grammars changes.

    Raises:
        GrammarError: the engine has no grammar backend, or the grammar does not compile or refuses a token.
    """
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    manager = scheduler.grammar_manager
    queued = manager.process_req_with_grammar(req)
    if queued:
        manager.grammar_queue.remove(req)
    grammar = req.grammar
    if isinstance(grammar, Future):
        grammar = grammar.result()
        manager.grammar_backend.set_cache(req.grammar_key, grammar.copy())
        req.grammar = grammar
        manager._apply_request_reasoning_budget(req)
    if grammar is None or isinstance(grammar, InvalidGrammarObject):
        reason = "there is no grammar backend" if grammar is None else grammar.error_message
        raise GrammarError(f"request {req.rid}: its grammar cannot be built here: {reason}")
    try:
        for token in req.output_ids:
            grammar.accept_token(token)
    except Exception as error:
        raise GrammarError(f"request {req.rid}: its grammar refuses its own tokens: {error}") from error
