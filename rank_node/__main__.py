"""`python -m rank_node DESCRIPTOR`: a rank of a node whose ranks have pools of their own.

What `engine.executor.rank_process` is, with the transfer threads of `kvtransfer.ranks`. The driver says where they
listen and which key they have.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import cast

import zmq

from engine.executor import rank_process
from engine.runner.kv_memory import ByteArray, KvMemory
from kvtransfer.pools.host import HostPool
from kvtransfer.ranks.end import Network, RankPool
from kvtransfer.ranks.messages import Begin
from kvtransfer.ranks.serving import start_transfers
from program.process import start_authenticator
from wire.keys import ADMITTED, KeyRing
from wire.links import LinkSettings


def _on_pool(memory: KvMemory, ends: tuple[socket.socket, socket.socket]) -> None:
    pool = HostPool(cast("ByteArray", memory.blocks))
    start_transfers(RankPool(pool, memory.layout, memory.shard.kv), ends, _open_network)


def _open_network(begin: Begin) -> Network:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyRing(Path(begin.cluster_key), begin.role) if begin.cluster_key else None
    start_authenticator(context, keys)
    return Network(context, begin.host, LinkSettings(keys.towards(*ADMITTED[begin.role]) if keys else None))


def main(argv: list[str]) -> int:
    """Run until the driver says to stop; the exit status."""
    return rank_process.main(argv, _on_pool)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
