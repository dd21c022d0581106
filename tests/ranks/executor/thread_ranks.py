"""Ranks as threads of the test: the product's runners, followers, passages and shared KV memory, with calls among ranks
in memory.

What is left out are processes, sockets and gloo; `test_ranks.py` has those.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.device.base import Device
from baton.engine.build import Engine, build_engine
from baton.engine.cache.offload import PoolTiers
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.executor.base import StreamShape
from baton.engine.model_shard import Basis, attention_of, load_shard, open_basis, recorded_pass, stream_of
from baton.engine.models.collectives import Collectives
from baton.engine.models.shard import Shard
from baton.engine.offloading import open_pool, tiers_opener
from baton.engine.runner.forward import ForwardPass, decoded_pass
from baton.engine.runner.kv_memory import KvMemory, allocate_shared, mapped_kv, own_kv_memory
from baton.engine.runner.model_runner import ModelRunner, RunnerArguments
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.settings import EngineSettings
from baton.ranks.executor.following import Follower, RankModel
from baton.ranks.executor.following_tiers import FollowingTiers
from baton.ranks.executor.leading import Led
from baton.ranks.executor.leading_tiers import LeadingTiers
from baton.ranks.executor.meeting import stage_group
from baton.ranks.executor.messages import Came, Channel, Compute, Order, Report, Saved
from baton.ranks.executor.mp import MpExecutor
from baton.ranks.executor.passages import (
    NO_PAIRS,
    NO_PASSAGES,
    Incoming,
    Outgoing,
    Passages,
    incoming_from,
    taken_ends,
)
from baton.ranks.executor.spread import LOOPBACK
from baton.ranks.executor.world import Pairs, World, join_pairs
from baton.wire.kv_shard import own_layout
from tests.ranks.executor.board import Board

_WAIT_S = 60.0


class SharedCalls:
    """The calls of all ranks: each waits until everybody has made it."""

    def __init__(self, size: int) -> None:
        self.num_sums = 0
        self._barrier = threading.Barrier(size, timeout=_WAIT_S)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def all(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """What every rank has given."""
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


class ThreadCollectives:
    """See `Collectives`: one rank's end of the calls."""

    def __init__(self, rank: int, calls: SharedCalls) -> None:
        self._rank, self._calls = rank, calls

    def add_up(self, summand: Tensor) -> Tensor:
        self._calls.num_sums += self._rank == 0
        return summand.copy_(torch.stack(self._calls.all(self._rank, summand)).sum(0))

    def side_by_side(self, share: Tensor) -> Tensor:
        shares = self._calls.all(self._rank, share)
        return torch.cat(shares, dim=1) if self._rank == 0 else share

    def from_first(self, values: Tensor) -> None:
        values.copy_(self._calls.all(self._rank, values)[0])


class ThreadExecutor:
    """See `Executor`. `orders`: what the ranks were told, as it travels."""

    def __init__(self, basis: Basis, num_threads: int) -> None:
        settings = self._settings = basis.settings
        sizes = size, num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
        self._stages = [SharedCalls(size) for _ in range(num_stages)]
        self.calls = self._stages[-1]
        self.shard = Shard.of_process(0, *sizes)
        self.orders: list[bytes] = []
        self.limits: list[float] = []
        self.most_in_flight = 0
        self.memory: Future[tuple[KvMemory, Passages | None]] = Future()
        self._shards = [Shard.of_process(number, *sizes) for number in range(1, settings.num_ranks)]
        self._threads = [ThreadPoolExecutor(1) for _ in self._shards]
        self._followers = [
            thread.submit(self._follower, number, shard, settings)
            for number, (shard, thread) in enumerate(zip(self._shards, self._threads, strict=True), 1)
        ]
        self._computing: list[Future[Any]] = []
        self.pools: dict[int, TieredPool] = {}
        self.tiers: dict[int, FollowingTiers] = {}
        self._of_tiers: Callable[[int, Came | Saved], None] = lambda number, report: None
        self._num_entered = 0
        self._are_ready = False
        self.passages: Passages | None = None
        self._ends: list[Incoming | Outgoing] = []
        self._incoming: Incoming | None = None
        self.collectives = self._collectives(self.shard)
        self._before = self._pairs(self.shard, basis.device).before

    def _collectives(self, shard: Shard) -> Collectives | None:
        return ThreadCollectives(shard.rank, self._stages[shard.stage]) if shard.size > 1 else None

    def _pairs(self, shard: Shard, device: Device) -> Pairs:
        return NO_PAIRS

    def _follower(self, number: int, shard: Shard, settings: EngineSettings) -> Follower:
        basis = open_basis(settings, 1)
        collectives, pairs = self._collectives(shard), self._pairs(shard, basis.device)
        model = load_shard(basis, shard, collectives, None)
        choice = attention_of(basis, model, shard)
        memory, passages = self.memory.result(_WAIT_S)
        if memory.is_divided:
            own = own_kv_memory(model.layout, model.own, shard, memory.num_blocks, basis.device)
            paged = own.paged
            if (open_tiers := tiers_opener(settings)) is not None:
                self._open_tiers(number, open_pool(basis, model, choice, own, open_tiers))
            assert own_layout(model.layout, shard.kv) == model.own
        else:
            assert memory.descriptor is not None
            num_bytes = memory.num_blocks * memory.layout.block_bytes
            paged = mapped_kv(model.layout, model.own, shard, num_bytes, memory.descriptor)
        stream = stream_of(basis, model, shard)
        ends = NO_PASSAGES
        if stream is not None:
            descriptors = () if passages is None else passages.descriptors_of(shard)
            ends = taken_ends(shard, stream, map(os.dup, descriptors).__next__, pairs)
        attention = choice.build(paged)
        run = recorded_pass(basis, model.decoder, attention) or decoded_pass(model.decoder, attention)
        self._ends += [end for end in ends if end is not None]
        blocks = paged.blocks if memory.is_divided else None
        limits = replace(basis.limits, spare_block=memory.spare_block)
        share = RankModel(model.decoder, attention, run, blocks)
        follower = Follower(share, basis.device, limits, collectives, ends)
        if basis.records_steps:
            follower.record_graphs()
        return follower

    def tell_ahead(self, order: Order) -> None:
        self._num_entered += 1
        self.most_in_flight = max(self.most_in_flight, self._num_entered)
        self._tell(order, lambda shard: not shard.is_last_stage)

    def tell(self, order: Order) -> None:
        self.orders.append(Channel.encode(order))
        self._num_entered -= 1
        self._tell(order, lambda shard: shard.is_last_stage)

    def _open_tiers(self, number: int, pool: TieredPool) -> None:
        def say(report: Report) -> None:
            assert isinstance(report, Came | Saved)
            self._of_tiers(number, report)

        self.pools[number], self.tiers[number] = pool, FollowingTiers(pool, say)

    def with_other_ranks(self, own: TieredPool) -> PoolTiers:
        return LeadingTiers(own, self, self._settings.num_ranks) if self._settings.divides_pool else own

    def hear(self, of_tiers: Callable[[int, Came | Saved], None]) -> None:
        self._of_tiers = of_tiers

    def tell_all(self, order: Order) -> None:
        self._computing += [
            thread.submit(self.tiers[number].take, _as_read(order)) for number, thread in enumerate(self._threads, 1)
        ]

    def require_alive(self) -> None:
        """Threads do not end."""

    def _tell(self, order: Order, is_told: Callable[[Shard], bool]) -> None:
        assert isinstance(order, Compute)
        assert self._are_ready, "a step that may take as long as a step is ordered while ranks still prepare"
        for computing in [each for each in self._computing if each.done()]:
            self._computing.remove(computing)
            computing.result()
        self._computing += [
            thread.submit(follower.result().compute, order)
            for thread, follower, shard in zip(self._threads, self._followers, self._shards, strict=True)
            if is_told(shard)
        ]

    def within(self, limit_s: float) -> AbstractContextManager[None]:
        self.limits.append(limit_s)
        return nullcontext()

    def reason_of(self, error: Exception) -> Any:
        return error

    def loaded(self) -> None:
        """Nothing to wait for."""

    def fewest_blocks(self, measure: Callable[[], int]) -> int:
        return measure()

    def share_memory(self, memory: KvMemory, stream: StreamShape | None) -> None:
        if stream is None or self._before is not None:
            self.memory.set_result((memory, None))
            self._incoming = None if stream is None or self._before is None else incoming_from(self._before, stream)
            return
        self.passages = Passages(self._shards, stream)
        self.memory.set_result((memory, self.passages))
        self._incoming = self.passages.incoming()
        self._ends.append(self._incoming)

    def leading_runner(
        self, arguments: RunnerArguments, run: ForwardPass | None, num_layers_before: int, costs: StepCosts
    ) -> ModelRunner:
        led = Led(self, self.collectives, self._settings, costs, self.memory.result()[0].begun_part)
        return led.runner(arguments, run, num_layers_before, self._incoming)

    def take_transfer_ends(self) -> dict[Shard, Any]:
        return {}

    def ready(self) -> None:
        for follower in self._followers:
            follower.result(_WAIT_S)
        self._are_ready = True

    def watched(self, each_round: Callable[[], None]) -> Callable[[], None]:
        return each_round

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for computing in self._computing:
            computing.result()
        for tiers in self.tiers.values():
            tiers.close()
        for end in self._ends:
            end.close()
        if self.passages is not None:
            self.passages.close()


class GlooExecutor(ThreadExecutor):
    """The same with the product's calls among ranks, over gloo, as devices record them, and its passages between
    devices."""

    def __init__(self, basis: Basis, num_threads: int) -> None:
        self._board = Board()
        super().__init__(basis, num_threads)

    def _collectives(self, shard: Shard) -> Collectives | None:
        if shard.size == 1:
            return None
        return World(shard, self._board.meeting(stage_group(shard.stage)), b"nonce", records=True)

    def _pairs(self, shard: Shard, device: Device) -> Pairs:
        meet = self._board.meeting, b"nonce", LOOPBACK, device
        return join_pairs(shard, *meet, is_before_afar=not shard.is_first_stage, is_next_afar=not shard.is_last_stage)


def built(
    folder: Any,
    size: int,
    num_stages: int = 1,
    executor: type[ThreadExecutor] = ThreadExecutor,
    proposer: Proposer | None = None,
    **settings: Any,
) -> tuple[Engine, ThreadExecutor]:
    """An engine whose ranks are threads. Blocks of 4 tokens, steps of 8."""
    values = {"num_threads": 1, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 8, **settings}
    values |= {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    made = build_engine(
        EngineSettings(str(folder), **values), allocate_shared, open_executor=executor, proposer=proposer
    )
    found = made.executor
    assert isinstance(found, ThreadExecutor)
    assert not isinstance(found, MpExecutor)
    return made, found


def _as_read(order: Order) -> Order:
    read = Channel.decoder.decode(Channel.encode(order)[4:])
    assert isinstance(read, Order)
    return read


def orders_of(executor: ThreadExecutor) -> list[Compute]:
    """What the ranks were told, as they read it."""
    orders = [Channel.decoder.decode(frame[4:]) for frame in executor.orders]
    return [order for order in orders if isinstance(order, Compute)]
