"""Peers of the control port that misbehave: that send what is no message, or more than a node has to say.

Owns how much rubbish came from each connection within a minute, and an allowance of messages and bytes for each that
has spoken lately. The allowance is far above what a node has to say, even after the router has slept for half a minute
and everything comes at once; who uses it up floods, whatever is in its messages. A connection that was cut off is not
listened to for the rest of its minute, so what it sends costs a read each. Bounded, whatever comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_BAD_MESSAGES = 32
MAX_STRANGER_BYTES = 64 * 1024
"""A connection that is not a node's has nothing longer to say than Hello."""
PERIOD_S = 60.0
MESSAGES_PER_S, MAX_MESSAGES = 4_000.0, 100_000.0
BYTES_PER_S, MAX_BYTES = 32.0 * 2**20, 512.0 * 2**20
_MAX_PEERS = 4096
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Allowance:
    """What is left at `at_s`."""

    at_s: float
    num_messages: float
    num_bytes: float


class PeerRates:
    """How much each connection may say: messages and bytes, per second and at once."""

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


class BadPeers:
    """Who is cut off. Bad messages are counted, and named in the log once a minute; `num_bad` counts all since the
    start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bad = 0
        self._clock = clock
        self._rates = PeerRates(clock)
        self._since_s = clock() - PERIOD_S
        self._num_logged = 0
        self._by_peer: dict[bytes, int] = {}

    def note(self, identity: bytes, error: Exception) -> bool:
        """A bad message came from this connection. Returns True when that makes it one that is cut off."""
        self.num_bad += 1
        self._begin_period()
        if not self._by_peer:
            _log.warning("%d messages from nodes rejected; the last: %s", self.num_bad - self._num_logged, error)
            self._num_logged = self.num_bad
        if identity in self._by_peer or len(self._by_peer) < _MAX_PEERS:
            self._by_peer[identity] = self._by_peer.get(identity, 0) + 1
        return self._by_peer.get(identity) == MAX_BAD_MESSAGES

    def floods(self, identity: bytes, num_bytes: int) -> bool:
        """Whether a message of that size is more than this connection may say: it is cut off then."""
        if self._rates.allows(identity, num_bytes):
            return False
        _log.warning("a connection floods the control port, and is not listened to for a minute")
        self._begin_period()
        if identity in self._by_peer or len(self._by_peer) < _MAX_PEERS:
            self._by_peer[identity] = MAX_BAD_MESSAGES
        return True

    def is_cut_off(self, identity: bytes) -> bool:
        """Whether nothing from this connection is to be looked at now."""
        if self._by_peer.get(identity, 0) < MAX_BAD_MESSAGES:
            return False
        self._begin_period()
        return identity in self._by_peer

    def _begin_period(self) -> None:
        now_s = self._clock()
        if now_s - self._since_s >= PERIOD_S:
            self._since_s = now_s
            self._by_peer.clear()
