"""Transports by name: which a receiver offers, which a sender takes, and the memory a pool must live in.

Owns the order of preference. A transport's module is imported when it is first used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import zmq

from engine.api.errors import InvalidSetting, Refused, TransferFailed
from engine.api.links import LinkSettings
from kvtransfer.host import shares_memory
from kvtransfer.messages import Endpoint, PeerHello, ProcessIdentity
from kvtransfer.transports.base import Blocks, Receiver, Sender

AUTO = "auto"
TRANSPORTS = (AUTO, "shm", "zmq")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolMemory:
    """Allocates a receiver's pool where the chosen transports need it, then opens their receivers.

    `allocate` is handed to the engine; `open_receivers` is called once the engine has its pool.
    """

    choice: str
    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings
    _receivers: list[Receiver] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> Blocks:
        """Memory for the pool: a shared segment where "shm" may be used, private memory otherwise.

        Raises `InvalidSetting` when "shm" was demanded and the segment cannot be made; "auto" then goes without.
        """
        if self.choice in (AUTO, "shm"):
            from kvtransfer.transports.shm import Segment, ShmReceiver, sweep_orphans

            try:
                sweep_orphans()
                segment = Segment(num_bytes)
            except OSError as error:
                reason = f"no shared memory for a pool of {num_bytes} bytes ({error.strerror})"
                if self.choice == "shm":
                    raise InvalidSetting(f"--kv-transport shm: {reason}") from None
                _log.warning("%s: handoffs use zmq", reason)
            else:
                self._receivers.append(ShmReceiver(segment))
                return segment.array
        return np.zeros(num_bytes, dtype=np.uint8)

    def open_receivers(self, blocks: Blocks) -> list[Receiver]:
        """Receivers for `blocks` [num_blocks, block_bytes], in order of preference."""
        if self.choice in (AUTO, "zmq"):
            from kvtransfer.transports.tcp_zmq import ZmqReceiver

            self._receivers.append(ZmqReceiver(self.context, self.host, blocks, self.links))
        return self._receivers

    def close(self) -> None:
        """Close every receiver; segments disappear."""
        for receiver in self._receivers:
            receiver.close()


@dataclass(frozen=True, slots=True)
class SenderFactory:
    """Opens senders over one pool. `choice` restricts what this side accepts."""

    choice: str
    context: zmq.Context[zmq.Socket[bytes]]
    blocks: Blocks
    process: ProcessIdentity
    links: LinkSettings

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """The first endpoint of `hello` that works from here: (transport name, sender). Raises `Refused`."""
        reasons = []
        for endpoint in hello.endpoints:
            if self.choice not in (AUTO, endpoint.transport):
                reasons.append(f"{endpoint.transport}: this node uses {self.choice}")
                continue
            try:
                return endpoint.transport, self._open(endpoint, hello)
            except (TransferFailed, InvalidSetting) as error:
                reasons.append(f"{endpoint.transport}: {error}")
        raise Refused(f"no KV transport in common ({'; '.join(reasons) or 'none offered'})")

    def _open(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        if endpoint.transport == "shm":
            if not shares_memory(self.process, hello.process):
                raise TransferFailed("the nodes do not share memory")
            from kvtransfer.transports.shm import ShmSender

            return ShmSender(endpoint, self.blocks, hello.num_blocks)
        if endpoint.transport == "zmq":
            from kvtransfer.transports.tcp_zmq import ZmqSender

            return ZmqSender(self.context, endpoint, self.blocks, self.links)
        raise TransferFailed(f"unknown transport {endpoint.transport!r}")
