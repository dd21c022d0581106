"""One rank, in this process: every call leaves things as they are."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from baton.engine.executor.passages import StreamShape
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.runner.kv_memory import KvMemory


class UniExecutor:
    """See `Executor`."""

    shard = WHOLE
    collectives = None
    leader = None

    def loaded(self) -> None:
        """See `Executor.loaded`: there are no others."""

    def fewest_blocks(self, num_blocks: int) -> int:
        """See `Executor.fewest_blocks`."""
        return num_blocks

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """See `Executor.share_memory`: nobody else attends."""

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """See `Executor.take_transfer_ends`: there are no others."""
        return {}

    def ready(self) -> None:
        """See `Executor.ready`."""

    def guarded(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """See `Executor.guarded`."""
        return each_round

    def close(self) -> None:
        """See `Executor.close`."""
