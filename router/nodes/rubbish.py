"""Peers of the control port that send what is no message: counted, named in the log once a minute, and cut off.

Owns how much rubbish came from each connection within a minute. A connection that was cut off is not listened to for
the rest of its minute, so what it sends costs a read each. Bounded, whatever comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_BAD_MESSAGES = 32
MAX_STRANGER_BYTES = 64 * 1024
"""A connection that is not a node's has nothing longer to say than Hello."""
PERIOD_S = 60.0
_MAX_PEERS = 4096
_log = logging.getLogger(__name__)


class RubbishLog:
    """See the module. `num_bad` counts all bad messages since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bad = 0
        self._clock = clock
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

    def cut_off(self, identity: bytes) -> None:
        """Listen to this connection no more in this minute."""
        self._begin_period()
        if identity in self._by_peer or len(self._by_peer) < _MAX_PEERS:
            self._by_peer[identity] = MAX_BAD_MESSAGES

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
