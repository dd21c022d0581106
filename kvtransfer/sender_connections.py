"""The connections of a prefill node: who has dialled, passed the handshake, and by what its pool is reached.

Owns the listening socket, hello, welcome and refusal, and the transport towards each receiver. Knows no handoffs: what
a connection's end means for them is said by whoever asked for the end.

What may happen to the other side: a receiver that does not fit, or that dials another life of this node, is refused.
One that has gone is noticed by a message that cannot be delivered, at the latest by the next renewal; its transport is
closed then, because a mapping of a dead node's pool would keep that memory in use. One that takes no messages loses
them: every message is said again or replaced by a deadline. One that says hello again begins anew: what it granted
before is void, and its earlier transport is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from kvtransfer.facts import SendingFacts
from kvtransfer.messages import SENDER_TO_RECEIVER, HandoffName, PeerHello, PeerRefusal, PeerWelcome, Renew
from kvtransfer.pusher import Pusher
from kvtransfer.transports.base import Sender
from wire import links
from wire.errors import Refused

_MAX_REASON = 1000
_log = logging.getLogger(__name__)


class SenderOpener(Protocol):
    """Opens transports towards receivers."""

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """(transport name, sender). Raises `Refused`."""
        ...

    def poll(self) -> None:
        """Called every round, for what all senders share."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """What is readable when `poll` has something to do."""
        ...


@dataclass(slots=True, eq=False)
class Peer:
    """A receiver that passed the handshake. `is_connected` until its connection ends or begins anew."""

    peer_id: bytes
    hello: PeerHello
    sender: Sender
    is_connected: bool = True


class SenderConnections:
    """All receivers of one prefill node, by the identity of their connection."""

    def __init__(self, facts: SendingFacts, link: zmq.Socket[bytes], opener: SenderOpener, pusher: Pusher) -> None:
        self._facts = facts
        self._link = link
        self._opener = opener
        self._pusher = pusher
        self._peers: dict[bytes, Peer] = {}
        self._refusals: list[tuple[bytes, PeerRefusal]] = []

    def __len__(self) -> int:
        return len(self._peers)

    def wait_on(self) -> Sequence[Any]:
        """What is readable when a message has come, or `poll` has something to do."""
        return [self._link, *self._opener.wait_on()]

    def poll(self) -> None:
        """For what all transports share."""
        self._opener.poll()

    def receive(self) -> tuple[bytes, Sequence[bytes]] | None:
        """(connection, frames) of the next message, as they came; None when there is none."""
        try:
            peer_id, *frames = self._link.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer_id, frames

    def peer(self, peer_id: bytes) -> Peer:
        """Who is at the other end. Raises `Refused` for one that has not passed the handshake."""
        peer = self._peers.get(peer_id)
        if peer is None:
            raise Refused("say PeerHello first")
        return peer

    def peers_by(self, sender: Sender) -> list[Peer]:
        """Who is reached by this transport."""
        return [peer for peer in self._peers.values() if peer.sender is sender]

    def greet(self, peer_id: bytes, hello: PeerHello) -> Peer:
        """Shake hands, for the first time or again. Raises `Refused` naming what does not fit."""
        self._require_fit(hello)
        self.drop(peer_id, "the receiver said hello again")
        transport, sender = self._opener.open(hello)
        peer = self._peers[peer_id] = Peer(peer_id, hello, sender)
        _log.info("decode node %s connected, KV goes by %s", hello.node_id, transport)
        writer = sender.writer or self._facts.process
        self.send(peer_id, PeerWelcome(self._facts.node_id, self._facts.epoch, transport, writer))
        return peer

    def _require_fit(self, hello: PeerHello) -> None:
        facts = self._facts
        if hello.sender_epoch != facts.epoch:
            raise Refused(f"{facts.node_id} has restarted: epoch {facts.epoch} instead of {hello.sender_epoch}")
        if hello.fingerprint != facts.fingerprint:
            raise Refused(f"model differs: {facts.fingerprint} here, {hello.fingerprint} at {hello.node_id}")
        facts.layout.require_same(hello.layout, hello.node_id)
        if hello.checksum != facts.checksum:
            raise Refused(
                f"KV checksum is {facts.checksum} here and {hello.checksum} at {hello.node_id}:"
                " start both with the same --kv-checksum"
            )

    def reject(self, peer_id: bytes, reason: str) -> None:
        """Whoever is at the other end sent something bad: it loses its connection, and nobody else anything."""
        self.drop(peer_id, "the receiver sent a bad message")
        self.send(peer_id, PeerRefusal(reason[:_MAX_REASON]))

    def drop(self, peer_id: bytes, reason: str) -> None:
        """End a connection and its transport. Harmless when there is none."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.is_connected = False
            self._pusher.retire(peer.sender, reason)

    def send_away(self, peer: Peer, reason: str) -> None:
        """The transport has failed: end the connection now, and tell the receiver in `flush_refusals`, which it answers
        by closing: after the last word about its handoffs.
        """
        self.drop(peer.peer_id, reason)
        self._refusals.append((peer.peer_id, PeerRefusal(reason[:_MAX_REASON])))

    def flush_refusals(self) -> None:
        """Tell those that were sent away."""
        refusals, self._refusals = self._refusals, []
        for peer_id, refusal in refusals:
            self.send(peer_id, refusal)

    def renew(self, by_peer: Mapping[bytes, Sequence[HandoffName]]) -> None:
        """Tell every receiver which handoffs are alive; an empty list finds out whether it is still there."""
        for peer_id in list(self._peers):
            self.send(peer_id, Renew(tuple(by_peer.get(peer_id, ()))))

    def send(self, peer_id: bytes, message: object) -> None:
        """Say something to whoever is at the other end, or lose it."""
        try:
            self._link.send_multipart([peer_id, SENDER_TO_RECEIVER.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("a decode node takes no messages, %s dropped", type(message).__name__)
        except zmq.ZMQError:
            # this connection is gone for good: its leases on our blocks end by their deadline
            _log.info("a decode node is not reachable, %s dropped", type(message).__name__)
            self.drop(peer_id, "the receiver is not reachable")

    def close(self) -> None:
        """End every connection."""
        for peer_id in list(self._peers):
            self.drop(peer_id, "this node stops")
        self._link.close()


def open_listener(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, settings: links.LinkSettings
) -> tuple[zmq.Socket[bytes], str]:
    """The socket that decode nodes dial, and its address. Raises `InvalidSetting`."""
    return links.listen(context, zmq.ROUTER, host, port, settings)
