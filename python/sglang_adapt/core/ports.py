"""TCP ports that are kept for somebody who listens on them later."""

from __future__ import annotations

import socket


def hold(family: int, address: tuple[object, ...]) -> socket.socket:
    """Keep a port from everybody who does not ask for just this one, until the socket is closed.

    The kernel gives it neither to connections that go out nor to those who ask for any free port. Who asks for it
    with SO_REUSEADDR, as servers do (asyncio, uvloop, libuv, torch's TCPStore), can listen on it meanwhile.

    Args:
        family: of the address, such as `socket.AF_INET`.
        address: as for `socket.bind`; port 0 is any free one (`getsockname()` says which).

    Raises:
        OSError: the address is not one of this machine's, or is taken.
    """
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held
