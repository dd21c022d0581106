"""The interface of a transport: one side receives into its pool, the other pushes into it.

Owns nothing but the contract. A transport moves blocks and reports what happened; it knows no leases, states or
requests. Correctness does not rest on it: the receiver verifies checksums after `Commit` whatever a transport claims.

Everything here is called by one thread of its node, the transfer thread, and nothing here may block it: work that
waits (a slow peer, a library's own progress) goes on elsewhere and is noticed in `poll`. `wait_on` names what becomes
readable then.

Sending. `push` begins to move blocks and may return before their bytes have left; as long as `is_reading` says so the
blocks of that handoff must not change. A sender that stands still is closed by its caller, who counts the time.

Receiving. What proves that a peer writes nothing any more differs, and each receiver declares it (`write_proof`). Where
peers write the pool by themselves, blocks of a broken handoff are quarantined until there is such a proof. A receiver
with `OWN_HANDS` writes its pool itself in `poll`, and only blocks that were announced with `expect`, each once.

A receiver finds out by itself which blocks have arrived (`take_arrivals`), unless it `is_silent`: then the sending side
tells by message, and `push` returns only when the bytes are in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.kvtransfer.messages import Endpoint, ProcessIdentity
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.errors import TransferFailed
from baton.wire.request_key import RequestKey

Blocks = npt.NDArray[np.uint8]
"""[num_blocks, block_bytes] of a pool."""


class Starting(TransferFailed):
    """A transport is not ready yet, because a process that it needs is starting. Another try in a moment will do."""


@dataclass(frozen=True, slots=True)
class Move:
    """One block to push: from `source` here to `target` there. `index` is its place in the grant."""

    index: int
    source: int
    target: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """Blocks `first_index` .. `first_index + count - 1` of a grant are in the pool."""

    key: RequestKey
    first_index: int
    count: int


class Receiver(Protocol):
    """D's side of one transport.

    `write_proof`: what shows that nothing can be written into a revoked grant any more. `is_silent`: it does not notice
    what has arrived.
    """

    write_proof: WriteProof
    is_silent: bool

    @property
    def is_ready(self) -> bool:
        """Whether `endpoint` can be offered. False while a process of this side starts again."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The address and details that a sender needs to connect. They change with `fence`, and in `poll` when a
        process of this side had died."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """Sockets (ZMQ or with a file descriptor) that are readable when `poll` has something to do."""
        ...

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Accept these blocks of a grant from now on, each once. Called again for a handoff, it accepts them anew."""
        ...

    def forget(self, key: RequestKey) -> None:
        """Accept nothing more for this handoff."""
        ...

    def is_writing(self, key: RequestKey) -> bool:
        """Whether this side itself may still write blocks of this handoff, which it was told to forget. A side that
        writes from other processes may, until each of them has heard of that."""
        ...

    def poll(self) -> None:
        """Take what has arrived. Bounded work, never blocks, never raises for what a peer sent."""
        ...

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """Blocks that arrived since the last call, of handoffs that are expected. Empty where `is_silent`."""
        ...

    def fence(self) -> bool:
        """Make sure that no peer writes any more by the endpoint known so far, and offer a new one.

        False where this side cannot do that. Everything in flight to this receiver is lost.
        """
        ...

    def close(self) -> None:
        """Close sockets, segments and processes."""
        ...


class Sender(Protocol):
    """P's side towards one receiver.

    `is_silent`: as the receiver it pushes to. `piece_bytes`: how much one `push` should be given. `pushes_parts`:
    `push_part` is cheap. `writers`: the processes that write the receiver's pool; none: this one does.
    """

    is_silent: bool
    piece_bytes: int
    pushes_parts: bool
    writers: Sequence[ProcessIdentity]

    @property
    def needs_fence(self) -> bool:
        """Whether pushed bytes may land at the receiver although nothing is read here any more. Only a fence of the
        receiver ends that. True once a push ended in any other way than by landing."""
        ...

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Begin to move blocks of the own pool into the receiver's. False: not now, nothing was begun, try again later.

        The moves follow each other in the grant (consecutive `index`). Raises `TransferFailed`; the sender is of no use
        then.
        """
        ...

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Move bytes `begin_byte` .. `end_byte - 1` of each block, at once. Only where `pushes_parts`."""
        ...

    def poll(self) -> None:
        """Notice what has finished. Raises `TransferFailed` when the receiver cannot be reached any more."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """Sockets and files that are readable when `poll` has something to do, or `push` may be tried again."""
        ...

    def is_reading(self, key: RequestKey) -> bool:
        """Whether blocks pushed for this handoff may still be read."""
        ...

    def close(self) -> None:
        """End the connection and drop what is in flight. `is_reading` says when nothing is read any more."""
        ...
