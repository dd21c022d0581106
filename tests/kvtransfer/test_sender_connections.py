"""The receivers of a prefill node: who is greeted, who waits, who is refused and why, and whose transport ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from baton.kvtransfer import sender_connections
from baton.kvtransfer.integrity import NONE, XXH3
from baton.kvtransfer.messages import SENDER_TO_RECEIVER, HandoffName, PeerHello, PeerRefusal, PeerWelcome, Renew
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.sender_connections import SenderConnections, SenderOpener
from baton.kvtransfer.transports.base import Starting
from baton.wire.errors import Refused
from tests.kvtransfer.pair import sending_facts
from tests.kvtransfer.pools import LAYOUT, LEASE_S
from tests.request_keys import A

HELLO = PeerHello("D", 72, 71, "model-a", LAYOUT, 8, XXH3, this_process(), ())
OTHER = replace(this_process(), pid=1)


class Node:
    """The connections of a node, and what they do to its socket, its opener and its pusher."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, object]] = []
        self.retired: list[tuple[object, str]] = []
        self.error: Exception | None = None
        self.writers: tuple[Any, ...] = ()
        self.is_closed = False
        self.failure: zmq.ZMQError | None = None
        self.connections = SenderConnections(
            sending_facts(), cast("zmq.Socket[bytes]", self), cast("SenderOpener", self), cast("Pusher", self)
        )

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent.append((frames[0], SENDER_TO_RECEIVER.decode(frames[1])))

    def open(self, hello: PeerHello) -> tuple[str, Any]:
        if self.error is not None:
            raise self.error
        return "memory", SimpleNamespace(writers=self.writers)

    def retire(self, sender: object, reason: str) -> None:
        self.retired.append((sender, reason))

    def wait_on(self) -> list[str]:
        return ["an agent"]

    def close(self) -> None:
        self.is_closed = True

    def said(self) -> list[tuple[bytes, object]]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_receiver_that_fits_is_welcomed_with_the_processes_that_write(node: Node) -> None:
    for writers, named in (((), (this_process(),)), ((OTHER,), (OTHER,))):
        node.writers = writers
        peer = node.connections.greet(b"d", HELLO, 1.0)
        assert peer is not None
        assert (peer.peer_id, peer.hello, peer.is_connected) == (b"d", HELLO, True)
        assert node.connections.peer(b"d") is peer
        assert node.said() == [(b"d", PeerWelcome("P", 71, "memory", named))]
        assert node.connections.peers_by(peer.sender) == [peer]
    assert (len(node.connections), node.connections.is_waiting(b"d")) == (1, False)
    assert node.connections.wait_on() == [node, "an agent"]
    assert node.connections.peers_by(cast("Any", object())) == []


def test_another_hello_ends_the_transport_of_the_first(node: Node) -> None:
    first = node.connections.greet(b"d", HELLO, 1.0)
    assert node.connections.greet(b"d", HELLO, 2.0) is not first
    assert first is not None
    assert (first.is_connected, node.retired) == (False, [(first.sender, "the receiver said hello again")])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sender_epoch": 70}, "P has restarted since epoch 70"),
        ({"fingerprint": "model-b"}, "model-b"),
        ({"layout": replace(LAYOUT, block_size=8)}, "D"),
        ({"checksum": NONE}, f"KV checksum is {XXH3} here and {NONE} at D"),
    ],
)
def test_a_receiver_that_does_not_fit_is_told_why(node: Node, changes: dict[str, Any], reason: str) -> None:
    first = node.connections.greet(b"d", HELLO, 1.0)
    with pytest.raises(Refused, match=reason):
        node.connections.greet(b"d", replace(HELLO, **changes), 2.0)
    assert node.connections.peer(b"d") is first, "nothing has changed"


def test_a_hello_waits_until_the_transport_is_there_or_its_lease_is_over(node: Node) -> None:
    node.error = Starting("the agent starts")
    for peer_id in (b"d", b"e"):
        assert node.connections.greet(peer_id, HELLO, 1.0) is None
    assert (node.connections.is_waiting(b"d"), len(node.connections), node.said()) == (True, 0, [])
    assert node.connections.greet_waiting(1.0 + LEASE_S - 0.1) == []
    assert node.connections.is_waiting(b"d")
    node.connections.drop(b"e", "gone")
    assert not node.connections.is_waiting(b"e")
    assert node.connections.greet_waiting(1.0 + LEASE_S) == []
    assert node.said() == [(b"d", PeerRefusal("the agent starts"))]
    assert not node.connections.is_waiting(b"d")


def test_those_that_wait_are_welcomed_or_refused_when_that_is_known(node: Node) -> None:
    node.error = Starting("the agent starts")
    for peer_id in (b"d", b"e"):
        node.connections.greet(peer_id, HELLO, 1.0)
    node.error = None
    assert [peer.peer_id for peer in node.connections.greet_waiting(2.0)] == [b"d", b"e"]
    assert not node.connections.is_waiting(b"d")
    assert node.connections.greet_waiting(2.0) == []
    node.error = Starting("the agent starts")
    node.connections.greet(b"f", HELLO, 3.0)
    node.said()
    node.error = Refused("nothing in common")
    assert node.connections.greet_waiting(3.5) == []
    assert node.said() == [(b"f", PeerRefusal("nothing in common"))]
    assert not node.connections.is_waiting(b"f")


def test_a_bounded_number_of_hellos_waits(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_connections, "_MAX_WAITING", 1)
    node.error = Starting("the agent starts")
    assert node.connections.greet(b"d", HELLO, 1.0) is None
    with pytest.raises(Starting):
        node.connections.greet(b"e", HELLO, 1.0)
    assert not node.connections.is_waiting(b"e")


def test_who_has_not_said_hello_is_no_peer(node: Node) -> None:
    with pytest.raises(Refused, match="first message must be PeerHello"):
        node.connections.peer(b"d")


def test_a_peer_that_sends_bad_messages_is_told_so_and_dropped(node: Node) -> None:
    peer, other = (node.connections.greet(peer_id, HELLO, 1.0) for peer_id in (b"d", b"e"))
    assert peer is not None
    node.said()
    node.connections.reject(b"d", "x" * 1001)
    assert node.said() == [(b"d", PeerRefusal("x" * 1000))]
    assert node.retired == [(peer.sender, "the receiver sent a bad message")]
    assert (peer.is_connected, len(node.connections), node.connections.peer(b"e")) == (False, 1, other)


def test_a_peer_whose_transport_failed_hears_of_it_last(node: Node) -> None:
    peer = node.connections.greet(b"d", HELLO, 1.0)
    assert peer is not None
    node.said()
    node.connections.end_with_refusal(peer, "y" * 1001)
    assert (node.said(), peer.is_connected, node.retired) == ([], False, [(peer.sender, "y" * 1001)])
    node.connections.flush_refusals()
    assert node.said() == [(b"d", PeerRefusal("y" * 1000))]
    node.connections.flush_refusals()
    assert node.said() == []


def test_each_peer_hears_of_its_own_handoffs(node: Node) -> None:
    names = [HandoffName(*A)]
    for peer_id in (b"d", b"e"):
        node.connections.greet(peer_id, HELLO, 1.0)
    node.said()
    node.connections.renew({b"d": names})
    assert node.said() == [(b"d", Renew(tuple(names))), (b"e", Renew(()))]


def test_what_a_peer_does_not_read_is_dropped_and_one_that_is_gone_too(node: Node) -> None:
    peer = node.connections.greet(b"d", HELLO, 1.0)
    assert peer is not None
    for error, is_connected in ((zmq.Again(), True), (zmq.ZMQError(zmq.EHOSTUNREACH), False)):
        node.failure = error
        node.connections.send(b"d", Renew(()))
        assert peer.is_connected is is_connected
    assert node.retired == [(peer.sender, "the receiver is not reachable")]


def test_a_node_that_stops_ends_each_transport(node: Node) -> None:
    peers = [node.connections.greet(peer_id, HELLO, 1.0) for peer_id in (b"d", b"e")]
    node.connections.close()
    assert node.retired == [(peer.sender, "this node stops") for peer in peers if peer is not None]
    assert (len(node.connections), node.is_closed) == (0, True)
