"""A transport of an installed package: what it has to have, and how Baton opens its two ends.

Owns the contract `Transport`, what an end is given (`Site`), and the refusal of what does not fulfil it. The user of a
node names one (`--kv-transport NAME`); a peer that offers it is answered only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import zmq

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.transports.base import Receiver, Sender
from baton.kvtransfer.transports.shm.segment import Segment
from baton.runtime.plugins import KV_TRANSPORTS, Plugin, load
from baton.wire.errors import InvalidSetting
from baton.wire.links import LinkSettings

FLAG = "--kv-transport"


@dataclass(frozen=True, slots=True)
class Site:
    """Where an end of a transport is opened. `context`: of the node's ZMQ sockets; `host`: the only address at which it
    listens; `links`: the keys of the deployment; `port`: of a receiver that listens, 0: the system chooses; `segment`:
    the shared memory in which `pool` lies, None: it is private, or on a device."""

    pool: KvPool
    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings
    port: int = 0
    segment: Segment | None = None


class Transport(Protocol):
    """What a name of the group `baton.kv_transports` stands for. A module can be one."""

    def open_receiver(self, site: Site) -> Receiver:
        """D's end, whose endpoint names this transport as it is registered. Raises `InvalidSetting`."""
        ...

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        """P's end towards the receiver at `endpoint`, whose pool has so many blocks. Everything in `endpoint` was said
        by a peer. Raises `TransferFailed`."""
        ...


class PluggedTransport:
    """The transport that a package registered as `name`. Its ends are looked at when they are opened."""

    def __init__(self, name: str, plugin: Plugin) -> None:
        self.name, self._plugin = name, plugin
        self._transport: Transport = plugin.fulfilling(Transport, plugin.value)

    @classmethod
    def load(cls, name: str, own: tuple[str, ...]) -> PluggedTransport:
        """That of an installed package. Raises `InvalidSetting`."""
        return cls(name, load(KV_TRANSPORTS, FLAG, name, own))

    def open_receiver(self, site: Site) -> Receiver:
        """D's end. Raises `InvalidSetting` also when it is no `Receiver`, or offers an endpoint of another name."""
        receiver = cast(Receiver, self._plugin.opened(Receiver, self._transport.open_receiver, site))
        if receiver.endpoint.transport != self.name:
            receiver.close()
            raise InvalidSetting(f"{self._plugin.origin} offers an endpoint of {receiver.endpoint.transport!r:.50}")
        return receiver

    def open_sender(self, site: Site, endpoint: Endpoint, num_blocks: int) -> Sender:
        """P's end. Raises `InvalidSetting` also when it is no `Sender`."""
        return cast(Sender, self._plugin.opened(Sender, self._transport.open_sender, site, endpoint, num_blocks))
