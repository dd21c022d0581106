"""Where the other ranks of a node's engine come from, by the node's settings: this machine, or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from baton.kvtransfer.transports.part_registry import taken_by_ranks
from baton.ranks.executor.spread import Machine
from baton.ranks.executor.starting import LocalRanks, RankStarter
from baton.ranks.machines.remote_machines import RankMachines
from baton.runtime.process import start_authenticator
from baton.wire import links
from baton.wire.keys import ClusterKey


class RankPlaces(Protocol):
    """The settings of a node that say where its ranks are and where it waits for machines."""

    @property
    def rank_machines(self) -> int:
        """On how many machines the ranks are; 1: on this one."""
        ...

    @property
    def host(self) -> str:
        """The address of this machine at which it listens."""
        ...

    @property
    def rank_port(self) -> int:
        """The port at which the driver waits for other machines."""
        ...

    @property
    def divides_pool(self) -> bool:
        """Whether each rank has a KV pool of its own."""
        ...

    @property
    def kv_transport(self) -> str:
        """The name of the transport for KV, or "auto"."""
        ...


def open_ranks(
    settings: RankPlaces, role: str, cluster_key: ClusterKey | None, on_close: Callable[[Callable[[], None]], object]
) -> RankStarter:
    """The starter of a node's ranks. Machines have to have a key of `role`. Raises `InvalidSetting` when the port is
    taken, and before anything is waited for where ranks do not have the transport."""
    if settings.divides_pool:
        taken_by_ranks(settings.kv_transport, settings.rank_machines)
    local = LocalRanks(here=Machine(0, settings.host))
    if settings.rank_machines <= 1:
        return local
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    on_close(lambda: context.destroy(linger=0))
    authenticator = start_authenticator(context, cluster_key and _OfRole(cluster_key, role))
    if authenticator is not None:
        on_close(authenticator.stop)
    link_settings = links.LinkSettings(cluster_key)
    machines = RankMachines(settings.rank_machines, local, context, link_settings, settings.host, settings.rank_port)
    on_close(machines.close)
    return machines


@dataclass(frozen=True, slots=True)
class _OfRole:
    """Admits machines whose public key is that of the node's role."""

    key: ClusterKey
    role: str

    def admits(self, public: bytes) -> bool:
        return self.key.is_of(public, self.role)
