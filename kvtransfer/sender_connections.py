"""The connections of a prefill node: the receivers that passed the handshake, and the transport to each of them.

Owns the listening socket, the handshake (hello, welcome, refusal), and the transport to each receiver. Knows no
handoffs: the caller that ends a connection also ends the handoffs that relied on it.

What may happen to the receiver: if it does not fit, or dials another epoch of this node, it is refused. If it has gone,
a message cannot be delivered, at the latest the next renewal; its transport is then closed, because a mapping of a dead
node's pool would keep that memory in use. If it reads no messages, they are dropped: every message is either repeated
or replaced by a deadline. If it sends another hello, its earlier grants are void and its earlier transport is closed.

What may happen here: what a transport needs may be starting, such as the agent of nixl after a crash. The hello then
waits for it, for as long as a lease at most, and is answered once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.messages import SENDER_TO_RECEIVER, HandoffName, PeerHello, PeerRefusal, PeerWelcome, Renew
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.transports.base import Sender, Starting
from baton.wire import links
from baton.wire.errors import BatonError, Refused
from baton.wire.fingerprint import difference

_MAX_REASON = 1000
_MAX_WAITING = 64
"""Hellos that wait. They are kept as they came, and the largest have megabytes."""
_log = logging.getLogger(__name__)


class SenderOpener(Protocol):
    """Opens senders to receivers, by the transports of this node."""

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """Returns the name of the chosen transport and a sender for it. Raises `Refused`, and `Starting` where there
        will be one in a moment."""
        ...

    def poll(self) -> None:
        """Advance the resources that all senders share. Called every round."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """Sockets and files that are readable when `poll` has something to do."""
        ...


@dataclass(slots=True, eq=False)
class Peer:
    """A receiver that passed the handshake. `is_connected` until its connection ends or its next hello."""

    peer_id: bytes
    hello: PeerHello
    sender: Sender
    is_connected: bool = True


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A hello that cannot be answered yet, and until when it waits."""

    hello: PeerHello
    until_s: float


class SenderConnections:
    """All receivers of one prefill node, by the identity of their connection."""

    def __init__(self, facts: SendingFacts, link: zmq.Socket[bytes], opener: SenderOpener, pusher: Pusher) -> None:
        self._facts = facts
        self._link = link
        self._opener = opener
        self._pusher = pusher
        self._peers: dict[bytes, Peer] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._refusals: list[tuple[bytes, PeerRefusal]] = []

    def __len__(self) -> int:
        return len(self._peers)

    def wait_on(self) -> Sequence[Any]:
        """Sockets and files that are readable when a message has come or `poll` has something to do."""
        return [self._link, *self._opener.wait_on()]

    def poll(self) -> None:
        """Drive the resources that all transports share."""
        self._opener.poll()

    def receive(self) -> tuple[bytes, Sequence[bytes]] | None:
        """The peer id and the frames of the next message; None when there is none."""
        try:
            peer_id, *frames = self._link.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer_id, frames

    def peer(self, peer_id: bytes) -> Peer:
        """The receiver with this peer id. Raises `Refused` if it has not passed the handshake."""
        peer = self._peers.get(peer_id)
        if peer is None:
            raise Refused("the first message must be PeerHello")
        return peer

    def peers_by(self, sender: Sender) -> list[Peer]:
        """The receivers that this transport reaches."""
        return [peer for peer in self._peers.values() if peer.sender is sender]

    def is_waiting(self, peer_id: bytes) -> bool:
        """Whether this receiver has no answer to its hello yet."""
        return peer_id in self._waiting

    def greet(self, peer_id: bytes, hello: PeerHello, now_s: float) -> Peer | None:
        """Answer a hello, the first or a later one; None when the answer has to wait. Raises `Refused` or `Starting`,
        which name what does not fit."""
        self._require_fit(hello)
        self.drop(peer_id, "the receiver said hello again")
        try:
            return self._welcome(peer_id, hello)
        except Starting:
            if len(self._waiting) >= _MAX_WAITING:
                raise
            self._waiting[peer_id] = _Waiting(hello, now_s + self._facts.lease_s)
            return None

    def greet_waiting(self, now_s: float) -> list[Peer]:
        """Answer the hellos that could not be answered before, as far as that is possible now."""
        greeted = []
        for peer_id, waiting in list(self._waiting.items()):
            try:
                greeted.append(self._welcome(peer_id, waiting.hello))
            except BatonError as error:
                if not isinstance(error, Starting) or now_s >= waiting.until_s:
                    self.reject(peer_id, str(error))
            else:
                self._waiting.pop(peer_id, None)
        return greeted

    def _welcome(self, peer_id: bytes, hello: PeerHello) -> Peer:
        transport, sender = self._opener.open(hello)
        peer = self._peers[peer_id] = Peer(peer_id, hello, sender)
        _log.info("decode node %s connected, KV is pushed by %s", hello.node_id, transport)
        writers = tuple(sender.writers) or (self._facts.process,)
        self.send(peer_id, PeerWelcome(self._facts.node_id, self._facts.epoch, transport, writers))
        return peer

    def _require_fit(self, hello: PeerHello) -> None:
        facts = self._facts
        if hello.sender_epoch != facts.epoch:
            # our own epoch is not told: whoever dials here may be a stranger
            raise Refused(f"{facts.node_id} has restarted since epoch {hello.sender_epoch}")
        if hello.fingerprint != facts.fingerprint:
            raise Refused(difference(facts.fingerprint, hello.fingerprint, hello.node_id))
        facts.layout.require_same(hello.layout, hello.node_id)
        if hello.checksum != facts.checksum:
            raise Refused(
                f"KV checksum is {facts.checksum} here and {hello.checksum} at {hello.node_id}:"
                " start both with the same --kv-checksum"
            )

    def reject(self, peer_id: bytes, reason: str) -> None:
        """End the connection of a peer that sent a bad message. Other peers are not affected."""
        self.drop(peer_id, "the receiver sent a bad message")
        self.send(peer_id, PeerRefusal(reason[:_MAX_REASON]))

    def drop(self, peer_id: bytes, reason: str) -> None:
        """End a connection and its transport. Harmless when there is none."""
        self._waiting.pop(peer_id, None)
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.is_connected = False
            self._pusher.retire(peer.sender, reason)

    def end_with_refusal(self, peer: Peer, reason: str) -> None:
        """End a connection whose transport has failed. `flush_refusals` tells the receiver later, after the last
        message about its handoffs, because the receiver answers a refusal by closing the connection.
        """
        self.drop(peer.peer_id, reason)
        self._refusals.append((peer.peer_id, PeerRefusal(reason[:_MAX_REASON])))

    def flush_refusals(self) -> None:
        """Send the refusals of connections that were ended."""
        refusals, self._refusals = self._refusals, []
        for peer_id, refusal in refusals:
            self.send(peer_id, refusal)

    def renew(self, by_peer: Mapping[bytes, Sequence[HandoffName]]) -> None:
        """Tell every receiver which handoffs are alive. An empty list still shows whether it can be reached."""
        for peer_id in list(self._peers):
            self.send(peer_id, Renew(tuple(by_peer.get(peer_id, ()))))

    def send(self, peer_id: bytes, message: object) -> None:
        """Send a message, or drop it if the peer reads none or has gone."""
        try:
            self._link.send_multipart([peer_id, SENDER_TO_RECEIVER.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("a decode node reads no messages, %s was dropped", type(message).__name__)
        except zmq.ZMQError:
            # this connection is gone for good: the leases of its handoffs expire
            _log.debug("a decode node is not reachable, %s was dropped", type(message).__name__)
            self.drop(peer_id, "the receiver is not reachable")

    def close(self) -> None:
        """End every connection."""
        for peer_id in list(self._peers):
            self.drop(peer_id, "this node stops")
        self._link.close()


def open_listener(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, settings: links.LinkSettings
) -> tuple[zmq.Socket[bytes], str]:
    """The socket that decode nodes dial, and its address for them. Raises `InvalidSetting`."""
    link, address = links.listen(context, zmq.ROUTER, host, port, settings)
    return link, links.announced(address, settings)
