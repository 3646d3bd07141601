"""Whether the HTTP server will be able to listen, found out before anything is started."""

from __future__ import annotations

import errno
import socket


class AddressError(ValueError):
    """The HTTP server cannot listen where it is told to; the text says why and what to give instead."""


def check_address(host: str, port: int) -> None:
    """Listen for a moment.

    Raises:
        AddressError: not a port, not an address of this machine, or one that is taken.
    """
    if not 1 <= port <= 65535:
        raise AddressError(f"--port {port} is not a port; give 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"--host {host!r} is not an address ({error}); give one of this machine's") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            # Two may be bound to an address; only one can listen on it.
            probe.listen(1)
        except OSError as error:
            way_out = "another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "another --host"
            raise AddressError(f"{host}:{port} cannot be listened on ({error.strerror}); give {way_out}") from None
