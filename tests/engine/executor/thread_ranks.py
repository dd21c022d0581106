"""Ranks as threads of the test: the product's runner, followers and shared KV memory, with calls among ranks in memory.

What is left out are processes, sockets and gloo; `test_ranks.py` has those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.build
from device.base import Device
from engine.build import Engine, build_engine
from engine.capacity import find_capacity
from engine.executor.following import Follower
from engine.executor.messages import Channel, Compute, Order
from engine.executor.mp import MpExecutor
from engine.model_share import attention_of, kernels_for, load_share, recorded_pass
from engine.models.config import ModelConfig
from engine.models.identity import find_checkpoint
from engine.models.shard import Shard
from engine.runner.forward import decoded_pass
from engine.runner.kv_memory import KvMemory, allocate_shared, mapped_kv
from engine.runner.limits import RunnerLimits
from engine.settings import EngineSettings

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


class ThreadExecutor:
    """See `Executor`. `orders`: what the ranks were told, as it travels."""

    def __init__(self, settings: EngineSettings, config: ModelConfig, device: Device, num_threads: int) -> None:
        size = settings.tensor_parallel_size
        calls = SharedCalls(size)
        self.calls = calls
        self.shard = Shard(0, size)
        self.collectives = ThreadCollectives(0, calls)
        self.leader = self
        self.orders: list[bytes] = []
        self.memory: Future[KvMemory] = Future()
        self._threads = [ThreadPoolExecutor(1) for _ in range(1, size)]
        self._followers = [
            thread.submit(self._follower, Shard(rank, size), settings, config, device)
            for rank, thread in enumerate(self._threads, 1)
        ]
        self._computing: list[Future[None]] = []

    def _follower(self, shard: Shard, settings: EngineSettings, config: ModelConfig, device: Device) -> Follower:
        kernels = kernels_for(settings, device, 1)
        capacity = find_capacity(settings, config, is_gpu=False)
        limits = RunnerLimits(settings.max_num_seqs, capacity.num_step_tokens, capacity.blocks_per_request)
        collectives = ThreadCollectives(shard.rank, self.calls)
        folder = find_checkpoint(settings.model)
        model = load_share(settings, folder, config, device, kernels, shard, collectives, None)
        choice = attention_of(settings, model, limits, device, shard)
        memory = self.memory.result(_WAIT_S)
        assert memory.descriptor is not None
        paged = mapped_kv(
            model.layout, model.own, shard, memory.num_blocks * memory.layout.block_bytes, memory.descriptor
        )
        attention = choice.build(paged)
        run = recorded_pass(settings, model, attention, limits) or decoded_pass(model.decoder, attention)
        return Follower(model.decoder, attention, device, limits, run)

    def tell(self, order: Order) -> None:
        self.orders.append(Channel.encode(order))
        assert isinstance(order, Compute)
        for computing in self._computing:
            computing.result(_WAIT_S)
        self._computing = [
            thread.submit(follower.result().compute, order)
            for thread, follower in zip(self._threads, self._followers, strict=True)
        ]

    def reason_of(self, error: Exception) -> Any:
        return error

    def loaded(self) -> None:
        """Nothing to wait for."""

    def share_memory(self, memory: KvMemory) -> None:
        self.memory.set_result(memory)

    def ready(self) -> None:
        for follower in self._followers:
            follower.result(_WAIT_S)

    def guarded(self, each_round: Callable[[], None]) -> Callable[[], None]:
        return each_round

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def built(monkeypatch: pytest.MonkeyPatch, folder: Any, size: int, **settings: Any) -> tuple[Engine, ThreadExecutor]:
    """An engine whose ranks are threads. Blocks of 4 tokens, steps of 8."""
    monkeypatch.setattr(engine.build, "open_executor", ThreadExecutor)
    values = {"num_threads": 1, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 8, **settings}
    made = build_engine(EngineSettings(str(folder), tensor_parallel_size=size, **values), allocate_shared)
    executor = made.executor
    assert isinstance(executor, ThreadExecutor)
    assert not isinstance(executor, MpExecutor)
    return made, executor
