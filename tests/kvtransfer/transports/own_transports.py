"""Baton's own transports as the suite of transports takes them: both ends of each, over a pool in shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.transports.base import Receiver, Sender
from baton.kvtransfer.transports.inlets import WholeOnly
from baton.kvtransfer.transports.nccl.receiver import NcclReceiver
from baton.kvtransfer.transports.nccl.sender import NcclSender
from baton.kvtransfer.transports.nixl.lives import RunningAgent
from baton.kvtransfer.transports.nixl.process import AgentProcess
from baton.kvtransfer.transports.nixl.receiver import NixlDeviceReceiver, NixlReceiver
from baton.kvtransfer.transports.nixl.sender import NixlSenders
from baton.kvtransfer.transports.nixl.thread import AgentThread
from baton.kvtransfer.transports.plugged import Site, Transport
from baton.kvtransfer.transports.shm.direct import ShmReceiver, ShmSender
from baton.kvtransfer.transports.shm.segment import Segment
from baton.kvtransfer.transports.shm.slots_receiver import SlotsReceiver
from baton.kvtransfer.transports.shm.slots_sender import SlotsSender
from baton.kvtransfer.transports.tcp_zmq import ZmqReceiver, ZmqSender
from tests.kvtransfer.loopback import LoopbackNetwork, LoopbackReceiver, LoopbackSender


def segment_of(site: Site) -> Segment:
    assert site.segment is not None
    return site.segment


@dataclass(frozen=True, slots=True)
class Loopback:
    """Within one process. `peers_write`: memory; else a mailbox."""

    peers_write: bool
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)

    def open_receiver(self, site: Site) -> Receiver:
        name = f"receiver-{time.monotonic_ns()}"
        return LoopbackReceiver(self.network, name, site.pool.memory, peers_write=self.peers_write)

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return LoopbackSender(self.network, endpoint, site.pool.memory)


class Shm:
    def open_receiver(self, site: Site) -> Receiver:
        return ShmReceiver(segment_of(site))

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return ShmSender(endpoint, site.pool.memory, num_blocks)


class Slots:
    def open_receiver(self, site: Site) -> Receiver:
        return SlotsReceiver(site.context, site.host, site.pool, site.links)

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return SlotsSender(site.context, endpoint, site.pool, site.links)


class Zmq:
    def open_receiver(self, site: Site) -> Receiver:
        return ZmqReceiver(site.context, site.host, site.pool, site.links)

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return ZmqSender(site.context, endpoint, site.pool, site.links)


class Nccl:
    def open_receiver(self, site: Site) -> Receiver:
        return NcclReceiver(site.context, site.host, site.pool.memory, site.links)

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return NcclSender(site.context, endpoint, site.pool.memory, site.links)


class Nixl:
    """With one agent for each end. `is_thread`: in the ends themselves, as for pools on a GPU."""

    def __init__(self, *, is_thread: bool) -> None:
        self._is_thread = is_thread
        self._senders: NixlSenders | None = None

    def open_receiver(self, site: Site) -> Receiver:
        make = NixlDeviceReceiver if self._is_thread else NixlReceiver
        return make(self._agent(site), WholeOnly(site.pool))

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        self._senders = self._senders or NixlSenders(self._agent(site), site.pool.block_bytes)
        return self._senders.open(endpoint, num_blocks)

    def _agent(self, site: Site) -> RunningAgent:
        if self._is_thread:
            return AgentThread(site.pool.memory, site.host)
        return AgentProcess(segment_of(site).descriptor, site.pool.num_blocks, site.pool.block_bytes, site.host)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Over pools that a `DevicePool` stages, in a tensor on the CPU."""

    transport: Transport

    def open_receiver(self, site: Site) -> Receiver:
        return self.transport.open_receiver(_as_device(site))

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        return self.transport.open_sender(_as_device(site), endpoint, num_blocks)


def _as_device(site: Site) -> Site:
    return replace(site, pool=DevicePool(torch.from_numpy(site.pool.memory)))


MAILBOX, MEMORY = Loopback(peers_write=False), Loopback(peers_write=True)
SHM, ZMQ, NCCL, NIXL, NIXL_THREAD = Shm(), Zmq(), Nccl(), Nixl(is_thread=False), Nixl(is_thread=True)
DEVICE_ZMQ, DEVICE_SLOTS = OnDevice(Zmq()), OnDevice(Slots())


def place_of(name: str) -> str:
    """Where a process finds the one of this name."""
    return f"{__name__}:{name}"
