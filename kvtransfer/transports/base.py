"""The interface of a transport: one side receives into its pool, the other pushes into it.

Owns nothing but the contract. A transport moves blocks and reports what happened; it knows no leases, states or
requests. Correctness does not rest on it: the receiver verifies checksums after `Commit` whatever a transport claims.

Contract:
- `Sender.push` returns when the blocks' bytes have been handed over for good (written into the receiver's pool, or
  accepted by the network). It is called on the pushing thread, may block up to its own deadline, raises
  `TransferFailed` when it cannot, and touches none of the blocks after it returned unless `reads_after_push`.
- A receiver with `peers_write` has memory that peers write by themselves: blocks of a broken handoff must stay set
  aside until the peer has acknowledged or is gone. Other receivers write their pool themselves in `poll`, and only
  blocks that were announced with `expect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zmq

from kvtransfer.messages import Endpoint, HandoffKey

Blocks = npt.NDArray[np.uint8]
"""[num_blocks, block_bytes] of a pool."""


@dataclass(frozen=True, slots=True)
class Move:
    """One block to push: `index` is its place in the grant."""

    index: int
    source: int
    target: int
    generation: int


class Receiver(Protocol):
    """D's side of one transport."""

    peers_write: bool

    @property
    def endpoint(self) -> Endpoint:
        """What a sender needs to connect."""
        ...

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable when `poll` has something to do; None when it never has."""
        ...

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Accept the blocks of a grant from now on."""
        ...

    def forget(self, key: HandoffKey) -> None:
        """Accept nothing more for this handoff."""
        ...

    def poll(self) -> None:
        """Take what has arrived and write it into the pool. Never blocks."""
        ...

    def num_missing(self, key: HandoffKey) -> int:
        """Expected blocks that have not arrived; 0 where peers write by themselves (Commit says they did)."""
        ...

    def close(self) -> None:
        """Give up sockets and segments."""
        ...


class Sender(Protocol):
    """P's side towards one receiver. Used by one thread at a time."""

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        """Move blocks of the own pool into the receiver's. Raises `TransferFailed`."""
        ...

    def close(self) -> None:
        """Give up the connection."""
        ...
