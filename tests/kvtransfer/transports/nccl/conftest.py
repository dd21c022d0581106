"""A receiver of the nccl transport, its pool and its senders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.kvtransfer.transports.nccl.nccl_ends import Target


@pytest.fixture
def target() -> Iterator[Target]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    target = Target(context)
    yield target
    for sender in target.senders:
        sender.close()
    target.receiver.close()
    context.destroy(linger=0)
