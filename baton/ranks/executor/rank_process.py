"""The process of one rank of an engine that is not the first.

Started by `baton.ranks.executor.ranks`, told what to do over a socket. Loads its share, attends over the KV memory that
the driver shares with it or over its own, and carries out one order after another until it is told to stop, or until
the driver is gone.
Its standard output stays empty. Whatever fails is said once, to the driver, and ends the process with status 1.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from baton.device.base import Device
from baton.device.memory import read_memory
from baton.engine.attention.choose import AttentionChoice
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.model_shard import (
    Basis,
    ModelShard,
    attention_of,
    checkpoint_fingerprint,
    gpu_room,
    load_shard,
    open_basis,
    recorded_pass,
    stream_of,
)
from baton.engine.models.shard import Shard
from baton.engine.offloading import open_pool, tiers_opener
from baton.engine.runner.forward import decoded_pass
from baton.engine.runner.kv_memory import KvMemory, mapped_kv, own_kv_memory
from baton.engine.settings import EngineSettings
from baton.ranks.executor.following import Follower, RankModel
from baton.ranks.executor.following_tiers import FollowingTiers
from baton.ranks.executor.meeting import RankOrders
from baton.ranks.executor.messages import (
    Begin,
    Channel,
    Compute,
    Failed,
    Here,
    Loaded,
    Meet,
    Order,
    Ready,
    Report,
    Room,
    Stop,
    UsePool,
)
from baton.ranks.executor.passages import NO_PASSAGES, taken_ends
from baton.ranks.executor.world import RanksLost, join_pairs, join_stage
from baton.runtime.channel import ChannelBroken
from baton.runtime.process import keep_freed_memory
from baton.wire.errors import BatonError, Refused

_BEGIN_S = 120.0
_PREPARE_S = 1800.0
_SAY_S = 5.0
_ORDERS_OF_A_STEP = 4
"""One to compute it, and those about blocks that come before it."""
_log = logging.getLogger(__name__)


MessageT = TypeVar("MessageT")
NextOrder: TypeAlias = Callable[[], Order | Report]
"""Waits for it. Raises `ChannelBroken`."""
OnPool: TypeAlias = Callable[[KvMemory, tuple[socket.socket, socket.socket]], None]
"""Called with the pool that is this rank's own, and with the sockets that came with it (`UsePool`)."""


def follow(descriptor: int, on_pool: OnPool) -> int:
    """Carry out orders that come over the socket with this descriptor, until one of them is to stop. Returns the exit
    status."""
    # the driver decides when its ranks end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=descriptor), "the driver")
    try:
        _follow(channel, on_pool)
    except ChannelBroken:
        return 1  # nobody is left to be told
    except BatonError as error:
        return _failed(channel, str(error), is_own=not isinstance(error, RanksLost))
    except Exception as error:  # the driver says it, in its one line
        _log.debug("this rank has failed", exc_info=True)
        return _failed(channel, f"{type(error).__name__}: {error}", is_own=True)
    return 0


def _failed(channel: Channel, reason: str, *, is_own: bool) -> int:
    try:
        channel.send(Failed(reason[:1000], is_own), _SAY_S)
    except ChannelBroken:
        return 1
    return 1


def _follow(channel: Channel, on_pool: OnPool) -> None:
    orders = RankOrders(channel)
    begin = orders.begin(_BEGIN_S)
    settings = EngineSettings(**begin.settings)  # type: ignore[arg-type]  # they were one when they were sent
    shard = Shard.of_process(begin.number, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    basis = open_basis(settings, begin.num_threads, begin.number % settings.num_ranks_here)
    _require_same_checkpoint(basis, begin.fingerprint)
    channel.send(Here(), _SAY_S)
    _require(orders.next(_BEGIN_S), Meet)
    follower, tiers = _prepared(channel, orders, basis, begin, shard, on_pool)
    channel.send(Ready(), _SAY_S)
    next_order: NextOrder = partial(orders.next, None)
    if shard.num_stages > 1 and basis.device.is_asynchronous:
        next_order = OrdersAhead(next_order, _ORDERS_OF_A_STEP * (shard.num_stages + 1)).next
    while not isinstance(order := next_order(), Stop):
        if tiers is None or not tiers.take(order):
            follower.compute(_require(order, Compute))
    if tiers is not None:  # after a failure, which is to be said at once, what they have not kept is lost
        tiers.close()


class OrdersAhead:
    """Takes orders, at most `count` ahead, while this rank waits for its device.

    The device may wait to hand a step on to a rank that the driver tells later. So the driver must not wait until this
    one listens.
    """

    def __init__(self, next_order: NextOrder, count: int) -> None:
        self._next_order = next_order
        self._taken: queue.Queue[Order | Report | BatonError] = queue.Queue(count)
        threading.Thread(target=self._take, name="orders", daemon=True).start()

    def next(self) -> Order | Report:
        """The next order, which another thread has read. Raises the error at which reading ended."""
        taken = self._taken.get()
        if isinstance(taken, BatonError):
            raise taken
        return taken

    def _take(self) -> None:
        order: Order | Report | BatonError | None = None
        while not isinstance(order, BatonError | Stop):
            try:
                order = self._next_order()
            except BatonError as error:
                order = error
            self._taken.put(order)


def _require(message: object, kind: type[MessageT]) -> MessageT:
    if not isinstance(message, kind):
        raise ChannelBroken(f"the driver says {type(message).__name__} out of turn")
    return message


def _require_same_checkpoint(basis: Basis, expected: str) -> None:
    if expected and (found := checkpoint_fingerprint(basis)) != expected:
        raise Refused(f"the checkpoint {basis.folder} is not the driver's: fingerprint {found} here, {expected} there")


def _prepared(
    channel: Channel, orders: RankOrders, basis: Basis, begin: Begin, shard: Shard, on_pool: OnPool
) -> tuple[Follower, FollowingTiers | None]:
    """What the driver does for rank 0 in `build_engine`, in the same order."""
    meet = orders.meeting, begin.nonce
    world = join_stage(shard, *meet, begin.stage_host, basis.device)
    is_before, is_next = begin.is_before_afar, begin.is_next_afar
    pairs = join_pairs(shard, *meet, begin.host, basis.device, is_before_afar=is_before, is_next_afar=is_next)
    before = read_memory(basis.device.torch_device) if basis.is_gpu else None
    model = load_shard(basis, shard, world, None)
    channel.send(Loaded(), _SAY_S)
    choice = attention_of(basis, model, shard)
    if before is not None and basis.measures_room:
        channel.send(Room(gpu_room(basis, model, choice, before, None)), _SAY_S)
    use = _require(orders.next(_PREPARE_S), UsePool)
    limits, blocks, tiers = basis.limits, None, None
    if use.num_bytes:
        paged = _mapped(channel, model, shard, use.num_bytes)
    else:
        memory = _own(channel, basis.device, model, shard, use.num_blocks, on_pool)
        paged, blocks = memory.paged, memory.paged.blocks
        limits = replace(limits, spare_block=memory.spare_block)
        tiers = _tiers(channel, basis, model, choice, memory)
    stream = stream_of(basis, model, shard)
    ends = NO_PASSAGES if stream is None else taken_ends(shard, stream, channel.take_descriptor, pairs)
    attention = choice.build(paged)
    run = recorded_pass(basis, model.decoder, attention) or decoded_pass(model.decoder, attention)
    follower = Follower(RankModel(model.decoder, attention, run, blocks), basis.device, limits, world, ends)
    if basis.records_steps:
        follower.record_graphs()
    return follower, tiers


def _mapped(channel: Channel, model: ModelShard, shard: Shard, num_bytes: int) -> PagedKv:
    """The pool that the driver shares."""
    descriptor = channel.take_descriptor()
    try:
        return mapped_kv(model.layout, model.own, shard, num_bytes, descriptor)
    finally:
        os.close(descriptor)


def _tiers(
    channel: Channel, basis: Basis, model: ModelShard, choice: AttentionChoice, memory: KvMemory
) -> FollowingTiers | None:
    """The tiers below a pool of this rank alone, if the settings want any."""
    open_tiers = tiers_opener(basis.settings)
    if open_tiers is None:
        return None
    pool = open_pool(basis, model, choice, memory, open_tiers)
    return FollowingTiers(pool, lambda report: channel.send(report, _SAY_S))


def _own(
    channel: Channel, device: Device, model: ModelShard, shard: Shard, num_blocks: int, on_pool: OnPool
) -> KvMemory:
    """A pool of this rank alone."""
    memory = own_kv_memory(model.layout, model.own, shard, num_blocks, device)
    receiving, sending = (socket.socket(fileno=channel.take_descriptor()) for _ in range(2))
    on_pool(memory, (receiving, sending))
    return memory
