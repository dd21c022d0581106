"""The transports of ranks that have pools of their own: which there are, and how one rank opens its ends of them.

Owns what of a transport is different for a rank: it has a part of each block, and says so with what it sends. A node
with one pool opens its senders to such ranks here too: it is a rank that has everything.

Of the transports, `shm` is one pair of rings and slots for each pair of ranks (`shm_slots`): a rank that wrote into the
other's pool by itself would need its own end, and not its driver's, as a write proof. `nixl` has an agent for each rank
and direction, and writes runs of bytes from where they are to where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import zmq

from baton.kvtransfer.messages import RANK_ENDPOINTS, Endpoint, RankEndpoint, RankEndpoints
from baton.kvtransfer.parts import ByteRun, part_runs
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.cut import source_of
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.transports.announced import Look
from baton.kvtransfer.transports.base import Receiver, Sender
from baton.kvtransfer.transports.fan_out import FanOutSender
from baton.kvtransfer.transports.part_inlets import RankInlets
from baton.kvtransfer.transports.shm.segment import sweep_orphans
from baton.wire.errors import BatonError, InvalidSetting, TransferFailed
from baton.wire.kv_shard import MAX_RANKS, WHOLE_BLOCK, KvDivision, KvShard, own_layout
from baton.wire.layout import KvLayout
from baton.wire.links import LinkSettings

if TYPE_CHECKING:
    from baton.kvtransfer.transports.nixl.lives import RunningAgent
    from baton.kvtransfer.transports.nixl.sender import NixlSenders

_SLOTS, _ZMQ, _NIXL = "shm_slots", "zmq", "nixl"
_TAKEN = {"auto": (_SLOTS, _ZMQ), "shm": (_SLOTS, _ZMQ), "zmq": (_ZMQ,), "nixl": (_NIXL,)}
_RINGS_BYTES = 64 * 2**20
"""Of all rings that one rank has for one receiver."""


class PartReceiver(Receiver, Protocol):
    """A receiver at one rank. `num_bytes`: what it has received."""

    num_bytes: int

    def look_by(self, look: Look) -> None:
        """Set what is called when something comes for a handoff that is not known here."""
        ...


@dataclass(frozen=True, slots=True)
class RankPool:
    """The pool of one rank: it holds `shard` of blocks of `layout`. `descriptor`: the open file of its memory, by which
    an agent process can map it. None for one on a device, whose agent is a thread."""

    pool: KvPool
    layout: KvLayout
    shard: KvShard
    descriptor: int | None = None

    def for_thread(self) -> RankPool:
        """This pool for one more thread: a pool on a device is used by one."""
        return replace(self, pool=open_pool(self.pool.memory)) if self.pool.is_device else self


@dataclass(frozen=True, slots=True)
class Network:
    """The address at which a process listens, and the keys with which it talks."""

    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings


def taken_by_ranks(choice: str, num_machines: int) -> tuple[str, ...]:
    """The transports that a choice of --kv-transport offers and takes where ranks are on so many machines, the
    preferred one first. Raises `InvalidSetting`."""
    if choice not in _TAKEN:
        raise InvalidSetting(
            f"--kv-transport {choice}: ranks with pools of their own have {', '.join(name for name in _TAKEN)}"
        )
    if num_machines == 1:
        return _TAKEN[choice]
    if choice == "shm":
        raise InvalidSetting(f"--kv-transport shm: the ranks are on {num_machines} machines, which share no memory")
    return tuple(name for name in _TAKEN[choice] if name != _SLOTS)


def open_part_receiver(name: str, own: RankPool, network: Network) -> PartReceiver:
    """The end of a transport that writes into this pool. Raises `InvalidSetting`."""
    inlets = RankInlets(own.pool, own.layout, own.shard)
    match name:
        case "shm_slots":
            from baton.kvtransfer.transports.shm.slots_receiver import SlotsReceiver

            sweep_orphans()
            return SlotsReceiver(network.context, network.host, own.pool, network.links, inlets=inlets)
        case "zmq":
            from baton.kvtransfer.transports.tcp_zmq import ZmqReceiver

            return ZmqReceiver(network.context, network.host, own.pool, network.links, inlets=inlets)
        case "nixl":
            from baton.kvtransfer.transports.nixl.receiver import NixlDeviceReceiver, NixlReceiver

            agent = _open_agent(own, network)
            return NixlDeviceReceiver(agent, inlets) if own.pool.is_device else NixlReceiver(agent, inlets)
        case _:
            raise ValueError(f"ranks have no transport {name!r}")


def open_nixl_senders(own: RankPool, network: Network) -> NixlSenders:
    """The opener of this rank's senders by nixl. Raises `InvalidSetting`."""
    from baton.kvtransfer.transports.nixl.sender import NixlSenders

    return NixlSenders(_open_agent(own, network), own.pool.block_bytes)


def _open_agent(own: RankPool, network: Network) -> RunningAgent:
    if own.pool.is_device:
        from baton.kvtransfer.transports.nixl.thread import AgentThread

        return AgentThread(own.pool.memory, network.host)
    from baton.kvtransfer.transports.nixl.process import AgentProcess

    if own.descriptor is None:
        raise InvalidSetting("--kv-transport nixl: the KV of this rank lies in memory that no agent can map")
    return AgentProcess(own.descriptor, own.pool.num_blocks, own.pool.block_bytes, network.host)


@dataclass(frozen=True, slots=True)
class Reached:
    """The ranks of a receiver: `division`, and an endpoint of each for one transport, over `num_blocks` blocks."""

    transport: str
    division: KvDivision
    endpoints: Sequence[RankEndpoint]
    num_blocks: int


def ranks_at(endpoint: Endpoint, num_blocks: int) -> Reached:
    """The ranks of a receiver with so many blocks; a node with one pool is one of them. Raises `TransferFailed`."""
    if not endpoint.has_ranks:
        alone = (RankEndpoint(endpoint.address, endpoint.details),)
        return Reached(endpoint.transport, KvDivision(), alone, num_blocks)
    try:
        found: RankEndpoints = RANK_ENDPOINTS.decode(endpoint.details)
    except BatonError as error:
        raise TransferFailed(f"the peer's endpoint does not decode: {error}") from None
    num_ranks = found.division.num_ranks * found.division.num_stages
    if len(found.ranks) != num_ranks or num_ranks > MAX_RANKS:
        raise TransferFailed("the peer does not say where each of its ranks listens")
    return Reached(endpoint.transport, found.division, found.ranks, num_blocks)


@dataclass(frozen=True, slots=True)
class _Destination:
    """A rank of a receiver that needs bytes of this pool: `runs` of each block. It listens at `place`."""

    shard: KvShard
    place: RankEndpoint
    runs: Sequence[ByteRun]


def open_parts(
    own: RankPool, network: Network, nixl: NixlSenders | None, receiver: Reached
) -> tuple[FanOutSender, int]:
    """A sender of what this pool has for each rank of a receiver, and how many bytes of a block that is. Raises
    `TransferFailed` where one cannot be reached, and `InvalidSetting` where no model is divided so."""
    runs = [part_runs(own.layout, own.shard.division, target).get(own.shard) for target in receiver.division.shards]
    pairs = zip(receiver.division.shards, receiver.endpoints, runs, strict=True)
    needed = [_Destination(target, endpoint, found) for target, endpoint, found in pairs if found]
    senders: list[Sender] = []
    try:
        for destination in needed:
            senders.append(_open_part(own, network, nixl, receiver, destination, len(needed)))
    except BaseException:
        for sender in senders:
            sender.close()
        raise
    return FanOutSender(senders), sum(run.num_bytes for destination in needed for run in destination.runs)


def _open_part(
    own: RankPool,
    network: Network,
    nixl: NixlSenders | None,
    receiver: Reached,
    destination: _Destination,
    num_destinations: int,
) -> Sender:
    place, runs = destination.place, destination.runs
    endpoint, part = Endpoint(receiver.transport, place.address, place.details), source_of(own.pool, runs)
    source = None if own.shard == WHOLE_BLOCK else own.shard
    match receiver.transport:
        case "shm_slots":
            from baton.kvtransfer.transports.shm.slots_sender import SlotsSender

            room = _RINGS_BYTES // num_destinations
            return SlotsSender(network.context, endpoint, part, network.links, room, source)
        case "zmq":
            from baton.kvtransfer.transports.tcp_zmq import ZmqSender

            return ZmqSender(network.context, endpoint, part, network.links, source)
        case "nixl" if nixl is not None:
            from baton.kvtransfer.transports.nixl.sender import Part

            target_bytes = own_layout(own.layout, destination.shard).block_bytes
            is_whole = part is own.pool and part.block_bytes == target_bytes
            columns = () if is_whole else [(run.source, run.target, run.num_bytes) for run in runs]
            return nixl.open(endpoint, receiver.num_blocks, Part(part.block_bytes, target_bytes, columns, source))
        case _:
            raise TransferFailed(f"ranks have no transport {receiver.transport!r}")
