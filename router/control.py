"""The router's side of the control connections: one ZMQ ROUTER socket that every node dials.

Owns the socket, its place in the event loop, and the liveness timer. Hands decoded messages to the `ControlHandler` it
is started with; a message that cannot be decoded is counted and dropped, and does not affect other nodes.

A node is lost when its connection is closed (the next message to it shows that, and there are two Pings a second) or
when its heartbeat stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from router.nodes import Node, NodeRegistry
from wire import links
from wire.errors import BatonError, InvalidMessage, Refused
from wire.messages import (
    NODE_TO_ROUTER,
    ROUTER_TO_NODE,
    CacheEvents,
    Failed,
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    Ping,
    Refusal,
    Tokens,
    Welcome,
    control_identity,
    epoch_of_identity,
)

PING_INTERVAL_S = 0.5
_MAX_PER_TURN = 256
_log = logging.getLogger(__name__)


class ControlHandler(Protocol):
    """Handles the messages of nodes, and their loss."""

    def on_tokens(self, tokens: Tokens) -> None:
        """A node sampled these tokens in one step."""
        ...

    def on_failed(self, failed: Failed, epoch: int) -> None:
        """An attempt ended without finishing."""
        ...

    def on_node_lost(self, node: Node, reason: str) -> None:
        """A node is lost, and so are all legs that ran on it."""
        ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """The state of a link that reads, which it has from `start` to `close`."""

    loop: asyncio.AbstractEventLoop
    handler: ControlHandler
    pinger: asyncio.Task[None]


class ControlLink:
    """All control connections. Lives on one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        settings: links.LinkSettings,
        registry: NodeRegistry,
        epoch: int,
    ) -> None:
        """Listens; what nodes send waits for `start`. Raises `InvalidSetting` when the address cannot be used."""
        self.num_rejected_messages = 0
        self._socket, self.address = links.listen(context, zmq.ROUTER, host, port, settings)
        self._registry = registry
        self._epoch = epoch
        self._reading: _Reading | None = None

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
        """Send to the node of that epoch. Returns False when the node cannot be reached; it is then declared lost,
        because a request whose message it missed would wait for ever."""
        if self._send(control_identity(epoch), message):
            return True
        node = self._registry.get(epoch)
        if node is not None and self._reading is not None:
            self._reading.loop.call_soon(self._lose, node, "it cannot be reached", self._reading.handler)
        return False

    def _send(self, identity: bytes, message: object) -> bool:
        try:
            self._socket.send_multipart([identity, ROUTER_TO_NODE.encode(message)], zmq.NOBLOCK)
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
        if reading is not None and self._socket.poll(0):
            reading.loop.call_soon(self._read, reading.handler)

    def _read(self, handler: ControlHandler) -> None:
        if self._socket.closed:
            return
        for _ in range(_MAX_PER_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(identity, b"".join(frames), handler)
            except BatonError as error:
                self.num_rejected_messages += 1
                _log.warning("message from a node rejected: %s", error)
                if isinstance(error, Refused):
                    self._send(identity, Refusal(str(error)[:1000]))
        self._read_soon()

    def _dispatch(self, identity: bytes, frame: bytes, handler: ControlHandler) -> None:
        message = NODE_TO_ROUTER.decode(frame)
        if isinstance(message, Hello):
            self._on_hello(identity, message, handler)
        elif isinstance(message, Heartbeat):
            if not self._registry.heartbeat(message, time.monotonic()):
                self._send(control_identity(message.epoch), Introduce(self._epoch))
        else:
            self._on_work(identity, message, handler)

    def _on_work(self, identity: bytes, message: Any, handler: ControlHandler) -> None:
        epoch = epoch_of_identity(identity)
        node = None if epoch is None else self._registry.get(epoch)
        if node is None or epoch is None:
            self._send(identity, Introduce(self._epoch))
            return
        if not isinstance(message, Failed) and message.epoch != epoch:
            raise InvalidMessage(f"{type(message).__name__} names another epoch than its sender's")
        node.heard_s = time.monotonic()
        if isinstance(message, Tokens):
            handler.on_tokens(message)
        elif isinstance(message, Failed):
            handler.on_failed(message, epoch)
        elif isinstance(message, CacheEvents):
            self._registry.cache_events(message)
        elif isinstance(message, Leaving):
            self._registry.leave(epoch)

    def _on_hello(self, identity: bytes, hello: Hello, handler: ControlHandler) -> None:
        if identity != control_identity(hello.epoch):
            raise Refused("a node must use its epoch as its identity")
        earlier = self._registry.register(hello, time.monotonic())
        if earlier is not None:
            handler.on_node_lost(earlier, "restarted")
        self._send(identity, Welcome(self._epoch))

    async def _ping_forever(self, handler: ControlHandler) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            now_s = time.monotonic()
            # after a pause of this process, silence proves nothing: every node gets the missed time back
            pause_s, last_s = now_s - last_s - PING_INTERVAL_S, now_s
            for node in self._registry.all():
                node.heard_s += max(0.0, pause_s)
                self.send(node.epoch, Ping(self._epoch))
            for node in self._registry.overdue(now_s):
                self._lose(node, "its heartbeat stopped", handler)

    def _lose(self, node: Node, reason: str, handler: ControlHandler) -> None:
        if self._registry.remove(node.epoch) is not None:
            if node.is_leaving and not node.load:
                _log.debug("%s node %s has left", node.role, node.node_id)
            else:
                _log.warning("%s node %s is lost: %s", node.role, node.node_id, reason)
            handler.on_node_lost(node, reason)
