"""The request key: the name of one attempt at a request, which is the same in all programs."""

from __future__ import annotations

from typing import NamedTuple


class RequestKey(NamedTuple):
    """`handoff_id`: 128 random bits, chosen by the router. `attempt`: from 1; a new one begins when a node fails."""

    handoff_id: bytes
    attempt: int

    @classmethod
    def numbered(cls, number: int) -> RequestKey:
        """The key of a request that stays within one program, where a number is enough to tell it from others."""
        return cls(number.to_bytes(16, "big"), 1)
