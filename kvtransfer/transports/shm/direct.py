"""Same host: the receiver's pool is a shared-memory segment, a push is one copy per contiguous run.

Owns the mappings of other nodes' pools (see `segment`). A name is accepted from a registered peer only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.kvtransfer.messages import Endpoint, ProcessIdentity
from baton.kvtransfer.runs import coalesce
from baton.kvtransfer.transports.base import Blocks, BlocksArrived, Move
from baton.kvtransfer.transports.shm.segment import Mapping, Segment
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.request_key import RequestKey

NAME = "shm"
_PIECE_BYTES = 2**20


class ShmReceiver:
    """Offers a segment that peers write into."""

    write_proof = WriteProof.WRITER_ENDED
    is_silent = True
    is_ready = True

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def endpoint(self) -> Endpoint:
        """The transport, and the name of the segment."""
        return Endpoint(NAME, self._segment.name)

    def wait_on(self) -> Sequence[Any]:
        """No sockets: peers write by themselves."""
        return ()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Do nothing: Commit and its checksums decide."""

    def forget(self, key: RequestKey) -> None:
        """Do nothing: this side does not know what peers write."""

    def is_writing(self, key: RequestKey) -> bool:
        """False: peers write, and never this side."""
        return False

    def poll(self) -> None:
        """Do nothing: peers write by themselves."""

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """Nothing: this side does not notice what has arrived."""
        return ()

    def fence(self) -> bool:
        """False: a peer that has the segment mapped keeps it."""
        return False

    def close(self) -> None:
        """Remove the segment's name; peers keep what they have mapped."""
        self._segment.close()


class ShmSender:
    """Copies blocks of `blocks` into the segment named by a peer's endpoint. Raises `TransferFailed` when it cannot be
    that peer's pool.
    """

    is_silent = True
    pushes_parts = True
    needs_fence = False
    piece_bytes = _PIECE_BYTES
    writers: Sequence[ProcessIdentity] = ()

    def __init__(self, endpoint: Endpoint, blocks: Blocks, num_target_blocks: int) -> None:
        self._blocks = blocks
        self._mapping = Mapping(endpoint.address, num_target_blocks * blocks.shape[1])
        self._target = self._mapping.array.reshape(num_target_blocks, blocks.shape[1])

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Copy the blocks into the receiver's memory; they are there when it returns. True. Raises `TransferFailed`."""
        self._require_memory(moves)
        for run in coalesce([move.source for move in moves], [move.target for move in moves], len(moves)):
            np.copyto(
                self._target[run.target : run.target + run.count], self._blocks[run.source : run.source + run.count]
            )
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Copy bytes `begin_byte` .. `end_byte - 1` of each block to the receiver's memory. Raises `TransferFailed`."""
        self._require_memory(moves)
        for run in coalesce([move.source for move in moves], [move.target for move in moves], len(moves)):
            np.copyto(
                self._target[run.target : run.target + run.count, begin_byte:end_byte],
                self._blocks[run.source : run.source + run.count, begin_byte:end_byte],
            )

    def _require_memory(self, moves: Sequence[Move]) -> None:
        """Blocks of a pool get their memory in order."""
        num_blocks = 1 + max((move.target for move in moves), default=-1)
        self._mapping.require_whole(num_blocks * self._blocks.shape[1])

    def poll(self) -> None:
        """Do nothing: no push is ever in flight."""

    def wait_on(self) -> Sequence[Any]:
        """No sockets: no push is ever in flight."""
        return ()

    def is_reading(self, key: RequestKey) -> bool:
        """False: nothing is read after `push`."""
        return False

    def close(self) -> None:
        """Drop the mapping, which ends with its last reference."""
        self._target = np.empty((0, 0), dtype=np.uint8)
        self._mapping.close()
