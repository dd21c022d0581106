"""Ranks as processes of this machine: this process is the driver and computes as rank 0.

Owns the order in which driver and ranks come up: processes, the world in which they find each other, weights, KV
memory, kernels. A step is one order to all of them (`leading`), and what they do for each other in it are calls of the
world; nothing is said back. Whatever fails ends all of them: see `ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from device.base import DeviceFailed
from engine.executor.messages import Loaded, Ready, UsePool
from engine.executor.passages import Incoming, Passages, StreamShape
from engine.executor.ranks import LOAD_TIMEOUT_S, Ranks
from engine.executor.world import join_stage
from engine.models.shard import Shard
from engine.runner.kv_memory import KvMemory
from engine.settings import EngineSettings


class MpExecutor:
    """See `Executor`. `num_threads`: of each rank. Raises `DeviceFailed` when the ranks do not come up."""

    def __init__(self, settings: EngineSettings, num_threads: int) -> None:
        self.shard = Shard.of_process(0, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        self.leader = Ranks(settings, num_threads)
        self._incoming: Incoming | None = None
        try:
            self.collectives = join_stage(self.shard, self.leader.meeting, self.leader.nonce)
        except DeviceFailed as error:
            reason = self.leader.reason_of(error)
            self.leader.close()
            raise reason from None

    @property
    def pids(self) -> list[int]:
        """Of the ranks that are processes, in their order."""
        return self.leader.pids

    def loaded(self) -> None:
        """See `Executor.loaded`."""
        self.leader.await_all(Loaded, LOAD_TIMEOUT_S)

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> Incoming | None:
        """See `Executor.share_memory`. Raises `ValueError` for memory that other processes cannot map."""
        pool, use = memory.descriptor, UsePool(memory.num_blocks, memory.num_blocks * memory.layout.block_bytes)
        if pool is None:
            raise ValueError("ranks attend over one memory, and this is private")
        if stream is None:
            self.leader.share(use, lambda shard: [pool])
            return None
        passages = Passages(self.shard.size, stream)
        try:
            self.leader.share(use, lambda shard: [pool, *passages.descriptors_of(shard)])
            self._incoming = passages.incoming()
        finally:
            passages.close()
        return self._incoming

    def ready(self) -> None:
        """See `Executor.ready`."""
        self.leader.await_all(Ready, LOAD_TIMEOUT_S)

    def guarded(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """See `Executor.guarded`."""
        self.leader.end_process_when_lost()
        return partial(_round, self.leader, each_round)

    def close(self) -> None:
        """See `Executor.close`."""
        self.leader.close()
        if self._incoming is not None:
            self._incoming.close()


def _round(ranks: Ranks, each_round: Callable[[], None]) -> None:
    ranks.require_alive()
    each_round()
