"""How much each connection of the control port may say: messages and bytes, per second and at once.

Owns an allowance for each connection that has spoken lately. It is far above what a node has to say, even after the
router has slept for half a minute and everything comes at once; who uses it up floods, whatever is in its messages.
Bounded, whoever comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MESSAGES_PER_S, MAX_MESSAGES = 4_000.0, 100_000.0
BYTES_PER_S, MAX_BYTES = 32.0 * 2**20, 512.0 * 2**20
_MAX_PEERS = 4096


@dataclass(slots=True)
class _Allowance:
    """What is left at `at_s`."""

    at_s: float
    num_messages: float
    num_bytes: float


class PeerRates:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_peer: dict[bytes, _Allowance] = {}

    def allows(self, identity: bytes, num_bytes: int) -> bool:
        """Whether a message of that size from this connection is within its allowance, of which it takes its part."""
        now_s = self._clock()
        left = self._by_peer.get(identity)
        if left is None:
            left = self._begin(identity, now_s)
        passed_s, left.at_s = now_s - left.at_s, now_s
        left.num_messages = min(left.num_messages + passed_s * MESSAGES_PER_S, MAX_MESSAGES) - 1
        left.num_bytes = min(left.num_bytes + passed_s * BYTES_PER_S, MAX_BYTES) - num_bytes
        return left.num_messages >= 0 and left.num_bytes >= 0

    def _begin(self, identity: bytes, now_s: float) -> _Allowance:
        if len(self._by_peer) >= _MAX_PEERS:
            self._by_peer.pop(next(iter(self._by_peer)))  # the oldest; a node among them begins anew
        self._by_peer[identity] = _Allowance(now_s, MAX_MESSAGES, MAX_BYTES)
        return self._by_peer[identity]
