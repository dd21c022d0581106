"""Transports by name: which a receiver offers, which a sender takes, and the memory a pool must live in.

Owns the order of preference. A transport's module is imported when it is first used, and one whose library is missing
says what to install.

`auto` offers and takes shared memory on one host and ZMQ between hosts. `shm` is the same: where /dev/shm is too small
or the peer is on another host, ZMQ takes over, with one log line. `nixl` and `nccl` are used when they are asked for,
on both nodes. Pools in device memory have other transports in those places: `auto` begins with nixl where that is
installed and works, and on one host slots in shared memory stand where the shared pool does. ZMQ is what a node with
a pool in host memory and one on a device have in common.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from kvtransfer.host import shares_memory
from kvtransfer.messages import Endpoint, PeerHello, ProcessIdentity
from kvtransfer.pool import HostPool, Pool
from kvtransfer.transports.base import Blocks, Receiver, Sender
from kvtransfer.transports.segment import Segment, sweep_orphans
from wire.errors import InvalidSetting, Refused, TransferFailed
from wire.links import LinkSettings

if TYPE_CHECKING:
    from kvtransfer.transports.nixl.transport import NixlSenders

AUTO, SHM, ZMQ, NIXL, NCCL = "auto", "shm", "zmq", "nixl", "nccl"
SLOTS = "shm_slots"
"""Between pools in device memory what `shm` is between those in host memory; no choice of its own."""
_TAKEN = {AUTO: (SHM, ZMQ), SHM: (SHM, ZMQ), ZMQ: (ZMQ,), NIXL: (NIXL,), NCCL: (NCCL,)}
"""What each choice offers and takes, in order of preference."""
_TAKEN_ON_DEVICE = {**_TAKEN, AUTO: (NIXL, SLOTS, ZMQ), SHM: (SLOTS, ZMQ)}
"""The same for pools in device memory."""
_IN_SEGMENT = {"receiver": (SHM, NIXL), "sender": (NIXL,)}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TransportSettings:
    """What the transports of a node are made from."""

    choice: str
    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings
    process: ProcessIdentity


def _allocate_plain(num_bytes: int) -> Blocks:
    return np.zeros(num_bytes, dtype=np.uint8)


@dataclass(slots=True)
class PoolMemory:
    """The memory of one node's pool: a shared segment where a transport needs one, private memory otherwise.

    `role` is "receiver" or "sender"; `allocate_private` is how the node allocates memory that nobody shares.
    """

    settings: TransportSettings
    role: str
    allocate_private: Callable[[int], Blocks] = _allocate_plain
    segment: Segment | None = None

    def allocate(self, num_bytes: int) -> Blocks:
        """Memory for a pool. Raises `InvalidSetting` when there is no segment and no transport that works without."""
        names = _TAKEN[self.settings.choice]
        if not set(names) & set(_IN_SEGMENT[self.role]):
            return self.allocate_private(num_bytes)
        try:
            sweep_orphans()
            self.segment = Segment(num_bytes)
        except OSError as error:
            reason = f"no shared memory for a pool of {num_bytes} bytes ({error.strerror})"
            if set(names) <= set(_IN_SEGMENT[self.role]):
                raise InvalidSetting(f"--kv-transport {self.settings.choice}: {reason}") from None
            _log.warning("%s: handoffs use %s", reason, ZMQ)
            return self.allocate_private(num_bytes)
        return self.segment.array

    def close(self) -> None:
        """Remove the segment's name."""
        if self.segment is not None:
            self.segment.close()


def open_pool(blocks: Any) -> Pool:
    """The pool over `blocks` [num_blocks, block_bytes] of bytes: a numpy array, or a torch tensor on a device."""
    if isinstance(blocks, np.ndarray):
        return HostPool(blocks)
    from kvtransfer.device_pool import DevicePool

    return DevicePool(blocks)


def open_receivers(settings: TransportSettings, memory: PoolMemory, pool: Pool) -> list[Receiver]:
    """Receivers for `pool`, in order of preference; one in host memory was allocated by `memory`.

    Raises `InvalidSetting` when the choice names a transport that cannot be used here.
    """
    openers = _device_receivers(settings, pool) if pool.is_device else _host_receivers(settings, memory, pool)
    receivers: list[Receiver] = []
    try:
        for name in _taken(settings.choice, pool):
            if name not in openers:
                continue
            try:
                receivers.append(openers[name]())
            except InvalidSetting as error:
                _go_on_without(settings, name, error)
    except BaseException:
        for receiver in receivers:
            receiver.close()
        raise
    return receivers


def _taken(choice: str, pool: Pool) -> tuple[str, ...]:
    names = (_TAKEN_ON_DEVICE if pool.is_device else _TAKEN)[choice]
    if choice == AUTO and find_spec(NIXL) is None:
        names = tuple(name for name in names if name != NIXL)
    return names


def _go_on_without(settings: TransportSettings, name: str, error: InvalidSetting) -> None:
    """Raise `error`, unless this transport was only a wish."""
    if settings.choice != AUTO or name != NIXL:
        raise error
    _log.warning("%s cannot be used and is left out: %s", name, error)


def _host_receivers(settings: TransportSettings, memory: PoolMemory, pool: Pool) -> dict[str, Callable[[], Receiver]]:
    """How receivers into host memory are opened, those that `memory` is fit for."""
    segment = memory.segment

    def shm() -> Receiver:
        from kvtransfer.transports.shm import ShmReceiver

        return ShmReceiver(_required(segment))

    def nixl() -> Receiver:
        from kvtransfer.transports.nixl.transport import NixlReceiver

        return NixlReceiver(_required(segment), pool.num_blocks, pool.block_bytes, settings.host)

    found = _any_receivers(settings, pool)
    return found if segment is None else {**found, SHM: shm, NIXL: nixl}


def _device_receivers(settings: TransportSettings, pool: Pool) -> dict[str, Callable[[], Receiver]]:
    """How receivers into device memory are opened."""

    def slots() -> Receiver:
        from kvtransfer.transports.shm_slots import SlotsReceiver

        sweep_orphans()
        return SlotsReceiver(settings.context, settings.host, pool, settings.links)

    def nixl() -> Receiver:
        from kvtransfer.transports.nixl.transport import NixlReceiver

        return NixlReceiver.for_device(pool.memory, settings.host)

    return {**_any_receivers(settings, pool), SLOTS: slots, NIXL: nixl}


def _any_receivers(settings: TransportSettings, pool: Pool) -> dict[str, Callable[[], Receiver]]:
    """How receivers into any memory are opened."""

    def tcp_zmq() -> Receiver:
        from kvtransfer.transports.tcp_zmq import ZmqReceiver

        return ZmqReceiver(settings.context, settings.host, pool, settings.links)

    def nccl() -> Receiver:
        from kvtransfer.transports.nccl.transport import NcclReceiver

        return NcclReceiver(settings.context, settings.host, pool.memory, settings.links)

    return {ZMQ: tcp_zmq, NCCL: nccl}


def _required(segment: Segment | None) -> Segment:
    if segment is None:
        raise RuntimeError("this transport is only opened for pools in a segment")
    return segment


class SenderFactory:
    """Opens senders over `pool`; one in host memory was allocated by `memory`.

    Raises `InvalidSetting` when the choice names a transport that cannot be used here.
    """

    def __init__(self, settings: TransportSettings, memory: PoolMemory, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool
        self._taken = _taken(settings.choice, pool)
        self._nixl: NixlSenders | None = None
        if NIXL in self._taken and (pool.is_device or memory.segment is not None):
            try:
                self._nixl = self._open_nixl_senders(memory)
            except InvalidSetting as error:
                _go_on_without(settings, NIXL, error)
        if NIXL in self._taken and self._nixl is None and settings.choice == AUTO:
            self._taken = tuple(name for name in self._taken if name != NIXL)
        if SLOTS in self._taken:
            sweep_orphans()

    def _open_nixl_senders(self, memory: PoolMemory) -> NixlSenders:
        from kvtransfer.transports.nixl.transport import NixlSenders

        pool = self._pool
        if pool.is_device:
            return NixlSenders.for_device(pool.memory, self._settings.host)
        return NixlSenders(_required(memory.segment), pool.num_blocks, pool.block_bytes, self._settings.host)

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """The first endpoint of `hello` that works from here: (transport name, sender). Raises `Refused`."""
        reasons = []
        for endpoint in hello.endpoints:
            name = endpoint.transport
            if name not in self._taken:
                reasons.append(f"{name:.40}: this node takes {' or '.join(self._taken)}")
                continue
            try:
                return name, self._openers()[name](endpoint, hello)
            except (TransferFailed, InvalidSetting) as error:
                reasons.append(f"{name}: {error}")
        raise Refused(f"no KV transport in common ({'; '.join(reasons) or 'none offered'})")

    def poll(self) -> None:
        """Let what serves all senders notice what has happened."""
        if self._nixl is not None:
            self._nixl.poll()

    def wait_on(self) -> Sequence[Any]:
        """What is readable when `poll` has something to do."""
        return () if self._nixl is None else self._nixl.wait_on()

    def close(self) -> None:
        """End what serves all senders. Senders are closed before."""
        if self._nixl is not None:
            self._nixl.close()

    def _openers(self) -> dict[str, Callable[[Endpoint, PeerHello], Sender]]:
        return {
            SHM: self._open_shm,
            SLOTS: self._open_slots,
            ZMQ: self._open_zmq,
            NIXL: self._open_nixl,
            NCCL: self._open_nccl,
        }

    def _open_shm(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if not shares_memory(self._settings.process, hello.process):
            raise TransferFailed("the nodes do not share memory")
        from kvtransfer.transports.shm import ShmSender

        return ShmSender(endpoint, self._pool.memory, hello.num_blocks)

    def _open_slots(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if not shares_memory(self._settings.process, hello.process):
            raise TransferFailed("the nodes do not share memory")
        from kvtransfer.transports.shm_slots import SlotsSender

        return SlotsSender(self._settings.context, endpoint, self._pool, self._settings.links)

    def _open_zmq(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        from kvtransfer.transports.tcp_zmq import ZmqSender

        return ZmqSender(self._settings.context, endpoint, self._pool, self._settings.links)

    def _open_nixl(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if self._nixl is None:
            raise TransferFailed("this node has no nixl agent")
        return self._nixl.open(endpoint, hello.num_blocks)

    def _open_nccl(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        from kvtransfer.transports.nccl.transport import NcclSender

        return NcclSender(self._settings.context, endpoint, self._pool.memory, self._settings.links)
