from __future__ import annotations

import socket

import pytest

from launch.ports import ReservedPort
from wire.errors import InvalidSetting


def listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_a_child_can_listen_on_a_reserved_port_again_and_again() -> None:
    with ReservedPort("127.0.0.1", 0, "--port") as reserved:
        for _ in range(2):
            with listen(reserved.port):
                socket.create_connection(("127.0.0.1", reserved.port)).close()


def test_a_port_in_use_is_refused_with_the_flag_to_change() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSetting, match=rf"127.0.0.1:{port}: .*in use; choose another port with --port"):
            ReservedPort("127.0.0.1", port, "--port")


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", -1), ("no host.invalid", 80)])
def test_an_impossible_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(InvalidSetting, match="cannot listen on"):
        ReservedPort(host, port, "--port")
