"""Senders of the zmq transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.tcp_zmq import ZmqSender
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings
from tests.kvtransfer.transports.tcp_zmq.zmq_ends import Context, Dial


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
