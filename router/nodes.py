"""The registry of nodes: which may join, which are alive, and what each is expected to have cached.

Owns membership. Does not own requests: it says which node is lost, and the relay reacts. Messages travel through
`router/control.py`.

Invariants: all registered nodes have the same model fingerprint and KV layout, so any prefill node fits any decode
node; a node is known by its epoch, and a new life of a node_id ends the earlier one.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from engine.cache.hashing import HASH_BYTES
from wire.errors import Refused
from wire.messages import DECODE, PREFILL, CacheEvents, Heartbeat, Hello, NodeStatus

DEAD_AFTER_S = 3.0
MAX_KNOWN_HASHES = 2**20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Node:
    """One life of a node, named by its epoch. `load` counts legs, also those that the node has not received yet."""

    hello: Hello
    heard_s: float
    status: NodeStatus
    load: int = 0
    is_leaving: bool = False
    cached_hashes: set[bytes] = field(default_factory=set)

    @property
    def epoch(self) -> int:
        """The random number that identifies this life."""
        return self.hello.epoch

    @property
    def node_id(self) -> str:
        """The node's name, kept over restarts."""
        return self.hello.node_id

    @property
    def role(self) -> str:
        """ "prefill" or "decode"."""
        return self.hello.role


class NodeRegistry:
    """Registered nodes by epoch. `fingerprint` is that of the router's own checkpoint, or None if it has no weights."""

    def __init__(self, fingerprint: str | None) -> None:
        self._fingerprint = fingerprint
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def all(self) -> list[Node]:
        """Every registered node."""
        return list(self._nodes.values())

    def get(self, epoch: int) -> Node | None:
        """The node of that epoch."""
        return self._nodes.get(epoch)

    def available(self, role: str, without: AbstractSet[int] = frozenset()) -> list[Node]:
        """Nodes that may be given a leg, in order of registration; nodes in `without` only if there is no other."""
        able = [node for node in self._nodes.values() if node.role == role and not node.is_leaving]
        return [node for node in able if node.epoch not in without] or able

    @property
    def max_request_tokens(self) -> int | None:
        """The longest prompt plus output that every node can hold; None while there is no node."""
        return min((node.hello.max_request_tokens for node in self._nodes.values()), default=None)

    @property
    def max_num_seqs(self) -> int | None:
        """Requests that every node can compute together; None while there is no node."""
        return min((node.hello.max_num_seqs for node in self._nodes.values()), default=None)

    def register(self, hello: Hello, now_s: float) -> Node | None:
        """Add a node; returns the earlier life of the same node_id, which is over. Raises `Refused`."""
        self._check(hello)
        known = self._nodes.get(hello.epoch)
        if known is not None:
            known.heard_s = now_s
            return None
        earlier = next((node for node in self._nodes.values() if node.node_id == hello.node_id), None)
        if earlier is not None:
            del self._nodes[earlier.epoch]
        self._nodes[hello.epoch] = Node(hello, now_s, hello.status)
        _log.info("%s node %s joined: %d blocks", hello.role, hello.node_id, hello.num_blocks)
        return earlier

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Record that a node lives. False when it is unknown."""
        node = self._nodes.get(beat.epoch)
        if node is None:
            return False
        node.heard_s, node.status = now_s, beat.status
        return True

    def cache_events(self, events: CacheEvents) -> None:
        """Update what a node is expected to have cached."""
        node = self._nodes.get(events.epoch)
        if node is None:
            return
        if events.is_snapshot:
            node.cached_hashes.clear()
        node.cached_hashes.update(_split(events.stored))
        node.cached_hashes.difference_update(_split(events.removed))
        if len(node.cached_hashes) > MAX_KNOWN_HASHES:
            node.cached_hashes.clear()  # a node that never reports evictions costs routing quality, not memory

    def leave(self, epoch: int) -> None:
        """Route nothing more to this node."""
        node = self._nodes.get(epoch)
        if node is not None and not node.is_leaving:
            node.is_leaving = True
            _log.info("%s node %s is leaving", node.role, node.node_id)

    def remove(self, epoch: int) -> Node | None:
        """Forget a node that is gone."""
        return self._nodes.pop(epoch, None)

    def overdue(self, now_s: float) -> list[Node]:
        """Nodes that have sent nothing for `DEAD_AFTER_S`."""
        return [node for node in self._nodes.values() if now_s - node.heard_s > DEAD_AFTER_S]

    def _check(self, hello: Hello) -> None:
        if hello.role not in (PREFILL, DECODE):
            raise Refused(f"role {hello.role!r} is not known here")
        others = [node for node in self._nodes.values() if node.node_id != hello.node_id]
        expected = self._fingerprint or next((node.hello.fingerprint for node in others), hello.fingerprint)
        if hello.fingerprint != expected:
            raise Refused(f"model differs: fingerprint {expected} here, {hello.fingerprint} at {hello.node_id}")
        for other in others:
            other.hello.layout.require_same(hello.layout, hello.node_id)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[first : first + HASH_BYTES] for first in range(0, len(hashes) - HASH_BYTES + 1, HASH_BYTES)]
