"""The request key: the name of one attempt at a request, which is the same in all programs.

A handoff id begins with the epoch of the router that chose it. So routers that share nodes never choose the same one,
and a node sees of each request whose it is.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

OWNER_BYTES = 8
_NUM_RANDOM_BYTES = 8


def owner_of_epoch(epoch: int) -> bytes:
    """The first `OWNER_BYTES` of each handoff id of the router with that epoch."""
    return epoch.to_bytes(OWNER_BYTES, "little")


def new_handoff_id(owner: bytes) -> bytes:
    """The id of a new request of that router."""
    return owner + secrets.token_bytes(_NUM_RANDOM_BYTES)


class RequestKey(NamedTuple):
    """`handoff_id`: 128 bits, chosen by the router, with whose epoch they begin. `attempt`: from 1; a new one begins
    when a node fails."""

    handoff_id: bytes
    attempt: int

    @classmethod
    def numbered(cls, number: int) -> RequestKey:
        """The key of a request that stays within one program, where a number is enough to tell it from others."""
        return cls(number.to_bytes(16, "big"), 1)
