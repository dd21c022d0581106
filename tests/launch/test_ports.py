from __future__ import annotations

import socket

import pytest

from baton.launch.ports import listening
from baton.wire.errors import InvalidSetting


def test_whoever_connects_waits_for_one_child_after_the_other() -> None:
    with listening("127.0.0.1", 0, "--port") as listener:
        for _ in range(2):
            with (
                socket.create_connection(("127.0.0.1", listener.port)) as client,
                socket.fromfd(listener.fds[0], socket.AF_INET, socket.SOCK_STREAM) as child,
            ):
                client.sendall(b"early")
                child.settimeout(60)
                accepted, _ = child.accept()
                with accepted:
                    accepted.settimeout(60)
                    assert accepted.recv(5) == b"early"


def test_every_address_of_a_host_has_the_same_port() -> None:
    with listening("", 0, "--port") as listener:
        ports = set()
        for fd in listener.fds:
            with socket.socket(fileno=socket.dup(fd)) as each:
                ports.add(each.getsockname()[1])
        assert ports == {listener.port}


def test_a_port_in_use_is_refused_with_the_flag_to_change() -> None:
    refusal = "127.0.0.1:{}: Address already in use; choose another port with --port"
    with (
        listening("127.0.0.1", 0, "--port") as taken,
        pytest.raises(InvalidSetting, match=refusal.format(taken.port)),
        listening("127.0.0.1", taken.port, "--port"),
    ):
        pass


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", -1), ("no host.invalid", 80)])
def test_an_impossible_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(InvalidSetting, match="cannot listen on"), listening(host, port, "--port"):
        pass
