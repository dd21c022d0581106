"""One rank, in this process: every call leaves things as they are."""

from __future__ import annotations

from collections.abc import Callable

from engine.executor.passages import StreamShape
from engine.models.shard import WHOLE
from engine.runner.kv_memory import KvMemory


class UniExecutor:
    """See `Executor`."""

    shard = WHOLE
    collectives = None
    leader = None

    def loaded(self) -> None:
        """See `Executor.loaded`: there are no others."""

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """See `Executor.share_memory`: nobody else attends."""

    def ready(self) -> None:
        """See `Executor.ready`."""

    def guarded(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """See `Executor.guarded`."""
        return each_round

    def close(self) -> None:
        """See `Executor.close`."""
