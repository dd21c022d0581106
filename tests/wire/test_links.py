from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from baton.runtime.process import start_authenticator
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings

Context = zmq.Context[zmq.Socket[bytes]]
Guarded = tuple[zmq.Socket[bytes], str, ClusterKey]
PLAIN = LinkSettings()


def new_key() -> ClusterKey:
    return ClusterKey(*zmq.curve_keypair())


class Opener:
    """Opens sockets of one context and closes them all."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self._opened: list[zmq.Socket[bytes]] = []

    def open(self, kind: int, settings: LinkSettings = PLAIN) -> zmq.Socket[bytes]:
        self._opened.append(links.open_socket(self.context, kind, settings))
        return self._opened[-1]

    def close(self) -> None:
        for link in self._opened:
            link.close()
        self.context.term()


@pytest.fixture
def sockets() -> Iterator[Opener]:
    sockets = Opener()
    yield sockets
    sockets.close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    """A listening socket that only programs with the key may talk to."""
    sockets = Opener()
    key = new_key()
    authenticator = start_authenticator(sockets.context, key)
    assert authenticator is not None
    settings = LinkSettings(cluster_key=key)
    listener = sockets.open(zmq.PULL, settings)
    address = links.bind(listener, "127.0.0.1", 0, settings)
    yield listener, address, key
    authenticator.stop()
    sockets.close()


def test_no_link_has_the_heartbeats_by_which_libzmq_aborts_the_process(sockets: Opener) -> None:
    link = sockets.open(zmq.ROUTER)
    assert link.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert link.getsockopt(zmq.TCP_KEEPALIVE) == 1


def test_a_peer_with_the_key_gets_through(sockets: Opener, guarded: Guarded) -> None:
    listener, address, key = guarded
    settings = LinkSettings(cluster_key=key)
    peer = sockets.open(zmq.PUSH, settings)
    links.connect(peer, address, settings)
    peer.send(b"hello")
    assert listener.poll(5000)
    assert listener.recv() == b"hello"


def test_a_peer_with_another_key_gets_nothing_through(sockets: Opener, guarded: Guarded) -> None:
    listener, address, key = guarded
    own = new_key()
    for server_key in (key.public, own.public):
        peer = sockets.open(zmq.PUSH)
        peer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        peer.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        peer.connect(address)
        peer.send(b"let me in")
    assert not listener.poll(400)


def test_a_peer_without_a_key_gets_nothing_through(sockets: Opener, guarded: Guarded) -> None:
    listener, address, _ = guarded
    peer = sockets.open(zmq.PUSH)
    links.connect(peer, address, PLAIN)
    peer.send(b"let me in")
    assert not listener.poll(400)


def test_a_frame_above_the_limit_does_not_arrive_and_costs_others_nothing(sockets: Opener) -> None:
    limited = LinkSettings(max_message_bytes=1000)
    listener = sockets.open(zmq.PULL, limited)
    address = links.bind(listener, "127.0.0.1", 0, limited)
    large, small = (sockets.open(zmq.PUSH) for _ in range(2))
    links.connect(large, address, PLAIN)
    large.send(b"x" * 1001)
    assert not listener.poll(300)
    links.connect(small, address, PLAIN)
    small.send(b"x" * 1000)
    assert listener.poll(5000)
    assert len(listener.recv()) == 1000


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_listening_beyond_loopback_needs_a_key(sockets: Opener, host: str) -> None:
    with pytest.raises(InvalidSetting, match="baton key"):
        links.bind(sockets.open(zmq.ROUTER), host, 0, PLAIN)
    links.require_key_beyond_loopback(host, new_key())


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("8.8.8.8", False)]
)
def test_loopback_addresses_are_recognised(host: str, expected: bool) -> None:
    assert links.is_loopback(host) is expected


def test_a_host_that_does_not_resolve_is_an_invalid_setting() -> None:
    with pytest.raises(InvalidSetting, match="no such host"):
        links.is_loopback("no such host")


def test_a_taken_port_is_an_invalid_setting(sockets: Opener) -> None:
    address = links.bind(sockets.open(zmq.ROUTER), "127.0.0.1", 0, PLAIN)
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(InvalidSetting, match=str(port)):
        links.bind(sockets.open(zmq.ROUTER), "127.0.0.1", port, PLAIN)


def test_an_unsent_message_does_not_keep_a_program_alive(sockets: Opener) -> None:
    peer = sockets.open(zmq.PUSH)
    links.connect(peer, "tcp://127.0.0.1:9", PLAIN)
    peer.send(b"never")
    sockets.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:5", "tcp://127.0.0.1:5"), ("tcp://[::1]:5", "tcp://[::1]:5"), ("h:1", "tcp://h:1")],
)
def test_addresses_are_normalised(address: str, expected: str) -> None:
    assert links.parse_address(address, "--router") == expected


@pytest.mark.parametrize("address", ["", "host", "host:port", "host:99999", "ipc://x:1", "tcp://h:1/path", ":5"])
def test_an_address_that_cannot_be_dialled_names_its_setting(address: str) -> None:
    with pytest.raises(InvalidSetting, match="--router"):
        links.parse_address(address, "--router")
