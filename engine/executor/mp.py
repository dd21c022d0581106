"""Ranks as processes of this machine: this process is the driver and computes as rank 0.

Owns the order in which driver and ranks come up: processes, the world in which they find each other, weights, KV
memory, kernels. A step is one order to all of them (`leading`), and what they do for each other in it are calls of the
world; nothing is said back. Whatever fails ends all of them: see `ranks`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from device.base import DeviceFailed
from engine.executor.messages import RANK_MODULE, Loaded, Ready, UsePool
from engine.executor.passages import Incoming, Passages, StreamShape
from engine.executor.ranks import LOAD_TIMEOUT_S, Ranks
from engine.executor.world import join_stage
from engine.models.shard import Shard
from engine.runner.kv_memory import KvMemory
from engine.settings import EngineSettings


class MpExecutor:
    """See `Executor`. `num_threads`: of each rank; `rank_module`: the program of all but the first. Raises
    `DeviceFailed` when the ranks do not come up."""

    def __init__(self, settings: EngineSettings, num_threads: int, rank_module: str = RANK_MODULE) -> None:
        self.shard = Shard.of_process(0, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        self.leader = Ranks(settings, num_threads, rank_module)
        self._incoming: Incoming | None = None
        self._transfer_ends: dict[Shard, tuple[socket.socket, socket.socket]] = {}
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
        num_bytes = 0 if memory.is_divided else memory.num_blocks * memory.layout.block_bytes
        use = UsePool(memory.num_blocks, num_bytes)
        if memory.descriptor is None and not memory.is_divided:
            raise ValueError("ranks attend over one memory, and this is private")
        passages = None if stream is None else Passages(self.shard.size, stream)
        theirs: list[socket.socket] = []

        def descriptors_of(shard: Shard) -> Sequence[int]:
            ways = () if passages is None else passages.descriptors_of(shard)
            if memory.descriptor is not None and not memory.is_divided:
                return [memory.descriptor, *ways]
            (receiving, its_receiving), (sending, its_sending) = socket.socketpair(), socket.socketpair()
            self._transfer_ends[shard] = receiving, sending
            theirs.extend((its_receiving, its_sending))
            return [its_receiving.fileno(), its_sending.fileno(), *ways]

        try:
            self.leader.share(use, descriptors_of)
            self._incoming = None if passages is None else passages.incoming()
        finally:
            for end in theirs:
                end.close()
            if passages is not None:
                passages.close()
        return self._incoming

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """See `Executor.take_transfer_ends`."""
        taken, self._transfer_ends = self._transfer_ends, {}
        return taken

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
        for ends in self._transfer_ends.values():
            for end in ends:
                end.close()
        if self._incoming is not None:
            self._incoming.close()


def _round(ranks: Ranks, each_round: Callable[[], None]) -> None:
    ranks.require_alive()
    each_round()
