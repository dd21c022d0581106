"""What one node does for a request is called by the same key in every program that has to do with it."""

from __future__ import annotations

from typing import NamedTuple


class RequestKey(NamedTuple):
    """`handoff_id`: 128 random bits, chosen by the router. `attempt`: from 1; a new one begins when a node fails."""

    handoff_id: bytes
    attempt: int

    @classmethod
    def numbered(cls, number: int) -> RequestKey:
        """For a request that no other program has to do with: a number tells it from others as well."""
        return cls(number.to_bytes(16, "big"), 1)
