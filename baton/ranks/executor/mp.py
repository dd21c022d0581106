"""Ranks as processes, of this machine or of several: this process is the driver and computes as rank 0.

Owns the order in which driver and ranks come up: processes, the world in which they find each other, weights, KV
memory, kernels. A step is one order to all of them (`leading`), and what they do for each other in it are calls of the
world; nothing is said back. Whatever fails ends all of them: see `ranks`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from baton.device.base import Device, DeviceFailed
from baton.engine.cache.offload import PoolTiers
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.executor.base import StreamShape
from baton.engine.models.shard import Shard
from baton.engine.runner.forward import ForwardPass
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import RunnerArguments
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.settings import EngineSettings
from baton.ranks.executor.leading import LeadingRunner, Led
from baton.ranks.executor.leading_tiers import LeadingTiers
from baton.ranks.executor.meeting import MEET_TIMEOUT_S
from baton.ranks.executor.messages import Loaded, Ready, UsePool
from baton.ranks.executor.passages import Incoming, Passages, incoming_from
from baton.ranks.executor.ranks import LOAD_TIMEOUT_S, Ranks
from baton.ranks.executor.starting import RankStarter, StartedRank
from baton.ranks.executor.world import join_pairs, join_stage

_JOIN_S = 2 * MEET_TIMEOUT_S
_MEASURE_S = 600.0
"""Kernels are compiled when they are first met."""


class MpExecutor:
    """An engine whose ranks are processes. `device`: this rank's; `num_threads`: of each rank; `starter`: starts all
    but the first; `fingerprint`: of the checkpoint. Raises `DeviceFailed` when the ranks do not come up."""

    def __init__(
        self, settings: EngineSettings, device: Device, num_threads: int, starter: RankStarter, fingerprint: str
    ) -> None:
        self._settings = settings
        self.shard = Shard.of_process(0, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        hangs, on_devices = device.torch_device.type == "cuda", device.has_own_memory
        self.leader = Ranks(settings, num_threads, starter, fingerprint, on_devices=on_devices, calls_hang=hangs)
        meet = self.leader.meeting, self.leader.nonce
        spread = self.leader.spread
        self._incoming: Incoming | None = None
        self._memory: KvMemory | None = None
        self._transfer_ends: dict[Shard, tuple[socket.socket, socket.socket]] = {}
        try:
            with self.leader.within(_JOIN_S):
                self.collectives = join_stage(self.shard, *meet, spread.stage_host(0), device)
                host, is_afar = spread.machines[0].host, spread.is_before_afar(0)
                pairs = join_pairs(self.shard, *meet, host, device, is_before_afar=is_afar, is_next_afar=False)
            self._before = pairs.before
            for world in (self.collectives, self._before):
                if world is not None and on_devices:
                    self.leader.abort_when_lost(world.abort)
        except DeviceFailed as error:
            reason = self.leader.reason_of(error)
            self.leader.close()
            raise reason from None

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        return self.leader.pids

    def loaded(self) -> None:
        """Wait until all ranks have loaded. Raises `DeviceFailed` after `LOAD_TIMEOUT_S` seconds."""
        self.leader.await_all(Loaded, LOAD_TIMEOUT_S)

    def fewest_blocks(self, measure: Callable[[], int]) -> int:
        """The fewest blocks that any rank has room for; this one calls `measure`. Raises `DeviceFailed`."""
        with self.leader.within(_MEASURE_S):
            return self.leader.fewest_blocks(measure(), LOAD_TIMEOUT_S)

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        """Map the KV memory into all ranks of this machine, or have each make its own pool. Raises `ValueError` for
        memory that other processes cannot map."""
        num_bytes = 0 if memory.is_divided else memory.num_blocks * memory.layout.block_bytes
        use = UsePool(memory.num_blocks, num_bytes)
        if memory.descriptor is None and not memory.is_divided:
            raise ValueError("ranks attend over one memory, and this is private")
        self._memory = memory
        spread = self.leader.spread
        near = [shard for number, shard in enumerate(spread.shards) if not spread.is_next_afar(number)]
        passages = None if stream is None else Passages(near, stream)
        theirs: list[socket.socket] = []

        def descriptors_of(shard: Shard, process: StartedRank) -> Sequence[int]:
            ways = () if passages is None else passages.descriptors_of(shard)
            if memory.descriptor is not None and not memory.is_divided:
                return [memory.descriptor, *ways]
            self._transfer_ends[shard], its = process.transfer_ends()
            theirs.extend(its)
            return [*(end.fileno() for end in its), *ways]

        try:
            self.leader.hand_out(use, descriptors_of)
            self._incoming = self._own_end(passages, stream)
        finally:
            for end in theirs:
                end.close()
            if passages is not None:
                passages.close()

    def _own_end(self, passages: Passages | None, stream: StreamShape | None) -> Incoming | None:
        if passages is None or stream is None:
            return None
        return passages.incoming() if self._before is None else incoming_from(self._before, stream)

    def leading_runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, costs: StepCosts
    ) -> LeadingRunner:
        """The runner that leads all ranks through a step."""
        assert self._memory is not None  # the order of calls
        led = Led(self.leader, self.collectives, self._settings, costs, self._memory.begun_part)
        return led.runner(arguments, run, num_layers_before, self._incoming)

    def take_transfer_ends(self) -> Mapping[Shard, tuple[socket.socket, socket.socket]]:
        """Two sockets to each other rank, for receiving and for sending. They are handed out once; the caller closes
        them."""
        taken, self._transfer_ends = self._transfer_ends, {}
        return taken

    def with_other_ranks(self, own: TieredPool) -> PoolTiers:
        """`own` where all ranks share that pool; else it leads the pools and tiers of the others."""
        divides = self._settings.divides_pool
        return LeadingTiers(own, self.leader, self._settings.num_ranks) if divides else own

    def ready(self) -> None:
        """Wait until all ranks are prepared. Raises `DeviceFailed` after `LOAD_TIMEOUT_S` seconds."""
        self.leader.await_all(Ready, LOAD_TIMEOUT_S)

    def watched(self, each_round: Callable[[], None]) -> Callable[[], None]:
        """A round that first makes sure that all ranks live. From now on a call that hangs on a lost rank ends the
        process."""
        self.leader.end_process_when_lost()
        return partial(_round, self.leader, each_round)

    def close(self) -> None:
        """End all other ranks, and close what was opened to them."""
        self.leader.close()
        for ends in self._transfer_ends.values():
            for end in ends:
                end.close()
        if self._incoming is not None:
            self._incoming.close()


def _round(ranks: Ranks, each_round: Callable[[], None]) -> None:
    ranks.require_alive()
    each_round()
