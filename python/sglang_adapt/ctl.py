"""Look at and change a running server: `python -m sglang_adapt.ctl layout [LAYOUT] [--strategy auto]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from sglang_adapt.core.urls import server_url
from sglang_adapt.policy.carry import Strategy

_GET_TIMEOUT_S = 60.0
_SWITCH_TIMEOUT_S = 600.0


def make_parser() -> argparse.ArgumentParser:
    """Its command line."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adapt.ctl", description=__doc__)
    parser.add_argument(
        "--url", type=server_url, default="http://127.0.0.1:30000", help="the server (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="the server's admin key, if it has one")
    # Before the command, or behind it.
    behind = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    behind.add_argument("--url", type=server_url, help=argparse.SUPPRESS)
    behind.add_argument("--api-key", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    layout = commands.add_parser(
        "layout", parents=[behind], help="print the layout that serves; with LAYOUT, go over to it first"
    )
    layout.add_argument(
        "layout", nargs="?", metavar="LAYOUT", help="e.g. tp1@0,tp1@1, tp2@0-1 or tp1@0:prefill,tp1@1:decode"
    )
    layout.add_argument(
        "--strategy",
        choices=[strategy.value for strategy in Strategy],
        help=f"what becomes of running requests (default: {Strategy.AUTO}; layout auto takes no other)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if it was done, 1 if the server refused, 2 if there is none."""
    options = make_parser().parse_args(argv)
    url = f"{options.url}/adapt/layout"
    body = None
    if options.layout is not None:
        order = {"layout": options.layout, "reason": "asked for by ctl"}
        if options.strategy is not None:
            order["strategy"] = options.strategy
        body = json.dumps(order).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    if options.api_key is not None:
        request.add_header("Authorization", f"Bearer {options.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_GET_TIMEOUT_S if body is None else _SWITCH_TIMEOUT_S) as answer:
            said = json.dumps(json.load(answer), indent=2)
    except urllib.error.HTTPError as error:
        way_out = "; give the server's key as --api-key" if error.code == 401 else ""
        print(f"refused ({error.code}): {_message(error.read())}{way_out}", file=sys.stderr)
        return 1
    except OSError as error:
        # urllib wraps what the system says.
        why = getattr(error, "reason", error)
        print(
            f"no answer from {url}: {why}; is it up (it listens once all engines are warm), and --url its address?",
            file=sys.stderr,
        )
        return 2
    try:
        print(said, flush=True)
    except BrokenPipeError:
        # Who reads it, such as `head`, has enough. Python would complain of the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _message(body: bytes) -> str:
    """The text of an error's body, whoever wrote it."""
    try:
        fields = json.loads(body)
        return str(fields.get("message") or fields.get("error") or fields)
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:500]


if __name__ == "__main__":
    sys.exit(main())
