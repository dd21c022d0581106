"""A receiver with slots and a grant, a sender's end made by hand, and what both need."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.shm.segment import FOLDER
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.transports.shm.slots_ends import BLOCK_BYTES, NUM_BLOCKS, SHAPE, Peer, Target
from tests.request_keys import key_of


@pytest.fixture
def target(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Target]:
    target = Target(context, late_pool)
    target.receiver.expect(key_of(1), (6, 7), (3, 3))
    yield target
    target.receiver.close()


@pytest.fixture
def peer(context: zmq.Context[zmq.Socket[bytes]], target: Target) -> Iterator[Peer]:
    peer = Peer(context, target)
    peer.ring.slots[:] = np.arange(1, 1 + SHAPE.num_slots, dtype=np.uint8)[:, None, None]
    yield peer
    peer.close()


@pytest.fixture
def source() -> Blocks:
    return np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def planted() -> Iterator[Path]:
    """A place in /dev/shm whose name looks like a ring's; removed afterwards."""
    path = FOLDER / f"baton-{secrets.token_hex(16)}"
    yield path
    path.unlink(missing_ok=True)
