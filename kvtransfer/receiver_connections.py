"""The connections of a decode node: one to each life of a prefill node that the router has named.

Owns the sockets, the handshake, the endpoints that are offered to peers, and the closing of idle connections. Knows no
handoffs: the caller that ends a connection also ends the handoffs that relied on it.

A connection that breaks is dialled again at once, with a new socket that begins with a hello: on the old one the peer
would see a stranger who does not greet. One whose handshake failed is dialled again a moment later.

What may happen to the peer: if it does not answer the hello, refuses it, or has another epoch than the router named,
its connection is closed and the next handoff begins with a new one. If it reads no messages, they are dropped: every
message is either repeated or replaced by a deadline. No message is sent before the hello, because a peer refuses a
connection that begins in another way; the hello waits until every receiver is ready.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.messages import RECEIVER_TO_SENDER, HandoffName, PeerHello, PeerWelcome, Renew
from baton.kvtransfer.transports.base import Receiver
from baton.wire import links
from baton.wire.errors import InvalidSetting, Refused
from baton.wire.link_watch import DIAL_PAUSE_S, LinkWatch, open_watched
from baton.wire.messages.legs import PrefillPeer

_IDLE_S = 60.0
_log = logging.getLogger(__name__)

LifeKey: TypeAlias = tuple[str, int]
"""(node id, epoch) of a prefill node."""


@dataclass(slots=True, eq=False)
class Connection:
    """One connection to one life of a prefill node. `receiver`, which it pushes to, is known with its `welcome`.
    `watch` is that of its `socket`, which has dialled at `dialled_s`."""

    peer: PrefillPeer
    socket: zmq.Socket[bytes]
    watch: LinkWatch
    dialled_s: float
    used_s: float
    has_sent_hello: bool = False
    welcome: PeerWelcome | None = None
    receiver: Receiver | None = None

    @property
    def life(self) -> LifeKey:
        """The node id and epoch of the peer."""
        return (self.peer.node_id, self.peer.epoch)


class ReceiverConnections:
    """All connections of one decode node, and the receivers that it offers over them."""

    def __init__(
        self,
        facts: ReceivingFacts,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: links.LinkSettings,
        receivers: Sequence[Receiver],
    ) -> None:
        self._facts = facts
        self._context = context
        self._settings = settings
        self._receivers = {receiver.endpoint.transport: receiver for receiver in receivers}
        self._endpoints = {name: receiver.endpoint for name, receiver in self._receivers.items()}
        self._connections: dict[LifeKey, Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    @property
    def receivers(self) -> Collection[Receiver]:
        """The receivers, one for each transport."""
        return self._receivers.values()

    def wait_on(self) -> Sequence[Any]:
        """Sockets and files that are readable when blocks or a message have arrived."""
        data = [source for receiver in self._receivers.values() for source in receiver.wait_on()]
        connections = [each for each in self._connections.values() if not each.socket.closed]
        return [*data, *(each.socket for each in connections), *(each.watch.monitor for each in connections)]

    def to(self, peer: PrefillPeer, now_s: float) -> Connection:
        """The connection to this life of the peer, opened when first needed. Raises `InvalidSetting` or `Refused`."""
        connection = self._connections.get((peer.node_id, peer.epoch))
        if connection is not None:
            self._dial_again_if_broken(connection, now_s)
        else:
            socket, watch = self._dial(peer)
            connection = Connection(peer, socket, watch, now_s, now_s)
            self._connections[connection.life] = connection
            self._send_hello(connection)
        connection.used_s = now_s
        return connection

    def dial_broken_again(self, now_s: float) -> None:
        """Dial those peers again whose connection broke. Grants over that connection are void with their welcome."""
        for connection in self:
            self._dial_again_if_broken(connection, now_s)

    def _dial_again_if_broken(self, connection: Connection, now_s: float) -> None:
        watch = connection.watch
        watch.look()
        if watch.has_broken and (watch.is_made or now_s - connection.dialled_s >= DIAL_PAUSE_S):
            self._close_socket(connection)
            connection.welcome = connection.receiver = None
            connection.dialled_s = now_s
            with contextlib.suppress(Refused):  # without a socket there is no answer, and its handoffs expire
                connection.socket, connection.watch = self._dial(connection.peer)
                self._send_hello(connection)

    def _dial(self, peer: PrefillPeer) -> tuple[zmq.Socket[bytes], LinkWatch]:
        address = links.parse_address(peer.address, "peer address")
        try:
            socket, watch = open_watched(self._context, zmq.DEALER, self._settings)
        except zmq.ZMQError as error:
            raise Refused(f"no socket for another prefill node: {error}") from None
        try:
            links.connect(socket, address, self._settings)
        except (InvalidSetting, zmq.ZMQError) as error:
            watch.close()
            socket.close()
            raise Refused(f"a prefill node cannot be reached at {address}: {error}") from None
        return socket, watch

    def _send_hello(self, connection: Connection) -> None:
        """Send a hello with all endpoints; do nothing while a receiver is not ready."""
        connection.welcome = connection.receiver = None
        if all(receiver.is_ready for receiver in self._receivers.values()):
            connection.has_sent_hello = True
            hello = PeerHello(
                node_id=self._facts.node_id,
                epoch=self._facts.epoch,
                sender_epoch=connection.peer.epoch,
                fingerprint=self._facts.fingerprint,
                layout=self._facts.layout,
                num_blocks=self._facts.num_blocks,
                checksum=self._facts.checksum,
                process=self._facts.process,
                endpoints=tuple(self._endpoints.values()),
            )
            self.send(connection, hello)

    def take_welcome(self, connection: Connection, welcome: PeerWelcome) -> bool:
        """Accept the welcome of a peer. Returns False for a duplicate. Raises `Refused` when the peer is not the one
        that was dialled, or chose a transport that was not offered.
        """
        peer = connection.peer
        if (welcome.node_id, welcome.epoch) != connection.life:
            raise Refused(f"{peer.node_id} has restarted: epoch {welcome.epoch} instead of {peer.epoch}")
        if connection.welcome is not None:
            return False
        connection.welcome = welcome
        connection.receiver = self._receivers.get(welcome.transport)
        if connection.receiver is None:
            raise Refused(f"{peer.node_id} chose the transport {welcome.transport!r:.40}, which was not offered")
        return True

    def take_changes(self) -> list[Receiver]:
        """Receivers whose endpoint has changed since the last call. No peer can write by the old endpoint any more,
        except one that has mapped the pool. `send_hellos_again` offers the new endpoints.
        """
        changed = [name for name, receiver in self._receivers.items() if receiver.endpoint != self._endpoints[name]]
        for name in changed:
            self._endpoints[name] = self._receivers[name].endpoint
        return [self._receivers[name] for name in changed]

    def send_hellos_again(self) -> None:
        """Repeat the handshake on every connection. All grants sent over them are then void."""
        for connection in self._connections.values():
            self._send_hello(connection)

    def receive(self, connection: Connection) -> bytes | None:
        """The next message of a connection; None when there is none or the connection is closed."""
        if connection.socket.closed:
            return None
        try:
            return connection.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, connection: Connection, message: object) -> None:
        """Send a message to the peer, or drop it if the peer reads none or has not had a hello."""
        if connection.socket.closed or not connection.has_sent_hello:
            return
        try:
            connection.socket.send(RECEIVER_TO_SENDER.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            name, kind = connection.peer.node_id, type(message).__name__
            _log.warning("prefill node %s reads no messages, %s was dropped", name, kind)

    def renew(self, by_life: Mapping[LifeKey, Sequence[HandoffName]], now_s: float) -> None:
        """Tell every peer which of its handoffs are alive at this node."""
        for life, names in by_life.items():
            connection = self._connections.get(life)
            if connection is not None:
                connection.used_s = now_s
                self.send(connection, Renew(tuple(names)))

    def drop(self, connection: Connection) -> None:
        """Close a connection that is of no use."""
        self._close_socket(connection)
        if self._connections.get(connection.life) is connection:
            del self._connections[connection.life]

    @staticmethod
    def _close_socket(connection: Connection) -> None:
        if not connection.socket.closed:
            connection.watch.close()
            connection.socket.close()

    def close_idle(self, in_use: Collection[Connection], now_s: float) -> None:
        """Close connections that no handoff has needed for a minute."""
        for connection in self:
            if connection not in in_use and now_s - connection.used_s > _IDLE_S:
                self.drop(connection)

    def close(self) -> None:
        """Close every connection. Receivers are closed by the code that opened them."""
        for connection in self:
            self.drop(connection)
