"""Senders of the zmq transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvtransfer.messages import Endpoint
from kvtransfer.pools.base import KvPool
from kvtransfer.pools.host import HostPool
from kvtransfer.transports.base import Blocks
from kvtransfer.transports.tcp_zmq import ZmqSender
from tests.kvtransfer.transports.tcp_zmq.zmq_ends import Context, Dial
from wire.keys import ClusterKey
from wire.links import LinkSettings


@pytest.fixture
def dial(context: Context) -> Iterator[Dial]:
    """Opens senders, closed at the end."""
    with ExitStack() as stack:

        def dialled(endpoint: Endpoint, pool: Blocks | KvPool, key: ClusterKey | None = None) -> ZmqSender:
            if isinstance(pool, np.ndarray):
                pool = HostPool(pool)
            sender = ZmqSender(context, endpoint, pool, LinkSettings(cluster_key=key))
            stack.callback(sender.close)
            return sender

        yield dialled
