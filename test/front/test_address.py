"""An address that cannot be listened on is found before anything is started."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sglang_adapt.core.ports import hold
from sglang_adapt.front.address import STOCK_HOST, STOCK_PORT, AddressError, hold_address, named_address


def test_a_taken_port() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} cannot be listened on .*in use.*another --port"):
            hold_address("127.0.0.1", port)
    hold_address("127.0.0.1", port).close()


def test_a_held_port_is_for_who_asks_for_just_this_one() -> None:
    with hold(socket.AF_INET, ("127.0.0.1", 0)) as any_port:
        port = any_port.getsockname()[1]
    with hold_address("127.0.0.1", port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))

        async def listen_and_connect() -> None:
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
            async with server:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.read() == b""
                writer.close()

        asyncio.run(listen_and_connect())


def test_a_port_that_was_refused_is_not_held() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressError):
            hold_address("127.0.0.1", port)
    with socket.socket() as another:
        another.bind(("127.0.0.1", port))


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
def test_what_is_no_port(port: int) -> None:
    with pytest.raises(AddressError, match=f"--port {port} is not a port"):
        hold_address("127.0.0.1", port)


def test_what_is_no_address_of_this_machine() -> None:
    with pytest.raises(AddressError, match="is not an address"):
        hold_address("1.2.3.4.5", 41099)
    # TEST-NET-1 (RFC 5737): nobody has it.
    with pytest.raises(AddressError, match="another --host"):
        hold_address("192.0.2.1", 41099)


@pytest.mark.parametrize(
    ("argv", "address"),
    [
        (["--model-path", "x"], (STOCK_HOST, STOCK_PORT)),
        (["--port", "1", "--host=::", "--port=2"], ("::", 2)),
        (["--port", "many"], None),
        (["--por", "1"], None),
        (["--config", "server.yaml", "--port", "1"], None),
        (["--port"], None),
    ],
)
def test_what_a_command_line_says_of_the_address(argv: list[str], address: tuple[str, int] | None) -> None:
    assert named_address(argv) == address
