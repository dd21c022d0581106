"""Any number of nodes without models, in the process of the router that they talk to.

Owns their side of every session, and the socket between them and the real `ControlLink`: frames are handed over as
ZMQ would, encoded and decoded by the real codecs, but travel nowhere. `own_s` is the CPU time that the nodes took, to
be left out of what the router is said to cost.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import zmq

from baton.runtime.clock import host_clock
from baton.wire import messages
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.session import Session, number_of

LAYOUT = KvLayout.of_layers("bfloat16", 16, [LayerKv(num_kv_heads=8, head_dim=128)] * 32)
FINGERPRINT = "0" * 32
NUM_BLOCKS, MAX_NUM_SEQS = 2**17, 256
_STATUS = messages.NodeStatus(
    8, 0, num_free_blocks=NUM_BLOCKS, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.001
)


@dataclass(slots=True)
class _FakeNode:
    """`legs`: the handoff ids that it was given, each with how many tokens it has told."""

    role: str
    epoch: int
    session: Session = field(default_factory=lambda: Session(0, messages.NODE_TO_ROUTER))
    legs: dict[bytes, int] = field(default_factory=dict)


class FakeCluster:
    """The context that a `ControlLink` opens its socket in, that socket, and the nodes behind it."""

    def __init__(self) -> None:
        self.closed = False
        self.own_s = 0.0
        self._due: deque[list[bytes]] = deque()
        self._nodes: dict[bytes, _FakeNode] = {}
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def join(self, num_prefills: int, num_decodes: int) -> None:
        """So many more nodes say Hello."""
        roles = [messages.PREFILL] * num_prefills + [messages.DECODE] * num_decodes
        for number, role in enumerate(roles, len(self._nodes)):
            node = _FakeNode(role, secrets.randbits(63))
            identity = messages.control_identity(node.epoch)
            self._nodes[identity] = node
            self._say(identity, messages.NODE_TO_ROUTER.encode(_hello(f"{role}-{number}", node)))

    def beat(self) -> int:
        """Every node sends its heartbeat; how many in all."""
        for identity, node in self._nodes.items():
            self._say(identity, messages.NODE_TO_ROUTER.encode(messages.Heartbeat(node.epoch, _STATUS)))
        return len(self._nodes)

    def cache(self, hashes_of: Sequence[bytes], per_node: int) -> int:
        """Every node reports `per_node` blocks: those of one of `hashes_of`, and others that no other node has. How
        many in all."""
        for (identity, node), shared in zip(self._nodes.items(), cycle(hashes_of), strict=False):
            left = max(0, per_node * 16 - len(shared))
            for stored in (shared, *(secrets.token_bytes(min(2**19, left - at)) for at in range(0, left, 2**19))):
                self._work(identity, node, messages.CacheEvents(node.epoch, False, stored, b""))
        return per_node * len(self._nodes)

    def step(self) -> int:
        """Every decode node tells one token of each of its requests; how many in all."""
        count = 0
        for identity, node in self._nodes.items():
            if node.role == messages.DECODE and node.legs:
                events = [self._event_of(node, leg) for leg in node.legs]
                count += len(events)
                self._work(identity, node, messages.Tokens(node.epoch, tuple(events)))
        return count

    def _event_of(self, node: _FakeNode, leg: bytes) -> messages.TokenEvent:
        index = node.legs[leg]
        node.legs[leg] += 1
        return messages.TokenEvent(leg, 1, index, (17,), (), "", 0)

    def _work(self, identity: bytes, node: _FakeNode, message: object) -> None:
        self._say(identity, *node.session.frames(message))

    def _take(self, frames: Sequence[bytes], node: _FakeNode) -> None:
        message, session = messages.ROUTER_TO_NODE.decode(frames[-1]), node.session
        if number_of(list(frames[1:])):
            session.accept(number_of(list(frames[1:])))
        if isinstance(message, messages.Welcome):
            node.session = Session(message.session, messages.NODE_TO_ROUTER)
        elif isinstance(message, messages.Ping):
            session.acknowledge(message.received)
            live = b"".join(messages.live_key(leg, 1) for leg in node.legs)
            pong = messages.Pong(session.number, session.sent, session.received, live)
            self._say(frames[0], messages.NODE_TO_ROUTER.encode(pong))
        elif isinstance(message, messages.Prefill | messages.Decode):
            node.legs[message.handoff_id] = 0
        elif isinstance(message, messages.Cancel):
            node.legs.pop(message.handoff_id, None)

    def _say(self, identity: bytes, *frames: bytes) -> None:
        if not self._due:
            os.eventfd_write(self._event, 1)
        self._due.append([identity, *frames])

    # What a ControlLink calls, as of a zmq.Context and of a zmq.Socket.

    def socket(self, kind: int) -> FakeCluster:
        """See `zmq.Context.socket`."""
        return self

    def setsockopt(self, option: int, value: object) -> None:
        """See `zmq.Socket.setsockopt`."""

    def getsockopt_string(self, option: int) -> str:
        """See `zmq.Socket.getsockopt_string`."""
        return "tcp://127.0.0.1:1"

    def bind(self, address: str) -> None:
        """See `zmq.Socket.bind`."""

    def fileno(self) -> int:
        """See `zmq.Socket.fileno`."""
        return self._event

    def poll(self, timeout: int = 0) -> int:
        """See `zmq.Socket.poll`."""
        return zmq.POLLIN if self._due else 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        """See `zmq.Socket.recv_multipart`."""
        if not self._due:
            raise zmq.Again
        frames = self._due.popleft()
        if not self._due:
            os.eventfd_read(self._event)
        return frames

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        """See `zmq.Socket.send_multipart`: the node takes the message at once."""
        node = self._nodes.get(frames[0])
        if node is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        begun_s = time.thread_time()
        self._take(frames, node)
        self.own_s += time.thread_time() - begun_s

    def close(self, linger: int | None = None) -> None:
        """See `zmq.Socket.close`."""
        if not self.closed:
            self.closed = True
            os.close(self._event)


def _hello(node_id: str, node: _FakeNode) -> messages.Hello:
    return messages.Hello(
        node.role,
        node_id,
        node.epoch,
        FINGERPRINT,
        LAYOUT,
        peer_address=f"tcp://{node_id}:9000" if node.role == messages.PREFILL else "",
        http_address="",
        num_blocks=NUM_BLOCKS,
        max_request_tokens=2**17,
        max_num_seqs=MAX_NUM_SEQS,
        status=_STATUS,
        clock=host_clock(),
    )
