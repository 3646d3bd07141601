"""Whether the HTTP server will be able to listen, found out before anything is started."""

from __future__ import annotations

import argparse
import errno
import socket
from collections.abc import Sequence

from sglang_adapt.core.digits import whole
from sglang_adapt.core.ports import hold

STOCK_HOST = "127.0.0.1"
STOCK_PORT = 30000
"""Stock's own, where neither the command line nor a config file says others."""


class AddressError(ValueError):
    """The HTTP server cannot listen where it is told to; the text says why and what to give instead."""


def hold_address(host: str, port: int) -> socket.socket:
    """Listen for a moment, and keep the port from others until the socket is closed: engines take long to start.

    Raises:
        AddressError: not a port, not an address of this machine, or one that is taken.
    """
    if not 1 <= port <= 65535:
        raise AddressError(f"--port {port} is not a port; give 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"--host {host!r} is not an address ({error}); give one of this machine's") from None
    held = None
    try:
        held = hold(family, address)
        # Two may be bound to an address; only one can listen on it.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if held is not None:
            held.close()
        way_out = "another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "another --host"
        raise AddressError(f"{host}:{port} cannot be listened on ({error.strerror}); give {way_out}") from None
    return held


def named_address(argv: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of a stock command line; None if only stock's parser can tell, as with a config file.

    The first process looks before sglang is loaded, which takes many times as long as to see that a port is taken.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default=STOCK_HOST)
    parser.add_argument("--port", type=whole, default=STOCK_PORT)
    parser.add_argument("--config")
    try:
        said, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError:
        return None
    # Stock takes these two shortened.
    if said.config is not None or any(arg.startswith(("--ho", "--por", "--conf")) for arg in rest):
        return None
    return said.host, said.port
