"""An address that cannot be listened on is found before anything is started."""

from __future__ import annotations

import socket

import pytest

from sglang_adapt.front.address import AddressError, check_address


def test_a_taken_port() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} cannot be listened on .*in use.*another --port"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
def test_what_is_no_port(port: int) -> None:
    with pytest.raises(AddressError, match=f"--port {port} is not a port"):
        check_address("127.0.0.1", port)


def test_what_is_no_address_of_this_machine() -> None:
    with pytest.raises(AddressError, match="is not an address"):
        check_address("1.2.3.4.5", 41099)
    # TEST-NET-1 (RFC 5737): nobody has it.
    with pytest.raises(AddressError, match="another --host"):
        check_address("192.0.2.1", 41099)
