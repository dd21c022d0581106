"""Transports by name: which a receiver offers, which a sender takes, and the memory a pool must live in.

Owns the order of preference. A transport's module is imported when it is first used, and one whose library is missing
says what to install.

`auto` offers and takes shared memory on one host and ZMQ between hosts. `shm` is the same: where /dev/shm is too small
or the peer is on another host, ZMQ takes over, with one log line. `nixl` and `nccl` are used when they are asked for,
on both nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from engine.api.errors import InvalidSetting, Refused, TransferFailed
from engine.api.links import LinkSettings
from kvtransfer.host import shares_memory
from kvtransfer.messages import Endpoint, PeerHello, ProcessIdentity
from kvtransfer.transports.base import Blocks, Receiver, Sender
from kvtransfer.transports.segment import Segment, sweep_orphans

if TYPE_CHECKING:
    from kvtransfer.transports.nixl import NixlSenders

AUTO, SHM, ZMQ, NIXL, NCCL = "auto", "shm", "zmq", "nixl", "nccl"
_TAKEN = {AUTO: (SHM, ZMQ), SHM: (SHM, ZMQ), ZMQ: (ZMQ,), NIXL: (NIXL,), NCCL: (NCCL,)}
"""What each choice offers and takes, in order of preference."""
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


def open_receivers(settings: TransportSettings, memory: PoolMemory, blocks: Blocks) -> list[Receiver]:
    """Receivers for `blocks` [num_blocks, block_bytes] in `memory`, in order of preference."""
    receivers: list[Receiver] = []
    for name in _TAKEN[settings.choice]:
        if name == SHM and memory.segment is not None:
            from kvtransfer.transports.shm import ShmReceiver

            receivers.append(ShmReceiver(memory.segment))
        elif name == ZMQ:
            from kvtransfer.transports.tcp_zmq import ZmqReceiver

            receivers.append(ZmqReceiver(settings.context, settings.host, blocks, settings.links))
        elif name == NIXL and memory.segment is not None:
            from kvtransfer.transports.nixl import NixlReceiver

            receivers.append(NixlReceiver(memory.segment, blocks.shape[0], blocks.shape[1], settings.host))
        elif name == NCCL:
            from kvtransfer.transports.nccl import NcclReceiver

            receivers.append(NcclReceiver(settings.context, settings.host, blocks, settings.links))
    return receivers


class SenderFactory:
    """Opens senders over the pool `blocks` in `memory`."""

    def __init__(self, settings: TransportSettings, memory: PoolMemory, blocks: Blocks) -> None:
        self._settings = settings
        self._blocks = blocks
        self._taken = _TAKEN[settings.choice]
        self._nixl: NixlSenders | None = None
        if NIXL in self._taken and memory.segment is not None:
            from kvtransfer.transports.nixl import NixlSenders

            self._nixl = NixlSenders(memory.segment, blocks.shape[0], blocks.shape[1], settings.host)

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
        return {SHM: self._open_shm, ZMQ: self._open_zmq, NIXL: self._open_nixl, NCCL: self._open_nccl}

    def _open_shm(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if not shares_memory(self._settings.process, hello.process):
            raise TransferFailed("the nodes do not share memory")
        from kvtransfer.transports.shm import ShmSender

        return ShmSender(endpoint, self._blocks, hello.num_blocks)

    def _open_zmq(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        from kvtransfer.transports.tcp_zmq import ZmqSender

        return ZmqSender(self._settings.context, endpoint, self._blocks, self._settings.links)

    def _open_nixl(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if self._nixl is None:
            raise TransferFailed("this node has no nixl agent")
        return self._nixl.open(endpoint, hello.num_blocks)

    def _open_nccl(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        from kvtransfer.transports.nccl import NcclSender

        return NcclSender(self._settings.context, endpoint, self._blocks, self._settings.links)
