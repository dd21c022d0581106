"""`python -m baton.ranks DESCRIPTOR [HOST KEY_FILE]`: a rank of an engine, told what to do over that socket.

What `baton.ranks.executor.rank_process` is and, where it has a pool of its own, the transfer threads of
`baton.ranks.transfer`. The driver says where they listen, by which transports, and which key they have; on another
machine than the driver's, host and key are the machine's own. The rank ends them before itself, so that it leaves no
segment and no agent of a transport behind.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import zmq

from baton.engine.runner.kv_memory import KvMemory
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.transports.part_registry import Network, RankPool
from baton.ranks.executor.rank_process import follow
from baton.ranks.transfer.messages import Begin
from baton.ranks.transfer.serving import ORDER_S, start_transfers
from baton.runtime.process import start_authenticator
from baton.wire.keys import ADMITTED, KeyRing
from baton.wire.links import LinkSettings

_END_S = 3.0


def _open_network(machine: Sequence[str], begin: Begin) -> Network:
    if machine:
        host, cluster_key = machine
        begin = Begin(host, cluster_key, begin.role)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyRing(Path(begin.cluster_key), begin.role) if begin.cluster_key else None
    start_authenticator(context, keys)
    return Network(context, begin.host, LinkSettings(keys.towards(*ADMITTED[begin.role]) if keys else None))


def main(argv: list[str]) -> int:
    """Run until the driver says to stop; the exit status."""
    threads: list[threading.Thread] = []
    lines: list[socket.socket] = []

    def on_pool(memory: KvMemory, ends: tuple[socket.socket, socket.socket]) -> None:
        own = RankPool(open_pool(memory.blocks), memory.layout, memory.shard.kv, memory.descriptor)
        is_afar = len(argv) > 1
        threads.extend(start_transfers(own, ends, partial(_open_network, argv[1:]), ORDER_S if is_afar else 0.0))
        lines.extend(ends)

    status = follow(int(argv[0]), on_pool)
    for end in lines:
        with contextlib.suppress(OSError):  # the driver has ended it already
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(_END_S)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
