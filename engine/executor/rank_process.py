"""One rank of an engine that is not the first: `python -m engine.executor.rank_process DESCRIPTOR`.

Started by `engine.executor.ranks`, told what to do over the socket of that descriptor. Loads its share, attends over
the KV memory that the driver shares with it, and computes one order after another until it is told to stop, or until
the driver is gone. Its standard output stays empty. Whatever fails is said once, to the driver, and ends the process
with status 1.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TypeAlias

from engine.attention.paged_kv import PagedKv
from engine.executor.following import Follower
from engine.executor.messages import (
    Begin,
    Channel,
    Compute,
    Failed,
    Here,
    Loaded,
    Ready,
    Stop,
    UsePool,
)
from engine.executor.passages import taken_ends
from engine.executor.world import RanksLost, World, join_stage
from engine.model_share import ModelShare, attention_of, load_share, open_basis, recorded_pass, stream_of
from engine.models.shard import Shard
from engine.runner.forward import decoded_pass
from engine.runner.kv_memory import KvMemory, mapped_kv, own_kv_memory
from engine.settings import EngineSettings
from program.channel import ChannelBroken
from program.process import keep_freed_memory
from wire.errors import BatonError

_BEGIN_S = 120.0
_PREPARE_S = 1800.0
_SAY_S = 5.0
_log = logging.getLogger(__name__)


OnPool: TypeAlias = Callable[[KvMemory, tuple[socket.socket, socket.socket]], None]
"""Called with the pool that is this rank's own, and with the sockets that came with it (`UsePool`)."""


def main(argv: list[str], on_pool: OnPool | None = None) -> int:
    """Run until told to stop; the exit status. `on_pool`: for ranks of nodes that hand KV over."""
    # the driver decides when its ranks end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=int(argv[0])), "the driver")
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


def _follow(channel: Channel, on_pool: OnPool | None) -> None:
    begin = channel.receive(_BEGIN_S)
    if not isinstance(begin, Begin):
        raise ChannelBroken("the driver begins with something else")
    channel.send(Here(), _SAY_S)
    settings = EngineSettings(**begin.settings)  # type: ignore[arg-type]  # they were one when they were sent
    shard = Shard.of_process(begin.number, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    world = join_stage(shard, begin.meeting, begin.nonce)
    follower = _prepared(channel, settings, begin.num_threads, shard, world, on_pool)
    channel.send(Ready(), _SAY_S)
    while not isinstance(order := channel.receive(None), Stop):
        if not isinstance(order, Compute):
            raise ChannelBroken(f"the driver says {type(order).__name__} out of turn")
        follower.compute(order)


def _prepared(
    channel: Channel,
    settings: EngineSettings,
    num_threads: int,
    shard: Shard,
    world: World | None,
    on_pool: OnPool | None,
) -> Follower:
    """What the driver does for rank 0 in `build_engine`, in the same order."""
    basis = open_basis(settings, num_threads)
    model = load_share(basis, shard, world, None)
    channel.send(Loaded(), _SAY_S)
    choice = attention_of(basis, model, shard)
    use = channel.receive(_PREPARE_S)
    if not isinstance(use, UsePool):
        raise ChannelBroken(f"the driver says {type(use).__name__} out of turn")
    if use.num_bytes:
        paged, blocks = _mapped(channel, model, shard, use.num_bytes), None
    else:
        paged = _own(channel, model, shard, use.num_blocks, on_pool)
        blocks = paged.blocks
    stream = stream_of(basis, model, shard)
    incoming, outgoing = (None, None) if stream is None else taken_ends(shard, stream, channel.take_descriptor)
    attention = choice.build(paged)
    run = recorded_pass(basis, model, attention) or decoded_pass(model.decoder, attention)
    return Follower(model.decoder, attention, basis.device, basis.limits, run, incoming, outgoing, blocks)


def _mapped(channel: Channel, model: ModelShare, shard: Shard, num_bytes: int) -> PagedKv:
    """The pool that the driver shares."""
    descriptor = channel.take_descriptor()
    try:
        return mapped_kv(model.layout, model.own, shard, num_bytes, descriptor)
    finally:
        os.close(descriptor)


def _own(channel: Channel, model: ModelShare, shard: Shard, num_blocks: int, on_pool: OnPool | None) -> PagedKv:
    """A pool of this rank alone."""
    memory = own_kv_memory(model.layout, model.own, shard, num_blocks)
    receiving, sending = (socket.socket(fileno=channel.take_descriptor()) for _ in range(2))
    if on_pool is not None:
        on_pool(memory, (receiving, sending))
    return memory.paged


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
