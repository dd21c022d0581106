"""The connections of a decode node to prefill nodes: over real sockets, and with sockets that a test has in hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from baton.kvtransfer import receiver_connections
from baton.kvtransfer.messages import RECEIVER_TO_SENDER, Endpoint, HandoffName, PeerHello, PeerWelcome, Renew
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.wire import links
from baton.wire.errors import Refused
from baton.wire.messages.legs import PrefillPeer
from tests.kvtransfer.pair import receiving_facts
from tests.request_keys import A
from tests.wire.turned_bit import turned_once

SETTINGS = links.LinkSettings()


class ReadyReceiver:
    """A receiver that has nothing to wait for."""

    endpoint = Endpoint("loopback", "D")
    is_ready = True


def test_a_peer_is_greeted_although_a_bit_of_the_handshake_was_turned() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener, address = links.listen(context, zmq.ROUTER, "127.0.0.1", 0, SETTINGS)
    connections = ReceiverConnections(receiving_facts(), context, SETTINGS, [cast(Any, ReadyReceiver())])
    try:
        with turned_once(int(address.rsplit(":", 1)[1])) as damaged:
            connections.to(PrefillPeer("P", 1, damaged), time.monotonic())
            deadline_s = time.monotonic() + 20.0
            while not listener.poll(10):
                assert time.monotonic() < deadline_s
                connections.dial_broken_again(time.monotonic())
            assert isinstance(RECEIVER_TO_SENDER.decode(listener.recv_multipart()[-1]), PeerHello)
            connections.close()
    finally:
        listener.close()
        connections.close()
        context.term()


PEER = PrefillPeer("P", 71, "tcp://prefill:1")


class Links:
    """Sockets that note what is sent, and watches that say what a test wants."""

    def __init__(self) -> None:
        self.dialled: list[Any] = []
        self.error: Exception | None = None

    def open(self, context: object, kind: int, settings: object) -> tuple[Any, Any]:
        if self.error is not None:
            raise self.error
        sent: list[object] = []
        watch = SimpleNamespace(has_broken=False, is_made=False, look=lambda: None, monitor="monitor", is_closed=False)
        socket = SimpleNamespace(closed=False, sent=sent, watch=watch, inbox=list[bytes](), is_full=False)
        watch.close = lambda: setattr(watch, "is_closed", True)
        socket.close = lambda: setattr(socket, "closed", True)
        socket.send = partial(self._send, socket)
        socket.recv = partial(self._receive, socket)
        self.dialled.append(socket)
        return socket, watch

    def _send(self, socket: Any, frame: bytes, flags: int) -> None:
        if socket.is_full:
            raise zmq.Again
        socket.sent.append(RECEIVER_TO_SENDER.decode(frame))

    def _receive(self, socket: Any, flags: int) -> bytes:
        if not socket.inbox:
            raise zmq.Again
        found: bytes = socket.inbox.pop(0)
        return found


class ListeningReceiver:
    """A receiver by "memory" that waits on a socket."""

    def __init__(self) -> None:
        self.endpoint, self.is_ready = Endpoint("memory", "first"), True

    def wait_on(self) -> Sequence[str]:
        return ("blocks",)


@pytest.fixture
def links_made(monkeypatch: pytest.MonkeyPatch) -> Links:
    made = Links()
    monkeypatch.setattr(receiver_connections, "open_watched", made.open)
    monkeypatch.setattr(links, "connect", lambda socket, address, settings: str(address))
    return made


@pytest.fixture
def receiver() -> ListeningReceiver:
    return ListeningReceiver()


@pytest.fixture
def connections(links_made: Links, receiver: ListeningReceiver) -> ReceiverConnections:
    return ReceiverConnections(receiving_facts(), cast(Any, None), SETTINGS, [cast(Any, receiver)])


WELCOME = PeerWelcome("P", 71, "memory", (this_process(),))


def test_a_peer_is_dialled_once_and_told_what_this_node_is(connections: ReceiverConnections, links_made: Links) -> None:
    one = connections.to(PEER, 10.0)
    assert connections.to(PEER, 12.0) is one
    assert (one.life, one.dialled_s, one.used_s, one.has_sent_hello) == (("P", 71), 10.0, 12.0, True)
    (socket,) = links_made.dialled
    facts = receiving_facts()
    assert socket.sent == [
        PeerHello(
            "D",
            72,
            71,
            "model-a",
            facts.layout,
            facts.num_blocks,
            facts.checksum,
            facts.process,
            (Endpoint("memory", "first"),),
        )
    ]
    other = connections.to(replace(PEER, epoch=70), 12.0)
    assert list(connections) == [one, other]
    assert connections.wait_on() == ["blocks", *links_made.dialled, "monitor", "monitor"]


def test_no_hello_and_nothing_else_is_said_before_all_receivers_are_ready(
    connections: ReceiverConnections, links_made: Links, receiver: ListeningReceiver
) -> None:
    receiver.is_ready = False
    one = connections.to(PEER, 10.0)
    connections.send(one, Renew(()))
    assert (links_made.dialled[0].sent, one.has_sent_hello) == ([], False)
    receiver.is_ready, receiver.endpoint = True, Endpoint("memory", "second")
    assert connections.take_changes() == [cast(Any, receiver)]
    assert connections.take_changes() == []
    connections.send_hellos_again()
    assert [message.endpoints for message in links_made.dialled[0].sent] == [(Endpoint("memory", "second"),)]


def test_a_welcome_names_the_receiver_and_counts_once(
    connections: ReceiverConnections, receiver: ListeningReceiver
) -> None:
    one = connections.to(PEER, 10.0)
    assert connections.take_welcome(one, WELCOME)
    assert (one.welcome, one.receiver) == (WELCOME, cast(Any, receiver))
    assert not connections.take_welcome(one, WELCOME)
    connections.send_hellos_again()
    assert (one.welcome, one.receiver) == (None, None)
    for changes, reason in (
        ({"epoch": 73}, "P has restarted: epoch 73 instead of 71"),
        ({"node_id": "Q"}, "has restarted"),
        ({"transport": "tape"}, "chose the transport 'tape'"),
    ):
        with pytest.raises(Refused, match=reason):
            connections.take_welcome(one, replace(WELCOME, **cast(Any, changes)))


@pytest.mark.parametrize(
    ("is_made", "has_broken", "later_s", "is_dialled"),
    [
        (True, True, 0.0, True),
        (True, False, 9.0, False),
        (False, False, 9.0, False),
        (False, True, 0.19, False),
        (False, True, 0.2, True),
    ],
)
def test_a_connection_that_broke_is_dialled_again_and_one_that_was_never_made_after_a_pause(
    connections: ReceiverConnections,
    links_made: Links,
    is_made: bool,
    has_broken: bool,
    later_s: float,
    is_dialled: bool,
) -> None:
    one = connections.to(PEER, 10.0)
    connections.take_welcome(one, WELCOME)
    one.dialled_s = 0.0
    (socket,) = links_made.dialled
    socket.watch.is_made, socket.watch.has_broken = is_made, has_broken
    connections.dial_broken_again(later_s)
    assert (len(links_made.dialled), socket.closed, socket.watch.is_closed) == (1 + is_dialled, is_dialled, is_dialled)
    assert (one.welcome is None, one.receiver is None, one.used_s) == (is_dialled, is_dialled, 10.0)
    if is_dialled:
        assert (one.socket, one.watch) == (links_made.dialled[1], links_made.dialled[1].watch)
        assert (one.dialled_s, len(links_made.dialled[1].sent)) == (later_s, 1)


def test_without_room_for_a_socket_a_peer_is_refused_and_a_broken_connection_stays_closed(
    connections: ReceiverConnections, links_made: Links
) -> None:
    one = connections.to(PEER, 10.0)
    connections.take_welcome(one, WELCOME)
    links_made.error = zmq.ZMQError(24)
    with pytest.raises(Refused, match="no socket for another prefill node"):
        connections.to(replace(PEER, epoch=70), 10.0)
    socket = links_made.dialled[0]
    socket.watch.is_made = socket.watch.has_broken = True
    connections.dial_broken_again(11.0)
    assert (socket.closed, one.welcome, one.receiver) == (True, None, None)
    assert connections.wait_on() == ["blocks"]
    assert connections.receive(one) is None
    connections.send(one, Renew(()))
    assert len(socket.sent) == 1


def test_an_address_that_cannot_be_reached_leaves_no_socket(
    connections: ReceiverConnections, links_made: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise zmq.ZMQError(22)

    monkeypatch.setattr(links, "connect", fail)
    with pytest.raises(Refused, match=r"cannot be reached at tcp://prefill:1"):
        connections.to(PEER, 10.0)
    assert (links_made.dialled[0].closed, links_made.dialled[0].watch.is_closed) == (True, True)
    assert list(connections) == []


def test_messages_are_taken_one_by_one_and_dropped_where_a_peer_reads_none(
    connections: ReceiverConnections, links_made: Links
) -> None:
    one = connections.to(PEER, 10.0)
    (socket,) = links_made.dialled
    socket.inbox += [b"one", b"two"]
    assert [connections.receive(one) for _ in range(3)] == [b"one", b"two", None]
    socket.is_full = True
    connections.send(one, Renew(()))
    socket.is_full = False
    connections.send(one, Renew(()))
    assert socket.sent[1:] == [Renew(())]


def test_a_connection_is_closed_when_nobody_has_used_it_for_a_minute(
    connections: ReceiverConnections, links_made: Links
) -> None:
    one, other, third = (connections.to(replace(PEER, epoch=epoch), 10.0) for epoch in (71, 72, 73))
    connections.renew({other.life: [HandoffName(*A)], ("Q", 1): []}, 50.0)
    assert links_made.dialled[1].sent[1:] == [Renew((HandoffName(*A),))]
    connections.close_idle([], 70.0)
    assert list(connections) == [one, other, third]
    connections.close_idle([third], 70.1)
    assert list(connections) == [other, third]
    assert [socket.closed for socket in links_made.dialled] == [True, False, False]
    connections.drop(one)
    assert list(connections) == [other, third]
    connections.close()
    assert list(connections) == []
    assert all(socket.closed and socket.watch.is_closed for socket in links_made.dialled)
