"""Whether the HTTP server will be able to listen, found out before anything is started."""

from __future__ import annotations

import errno
import socket

from sglang_adapt.core.ports import hold


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
