"""Requests of every kind that a move must carry, and how to bring them into every state; run in a node's process."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from handoff_node import Asked, Node, Stream

from sglang_adapt.core import handoff as messages

NEW_TOKENS = 48
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
TALK = "The old lighthouse keeper told the children about the storm that"


def prompt(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(count)]


def running(node: Node) -> dict[str, Asked]:
    """Requests that are decoding when they move."""
    talk = node.encode(TALK)
    shared = prompt(40, 1)
    return {
        "greedy": Asked(talk, {"max_new_tokens": NEW_TOKENS}),
        "logprobs": Asked(shared + prompt(3, 3), {"max_new_tokens": NEW_TOKENS}, logprobs_from=0, top=2),
        "stop": Asked(talk + prompt(2, 4), {"max_new_tokens": NEW_TOKENS, "stop": _stop_of(node)}),
        "json": Asked(talk, {"max_new_tokens": NEW_TOKENS, "json_schema": SCHEMA, "ignore_eos": False}),
        "n2.0": Asked(shared, {"max_new_tokens": NEW_TOKENS, "n": 2}),
        "n2.1": Asked(shared, {"max_new_tokens": NEW_TOKENS, "n": 2}),
        "seeded": Asked(talk, {"max_new_tokens": NEW_TOKENS, "temperature": 0.9, "sampling_seed": 77}),
        "seeded.p": Asked(talk, {"max_new_tokens": NEW_TOKENS, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 5}),
        "penalised": Asked(
            talk,
            {
                "max_new_tokens": NEW_TOKENS,
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.4,
                "presence_penalty": 0.3,
                "min_new_tokens": 10,
            },
        ),
    }


def late() -> dict[str, Asked]:
    """A prompt that is read in many chunks, with its logprobs, and requests that wait behind it."""
    return {
        "long": Asked(prompt(1400, 8), {"max_new_tokens": 12}, logprobs_from=1300, top=1),
        "waits": Asked(prompt(50, 9), {"max_new_tokens": 12}),
        "waits.json": Asked(prompt(20, 10), {"max_new_tokens": 24, "json_schema": SCHEMA, "ignore_eos": False}),
    }


_stop: list[str] = []


def _stop_of(node: Node) -> str:
    """Two tokens that the greedy answer to the `stop` request has late."""
    if not _stop:
        node.send("tp1@0", "probe", Asked(node.encode(TALK) + prompt(2, 4), {"max_new_tokens": NEW_TOKENS}))
        _stop.append(node.text(node.finish()["probe"].ids[NEW_TOKENS - 8 : NEW_TOKENS - 6]))
    return _stop[0]


def everything(node: Node) -> dict[str, Asked]:
    return running(node) | late()


def start(node: Node, engines: Sequence[str], tokens: int) -> None:
    """Send everything to the engines; returns when some decode, one is being read, and some wait."""
    first = running(node)
    for index, (rid, asked) in enumerate(first.items()):
        node.send(engines[index % len(engines)], rid, asked)
    node.pump_tokens(list(first), tokens)
    for rid, asked in late().items():
        node.send(engines[0], rid, asked)
    wait_for_a_chunk(node, engines[0])


def wait_for_a_chunk(node: Node, engine: str) -> None:
    """Returns when the engine has read a part of a prompt and has more to read."""
    for _ in range(1000):
        if node.engines[engine].call("is_prefilling")[0]:
            return
    raise TimeoutError(f"{engine} does not begin with the long prompt")


def unswitched(node: Node, engine: str) -> dict[str, Stream]:
    """The answers of one engine that is left alone."""
    node.lease_all([engine])
    start(node, [engine], 1)
    done = node.finish()
    node.take_back([engine])
    return done


def differences(got: dict[str, Stream], want: dict[str, Stream]) -> dict[str, str]:
    """Request id to what differs; logprobs may by 1e-4."""
    wrong = {}
    for rid, expected in want.items():
        stream = got[rid]
        for name in ("ids", "decode_ids", "finished", "top"):
            if getattr(stream, name) != getattr(expected, name):
                wrong[rid] = f"{name}: {getattr(stream, name)} instead of {getattr(expected, name)}"
                break
        for name in ("logprobs", "input_logprobs"):
            pairs = list(zip(getattr(stream, name), getattr(expected, name), strict=True))
            if any((a is None) != (b is None) or (a is not None and abs(a - b) > 1e-4) for a, b in pairs):
                wrong[rid] = f"{name}: {pairs}"
    return wrong


# -- scenarios; each leaves all engines idle and without leases


def there_and_back(
    node: Node, sources: list[str], dests: list[str], tokens: int
) -> tuple[dict[str, Stream], dict[str, str]]:
    """Everything moves from `sources` to `dests` and, some tokens later, back; returns streams and first states."""
    node.lease_all(sources)
    start(node, sources, tokens)
    node.kinds.clear()
    node.switch(sources, dests)
    kinds = dict(node.kinds)
    before = sum(len(stream.ids) for stream in node.streams.values())
    node.pump(lambda: sum(len(stream.ids) for stream in node.streams.values()) >= before + 40)
    node.switch(dests, sources)
    done = node.finish()
    node.check_idle()
    node.take_back(sources)
    return done, kinds


def exported_and_restored(node: Node, engine: str, tokens: int) -> tuple[dict[str, Stream], list[bool]]:
    """Two exports that are undone; returns streams and what flushing the cache meanwhile said."""
    node.lease_all([engine])
    start(node, [engine], tokens)
    flushed = []
    for _ in range(2):
        node.export([engine])
        node.take_back([engine])
        flushed += node.engines[engine].call("flush")
        node.lease_all([engine])
        node.restore(engine)
        before = sum(len(stream.ids) for stream in node.streams.values())
        node.pump(lambda before=before: sum(len(stream.ids) for stream in node.streams.values()) >= before + 20)
    done = node.finish()
    node.check_idle()
    node.take_back([engine])
    return done, flushed


def adopt_fails(node: Node, source: str, dest: str, rank: int) -> tuple[dict[str, Stream], list[str], bool]:
    """One rank of the destination fails at its last check, so all goes back to the source.

    Returns streams, what the destination said, and whether its ranks have what they had before.
    """
    node.lease_all([source])
    start(node, [source], 5)
    exported = node.export([source])
    node.take_back([source])
    call = node.place(exported, dest, {request.rid for request in exported[source][0].requests})
    engine = node.engines[dest]
    before = engine.call("idle_state")
    engine.call("fail_next_prepare", str(rank))
    said = []
    try:
        node.adopt(dest, call)
    except RuntimeError as error:
        said = str(error).split("\n")
    unchanged = engine.call("idle_state") == before
    node.cancel(dest, call)
    node.lease_all([source])
    node.restore(source)
    done = node.finish()
    node.check_idle()
    node.take_back([source])
    return done, said, unchanged


def few_slots(node: Node, source: str, dest: str, slots: int) -> tuple[dict[str, Stream], list[str]]:
    """A switch to an engine with few free request slots; returns streams and the ids that had to wait."""
    node.lease_all([source])
    start(node, [source], 5)
    node.engines[dest].call("few_slots", str(slots))
    spilled = node.switch([source], [dest])
    done = node.finish()
    node.check_idle()
    node.take_back([dest])
    return done, spilled


def aborted_while_held(node: Node, source: str, dest: str) -> tuple[dict[str, Stream], list[str], list[str]]:
    """Clients give up: before the adopt `stop` and `waits`, after it `greedy`; then all is moved on.

    Returns streams, the ids that were adopted, and those that the source's release names as given up.
    """
    node.lease_all([source])
    start(node, [source], 5)
    exported = node.export([source])
    node.take_back([source])
    call = node.place(exported, dest, {request.rid for request in exported[source][0].requests})
    engine = node.engines[source]
    node.abort(source, "stop")
    engine.handoff(messages.AbortHeldCall(node.epoch, "waits.json"))
    early = ["stop", *engine.handed(messages.AbortHeldAnswer)[0].aborted]
    node.lease_all([dest])
    adopted = node.adopt(dest, messages.AdoptCall(call.epoch, call.requests, call.blocks, aborted=early))[0].adopted
    node.abort(source, "greedy")
    given_up = node.release(source, adopted)[0].aborted
    for rid in given_up:
        node.abort(dest, rid)
    node.take_back([source])
    done = node.finish()
    node.check_idle()
    node.take_back([dest])
    return done, adopted, given_up


def aborted_and_restored(node: Node, engine: str) -> dict[str, Stream]:
    """Clients give up one request in each state while it is held; the export is undone."""
    node.lease_all([engine])
    start(node, [engine], 5)
    node.export([engine])
    for rid in ("stop", "long", "waits.json"):
        node.abort(engine, rid)
    node.restore(engine)
    done = node.finish()
    node.check_idle()
    node.take_back([engine])
    return done


def some_stay(node: Node, source: str, dest: str, back: bool) -> tuple[dict[str, Stream], list[dict[str, str]]]:
    """One request cannot be carried and runs on at the source, the others move, or come back; returns streams and the
    reasons that were given before and at the export."""
    node.lease_all([source])
    start(node, [source], 5)
    engine = node.engines[source]
    engine.call("refuse", "penalised")
    engine.handoff(messages.UnexportableCall())
    reasons = [engine.handed(messages.UnexportableAnswer)[0].reasons]
    exported = node.export([source])
    reasons.append(exported[source][0].staying)
    if back:
        node.restore(source)
    else:
        node.take_back([source], 150)
        call = node.place(exported, dest, {request.rid for request in exported[source][0].requests})
        node.lease_all([dest])
        node.release(source, node.adopt(dest, call)[0].adopted)
    done = node.finish()
    node.check_idle()
    node.take_back([source, dest])
    return done, reasons


def into_a_busy_engine(node: Node, source: str, dest: str) -> dict[str, Stream]:
    """Requests join an engine that is decoding others, and reading a long prompt of its own."""
    node.lease_all([dest], 330)
    node.lease_all([source])
    first = running(node)
    for index, (rid, asked) in enumerate(first.items()):
        node.send((source, dest)[index % 2], rid, asked)
    node.pump_tokens(list(first), 6)
    for rid, asked in late().items():
        node.send(dest if rid == "long" else source, rid, asked)
    wait_for_a_chunk(node, dest)
    exported = node.export([source])
    node.take_back([source])
    call = node.place(exported, dest, {request.rid for request in exported[source][0].requests})
    node.lease_all([dest])
    node.release(source, node.adopt(dest, call)[0].adopted)
    node.take_back([source])
    done = node.finish()
    node.check_idle()
    node.take_back([dest])
    return done


def wrong_messages(node: Node, source: str, dest: str) -> tuple[dict[str, Stream], dict[str, str]]:
    """Messages that are stale, or come twice, or would lose a request; returns streams and what was said to each."""
    said: dict[str, str] = {}

    def refused(name: str, engine: str, call: messages.HandoffCall) -> None:
        node.engines[engine].handoff(call)
        try:
            node.engines[engine].collect()
        except RuntimeError as error:
            said[name] = str(error).split("\n")[0]

    node.lease_all([source])
    start(node, [source], 5)
    exported = node.export([source])
    epoch = node.epoch
    refused("export again", source, messages.ExportCall(epoch + 1))
    refused("export of an old epoch", source, messages.ExportCall(epoch))
    refused("restore of another epoch", source, messages.RestoreCall(epoch - 1))
    refused("release of another epoch", source, messages.ReleaseCall(epoch + 1, []))
    refused("release that loses", source, messages.ReleaseCall(epoch, ["greedy"]))
    node.take_back([source])
    call = node.place(exported, dest, {request.rid for request in exported[source][0].requests})
    one_less = [rows[:-1] for rows in call.blocks]
    refused("blocks for fewer requests", dest, messages.AdoptCall(epoch, call.requests, one_less))
    short = [[rows[0][:-1], *rows[1:]] for rows in call.blocks]
    refused("too few blocks", dest, messages.AdoptCall(epoch, call.requests, short))
    node.lease_all([dest])
    node.adopt(dest, call)
    refused("adopt again", dest, call)
    refused("adopt of an old epoch", dest, messages.AdoptCall(epoch - 1, [], [[] for _ in call.blocks]))
    node.release(source, [request.rid for request in call.requests])
    refused("release again", source, messages.ReleaseCall(epoch, []))
    node.take_back([source])
    done = node.finish()
    node.check_idle()
    node.take_back([dest])
    return done, said


def many_switches(node: Node, layouts: list[list[str]], rounds: int, seed: int) -> tuple[list[dict[str, str]], int]:
    """Requests of all kinds at random times under a switch after every few tokens; returns differences, and tokens."""
    rng = random.Random(seed)
    want = unswitched(node, layouts[0][0])
    asked = everything(node)
    wrong, total, layout = [], 0, layouts[0]
    node.lease_all(layout)
    for _ in range(rounds):
        rids = list(asked)
        rng.shuffle(rids)
        while rids or any(stream.finished is None for stream in node.streams.values()):
            for rid in [rids.pop() for _ in range(min(len(rids), rng.randrange(4)))]:
                node.send(rng.choice(layout), rid, asked[rid])
            before = sum(len(stream.ids) for stream in node.streams.values())
            goal = before + rng.randrange(1, 25)
            node.pump(
                lambda goal=goal: (
                    sum(len(stream.ids) for stream in node.streams.values()) >= goal
                    or all(stream.finished is not None for stream in node.streams.values())
                )
            )
            following = rng.choice([other for other in layouts if other is not layout])
            node.switch(layout, following)
            layout = following
        done = node.finish()
        total += sum(len(stream.ids) for stream in done.values())
        wrong.append(differences(done, want))
        node.check_idle()
    node.take_back(layout)
    return wrong, total
