"""The router's side of the control connections: one ZMQ ROUTER socket that every node dials.

Owns the socket, its place in the event loop, and the liveness timer. Hands decoded messages to the `ControlHandler` it
is started with; a message that cannot be decoded is counted and dropped, and does not affect other nodes. What a broken
connection has swallowed is asked for again, in both directions (`baton.wire.session`).

A node is lost when it cannot be reached for `UNREACHABLE_S` (two Pings a second show that) or when its heartbeat stops.
Nodes that are unreachable at the same time are lost at the same time: no request is tried again on one of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from baton.router.nodes.bad_peers import MAX_STRANGER_BYTES, BadPeers
from baton.router.nodes.handler import ControlHandler
from baton.router.nodes.registry import Node, NodeRegistry
from baton.wire import links
from baton.wire.errors import BatonError, InvalidMessage, Refused
from baton.wire.messages.legs import HandedOver
from baton.wire.messages.membership import (
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    Ping,
    Pong,
    Refusal,
    Resume,
    Welcome,
    control_identity,
    epoch_of_identity,
)
from baton.wire.messages.output import Failed, PromptRead, Tokens
from baton.wire.messages.prefixes import CacheEvents, Pulled
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.session import number_of

PING_INTERVAL_S = 0.5
UNREACHABLE_S = 0.3
"""A connection that was cut is made again within 0.1 s."""
_PINGED_PER_TURN = 16
_MAX_PER_TURN = 256
_MAX_TURN_S = 0.01
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The state of a link that reads, which it has from `start` to `close`."""

    loop: asyncio.AbstractEventLoop
    handler: ControlHandler
    pinger: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class ControlPort:
    """Where nodes dial: 0 lets the system choose the `number`; `fd` is of a socket that listens there already, -1 for
    none. `is_of_role`: whether a public key is one of a role, where roles have different keys."""

    host: str
    number: int
    link: links.LinkSettings
    fd: int = -1
    is_of_role: Callable[[bytes, str], bool] | None = None


class ControlLink:
    """All control connections. Lives on one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        port: ControlPort,
        registry: NodeRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens; what nodes send waits for `start`. Raises `InvalidSetting` when the address cannot be used."""
        self._is_of_role = port.is_of_role
        self._clock = clock
        self._bad_peers = BadPeers(clock)
        self._socket, self.address = links.listen(context, zmq.ROUTER, port.host, port.number, port.link, port.fd)
        self._registry = registry
        self._reading: _Reading | None = None
        self._next_read: asyncio.Handle | None = None
        self._suspects: dict[int, Node] = {}

    @property
    def num_rejected_messages(self) -> int:
        """Messages that could not be understood or did not fit."""
        return self._bad_peers.num_bad

    def start(self, handler: ControlHandler) -> None:
        """Begin to read messages and hand them to `handler`. Must be called on the event loop."""
        loop = asyncio.get_running_loop()
        self._reading = _Reading(loop, handler, loop.create_task(self._ping_forever(handler), name="ping"))
        loop.add_reader(self._socket.fileno(), self._read, handler)
        self._read(handler)

    async def close(self) -> None:
        """Stop reading and close the socket."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.pinger.cancel()
            await asyncio.gather(reading.pinger, return_exceptions=True)
            reading.loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def send(self, epoch: int, message: object) -> bool:
        """Send to the node of that epoch. The message arrives, also when the connection breaks meanwhile, or the node
        is declared lost. Returns False when there is no such node."""
        node = self._registry.get(epoch)
        if node is None:
            return False
        if not self._send_frames(control_identity(epoch), node.session.frames(message)) or node.session.is_overfull:
            self._suspect([node])
        return True

    def _send(self, identity: bytes, message: object) -> bool:
        return self._send_frames(identity, [ROUTER_TO_NODE.encode(message)])

    def _send_frames(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            self._read_soon()
        return True

    def _read_soon(self) -> None:
        # ZMQ's descriptor is edge-triggered: a send may swallow the edge that announced a message
        reading = self._reading
        if reading is not None and self._next_read is None and self._socket.poll(0):
            self._next_read = reading.loop.call_soon(self._read, reading.handler)

    def _read(self, handler: ControlHandler) -> None:
        if self._socket.closed:
            return
        if self._next_read is not None:  # two reads in one turn of the loop would leave nothing else a place between
            self._next_read.cancel()
            self._next_read = None
        num_events, until_s = 0, self._clock() + _MAX_TURN_S
        for _ in range(_MAX_PER_TURN):
            if num_events >= _MAX_PER_TURN or self._clock() > until_s:
                break  # each event wakes the task of a stream; what else is due comes before the next of them
            try:
                identity, frames, key = self._receive()
            except zmq.Again:
                return
            if self._bad_peers.is_cut_off(identity):
                continue
            if self._bad_peers.floods(identity, sum(map(len, frames))):
                self._lose_sender(identity, "it floods the control port", handler)
                continue
            try:
                num_events += self._dispatch(identity, frames, key, handler)
            except BatonError as error:
                self._reject(identity, error, handler)
        self._read_soon()

    def _receive(self) -> tuple[bytes, list[bytes], bytes]:
        """The next message: who sent it, its frames, and the public key of the sender where roles have keys. Raises
        `zmq.Again`."""
        if self._is_of_role is None:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            return identity, frames, b""
        sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        key = str(parts[-1].get("User-Id")).encode() if parts else b""
        return sender.bytes, [part.bytes for part in parts], key

    def _require_role(self, key: bytes, role: str) -> None:
        """Raises `Refused` when the sender's key is not one of that role."""
        if self._is_of_role is not None and not self._is_of_role(key, role):
            raise Refused(f"the cluster key is not one of a {role} node")

    def _reject(self, identity: bytes, error: BatonError, handler: ControlHandler) -> None:
        if isinstance(error, Refused):
            self._send(identity, Refusal(str(error)[:1000]))
        if self._bad_peers.note(identity, error):
            self._lose_sender(identity, "it sends rubbish", handler)

    def _lose_sender(self, identity: bytes, reason: str, handler: ControlHandler) -> None:
        """A connection is cut off: if it is a node's, the node is lost."""
        node = self._registry.get(epoch_of_identity(identity) or 0)
        self._lose([node] if node is not None else [], reason, handler)

    def _dispatch(self, identity: bytes, frames: list[bytes], key: bytes, handler: ControlHandler) -> int:
        """Handle one message from a holder of `key`; the number of its token events."""
        epoch = epoch_of_identity(identity)
        node = None if epoch is None else self._registry.get(epoch)
        if node is None and sum(map(len, frames)) > MAX_STRANGER_BYTES:
            raise InvalidMessage("a long message from a connection that is not a node's")
        message = self._decode(frames[-1], node)
        named = self._registry.get(message.epoch) if isinstance(message, Heartbeat) else node
        if named is not None:
            self._require_role(key, named.role)
        if isinstance(message, Hello):
            self._require_role(key, message.role)
            self._on_hello(identity, message, handler)
        elif isinstance(message, Heartbeat):
            if not self._registry.heartbeat(message, self._clock()):
                self._send(control_identity(message.epoch), Introduce())
        elif node is None:
            self._send(identity, Introduce())
        elif isinstance(message, Pong | Resume):
            self._on_session(node, message, handler)
        elif self._accepts(node, number_of(frames)):
            self._on_work(node, message, handler)
        return len(message.events) if isinstance(message, Tokens) else 0

    @staticmethod
    def _decode(frame: bytes, node: Node | None) -> Any:
        try:
            return NODE_TO_ROUTER.decode(frame)
        except Refused as error:  # it is of another version of the protocol
            if node is None:
                raise
            raise InvalidMessage(str(error)) from None  # the node has joined with ours: the message was damaged

    def _accepts(self, node: Node, number: int) -> bool:
        """Whether a message is the next one of a node. Raises `InvalidMessage` when it has no number."""
        if not number:
            raise InvalidMessage("a message of this kind has a number")
        node.heard_s = self._clock()
        if node.session.accept(number):
            return True
        if node.session.must_ask(number):
            self._ask(node)
        return False

    def _on_work(self, node: Node, message: Any, handler: ControlHandler) -> None:
        if not isinstance(message, Failed) and message.epoch != node.epoch:
            raise InvalidMessage(f"{type(message).__name__} names another epoch than its sender's")
        if isinstance(message, Tokens):
            node.num_steps += 1
            handler.on_tokens(message)
        elif isinstance(message, Failed):
            handler.on_failed(message, node.epoch)
        elif isinstance(message, PromptRead):
            handler.on_prompt_read(message)
        elif isinstance(message, CacheEvents):
            self._registry.cache_events(message)
        elif isinstance(message, HandedOver):
            handler.on_handed_over(message, node)
        elif isinstance(message, Pulled):
            handler.on_pulled(message, node)
        elif isinstance(message, Leaving):
            self._registry.leave(node.epoch)
            self.is_reachable(node)  # its Ping tells the node that this was heard, behind all that was sent before
            handler.on_leaving(node)

    def _on_session(self, node: Node, message: Pong | Resume, handler: ControlHandler) -> None:
        session = node.session
        if message.session != session.number:
            return  # of an earlier registration: the next Ping tells the node
        node.heard_s = self._clock()
        if isinstance(message, Resume):
            again = session.since(message.first)
            if again is None:
                self._lose([node], "it misses messages that are not kept any more", handler)
            for frames in again or ():
                self._send_frames(control_identity(node.epoch), frames)
            return
        session.acknowledge(message.received)
        node.num_other_legs, node.num_other_prompt_tokens = message.num_other_legs, message.num_other_prompt_tokens
        if session.lacks(message.sent):
            self._ask(node)
        else:
            handler.on_live(node, message.live_keys, message.received)

    def _ask(self, node: Node) -> None:
        _log.info("messages of %s node %s were lost, and are asked for again", node.role, node.node_id)
        self._send(control_identity(node.epoch), Resume(node.session.number, node.session.received + 1))

    def _on_hello(self, identity: bytes, hello: Hello, handler: ControlHandler) -> None:
        if identity != control_identity(hello.epoch):
            raise Refused("a node must use its epoch as its identity")
        known = self._registry.get(hello.epoch)
        if known is not None and hello.session != known.session.number and not known.session.is_untouched:
            self._lose([known], "it has given up what it was asked for", handler)
        earlier = self._registry.predecessor(hello, self._clock())
        if earlier is not None:
            if self.is_reachable(earlier):
                return  # it may be alive: the answer to the next heartbeat makes the other one ask again
            self._lose([earlier], "it was started again", handler)
        self._refuse(self._registry.outvoted(hello, self._clock()), hello, handler)
        self._registry.register(hello, self._clock())
        node = self._registry.get(hello.epoch)
        if node is not None:
            self._send(identity, Welcome(node.session.number, self._registry.epoch))
            handler.on_node_joined(node)

    def _refuse(self, nodes: Sequence[Node], hello: Hello, handler: ControlHandler) -> None:
        """These nodes have to give way to the sender of `hello`, and to those that have its layout too."""
        for node in nodes:
            reason = f"most nodes of its model have the KV layout of {hello.node_id}, not its own"
            self._send(control_identity(node.epoch), Refusal(reason))
        self._lose(nodes, "most nodes of its model have another KV layout", handler)

    async def _ping_forever(self, handler: ControlHandler) -> None:
        last_s = self._clock()
        while True:
            await self._ping_in_turns()
            now_s = self._clock()
            # after a pause of this process, silence proves nothing: every node gets the missed time back
            pause_s, last_s = now_s - last_s - PING_INTERVAL_S, now_s
            for node in self._registry.all():
                # it may just have been heard: what it had said before the pause was there all the time
                node.heard_s = min(now_s, node.heard_s + max(0.0, pause_s))
            self._lose(self._registry.overdue(now_s), "its heartbeat stopped", handler)

    async def _ping_in_turns(self) -> None:
        """Ping every node within an interval, a few at a time: all of many at once would hold up the tokens."""
        begun_s = self._clock()
        num_turns = max(1, -(-len(self._registry) // _PINGED_PER_TURN))
        for turn in range(num_turns):
            due_s = begun_s + (turn + 1) * PING_INTERVAL_S / num_turns
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            few = [node for node in self._registry.all() if node.epoch % num_turns == turn]
            self._suspect([node for node in few if not self.is_reachable(node)])

    def is_reachable(self, node: Node) -> bool:
        """Send a Ping; False when there is no connection for it."""
        session = node.session
        return self._send(control_identity(node.epoch), Ping(session.number, session.sent, session.received))

    def _suspect(self, nodes: Sequence[Node]) -> None:
        """These nodes cannot be reached: look again once a broken connection would have been made again."""
        reading = self._reading
        if reading is None:
            return
        if nodes and not self._suspects:
            reading.loop.call_later(UNREACHABLE_S, self._judge_suspects, reading.handler)
        self._suspects |= {node.epoch: node for node in nodes}

    def _judge_suspects(self, handler: ControlHandler) -> None:
        self._suspects.clear()
        if self._socket.closed:
            return
        lost = [node for node in self._registry.all() if node.session.is_overfull or not self.is_reachable(node)]
        self._lose(lost, "it cannot be reached", handler)

    def _lose(self, nodes: Sequence[Node], reason: str, handler: ControlHandler) -> None:
        lost = [node for node in nodes if self._registry.remove(node.epoch) is not None]
        for node in lost:
            if node.is_leaving and not node.num_legs:
                _log.debug("%s node %s has left", node.role, node.node_id)
            else:
                _log.warning("%s node %s is lost: %s", node.role, node.node_id, reason)
        for node in lost:
            handler.on_node_lost(node, reason)
