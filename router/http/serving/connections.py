"""Counts connections and says which may stay.

Owns the number of connections in all and of each client address. Lives on one event loop.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum


class Verdict(Enum):
    """What becomes of a new connection. `REFUSED` ones are told so, `DROPPED` ones are not: there are too many."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    DROPPED = "dropped"


class ConnectionCounts:
    """All open connections of a server, those that were refused included until they are closed."""

    def __init__(self, max_in_all: int, max_per_address: int) -> None:
        self.num_open = 0
        self.num_refused = 0
        self._max_in_all = max_in_all
        self._max_per_address = max_per_address
        self._num_of: Counter[str] = Counter()

    def opened(self, address: str) -> Verdict:
        """Count a new connection, whatever the verdict."""
        self.num_open += 1
        self._num_of[address] += 1
        if self.num_open <= self._max_in_all and self._num_of[address] <= self._max_per_address:
            return Verdict.ADMITTED
        self.num_refused += 1
        return Verdict.DROPPED if self.num_open > self._max_in_all else Verdict.REFUSED

    def closed(self, address: str) -> None:
        """The connection from `address` is closed."""
        self.num_open -= 1
        self._num_of[address] -= 1
        if not self._num_of[address]:
            del self._num_of[address]
