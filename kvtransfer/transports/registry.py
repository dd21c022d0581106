"""The place to add a transport: its name, when it is chosen, and how its two ends are opened.

The transport of an installed package needs nothing here (see `baton.kvtransfer.transports.plugged`). One of Baton's own
needs four things, all of them here:
1. a name (`AUTO`, `SHM`, ... below; users say it with --kv-transport),
2. its place in `_TAKEN` and `_TAKEN_ON_DEVICE`: which choices offer and take it, in order of preference, for a pool in
   host memory and for one on a device; and in `_IN_SEGMENT` if it needs the pool in shared memory,
3. a case in `_open_receiver`, which opens D's end (see `base.Receiver`),
4. a case in `SenderFactory._open`, which opens P's end (see `base.Sender`).
The module of a transport is imported in its case, when it is first used; one whose library is missing raises
`InvalidSetting` and says what to install.

What the choices mean. `auto` uses shared memory on one host and ZMQ between hosts. `shm` does the same: where /dev/shm
is too small, or the peer is on another host, ZMQ replaces it and one log line says so. A package's name comes before
all that `shm` means: peers without that package take the rest. `nixl` and `nccl` are used only when both nodes ask for
them. `nccl` is refused for pools in host memory: gloo would carry them, in which a peer that lies can end the node.
Pools on a device differ in two ways: `auto` tries nixl first if it is installed and works, and on one host blocks pass
through slots in shared memory, because the pool itself cannot be shared. Through slots go also blocks between a pool
in host memory and one on a device, and those of ranks that have pools of their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from baton.kvtransfer.messages import Endpoint, PeerHello, ProcessIdentity
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.process_identity import shares_memory
from baton.kvtransfer.transports.base import Blocks, Receiver, Sender, Starting
from baton.kvtransfer.transports.inlets import Inlets, WholeOnly
from baton.kvtransfer.transports.plugged import PluggedTransport, Site
from baton.kvtransfer.transports.shm.segment import Segment, sweep_orphans
from baton.wire.errors import InvalidSetting, Refused, TransferFailed
from baton.wire.kv_shard import WHOLE_BLOCK
from baton.wire.layout import KvLayout
from baton.wire.links import LinkSettings

if TYPE_CHECKING:
    from baton.kvtransfer.transports.nixl.lives import RunningAgent
    from baton.kvtransfer.transports.nixl.sender import NixlSenders

AUTO, SHM, ZMQ, NIXL, NCCL = "auto", "shm", "zmq", "nixl", "nccl"
SLOTS = "shm_slots"
"""What `shm` means for pools on a device. Users cannot choose it by this name."""
_TAKEN = {AUTO: (SHM, SLOTS, ZMQ), SHM: (SHM, SLOTS, ZMQ), ZMQ: (ZMQ,), NIXL: (NIXL,), NCCL: (NCCL,)}
"""For pools in host memory: the transports that each choice offers and takes, the preferred one first."""
_TAKEN_ON_DEVICE = {**_TAKEN, AUTO: (NIXL, SLOTS, ZMQ), SHM: (SLOTS, ZMQ)}
"""The same for pools on a device."""
_WITHOUT_PORT = (SHM, SLOTS, NIXL)
"""Transports whose receivers get no port of their own. That of slots is for this host, and the system's choice."""
_MORE_SHARED = (
    "try a lower --kv-cache-memory-bytes, or a larger /dev/shm: docker run --shm-size, or "
    "mount -o remount,size=SIZE /dev/shm"
)
SENDER, RECEIVER = "sender", "receiver"
"""What a pool is to peers: one that is read alone, or one that they write into."""
_IN_SEGMENT = {RECEIVER: (SHM, SLOTS, NIXL), SENDER: (NIXL,)}
"""By role, the transports for which a pool in host memory has to lie in a shared segment. Slots need none, but room."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What the transports of a node are made from. `port`: where the first of its receivers that listens does so; each
    further one has the next port. 0: the system chooses them. `plugged`: what `choice` means where it is the name of a
    package's transport."""

    choice: str
    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings
    process: ProcessIdentity
    port: int = 0
    plugged: PluggedTransport | None = None

    def taken(self, *, on_device: bool) -> tuple[str, ...]:
        """The transports that are offered and taken for a pool of that kind, the preferred one first."""
        table = _TAKEN_ON_DEVICE if on_device else _TAKEN
        return table[self.choice] if self.plugged is None else (self.plugged.name, *table[SHM])


def load_plugged(choice: str) -> PluggedTransport | None:
    """The transport of an installed package; None: `choice` is Baton's own. Raises `InvalidSetting`."""
    return None if choice in _TAKEN else PluggedTransport.load(choice, tuple(_TAKEN))


def _allocate_plain(num_bytes: int) -> Blocks:
    return np.zeros(num_bytes, dtype=np.uint8)


@dataclass(slots=True)
class PoolMemory:
    """The memory of one node's pool: a shared segment where a transport needs one, private memory otherwise.

    `role` is `SENDER` or `RECEIVER`; `allocate_private` is how the node allocates memory that nobody shares.
    `is_shared`: processes of the node itself share it, whatever the transports need. `reserved_bytes`: of a segment,
    see there.
    """

    settings: TransportSettings
    role: str
    allocate_private: Callable[[int], Blocks] = _allocate_plain
    is_shared: bool = False
    reserved_bytes: int | None = None
    segment: Segment | None = None

    def allocate(self, num_bytes: int) -> Blocks:
        """Memory for a pool. Raises `InvalidSetting` when there is no segment and no transport that works without."""
        names = self.settings.taken(on_device=False)
        if not self.is_shared and not set(names) & set(_IN_SEGMENT[self.role]):
            return self.allocate_private(num_bytes)
        try:
            sweep_orphans()
            self.segment = Segment(num_bytes, self.reserved_bytes)
        except OSError as error:
            reason = f"no shared memory for a pool of {num_bytes / 2**30:.2f} GiB in /dev/shm ({error.strerror})"
            if self.is_shared:
                raise InvalidSetting(
                    f"a node of several ranks: {reason}, which its ranks share; {_MORE_SHARED}"
                ) from None
            if set(names) <= set(_IN_SEGMENT[self.role]):
                raise InvalidSetting(f"--kv-transport {self.settings.choice}: {reason}; {_MORE_SHARED}") from None
            _log.warning("%s: handoffs use %s, which is slower; %s", reason, ZMQ, _MORE_SHARED)
            return self.allocate_private(num_bytes)
        return self.segment.array

    def close(self) -> None:
        """Remove the shared segment, if there is one, and those of nodes that were killed: there may be no later start
        that would."""
        if self.segment is not None:
            self.segment.close()
            with contextlib.suppress(OSError):
                sweep_orphans()


def listens(receiver: Receiver) -> bool:
    """Whether a receiver listens on a port of its own."""
    return receiver.endpoint.transport not in _WITHOUT_PORT


def source_settings(settings: TransportSettings) -> TransportSettings:
    """The settings with which a decode node hands KV over itself, where it is to have no second agent of nixl: as it
    would be without."""
    choice = {AUTO: SHM, NIXL: ZMQ}.get(settings.choice, settings.choice)
    return replace(settings, choice=choice)


def pulling_settings(settings: TransportSettings) -> TransportSettings | None:
    """The settings with which a prefill node takes prefixes from other nodes. Unless nixl is asked for, peers only read
    its pool, and its receivers write into it. An agent of nixl and a group of nccl go one way: it has one more of them
    then. None: by a package's transport there may be none."""
    if settings.plugged is not None:
        return None
    return replace(settings, choice=SHM) if settings.choice == AUTO else settings


def open_receivers(
    settings: TransportSettings, memory: PoolMemory, pool: KvPool, layout: KvLayout | None = None
) -> list[Receiver]:
    """Receivers for `pool`, in order of preference; one in host memory was allocated by `memory`. `layout`: of its
    blocks, where ranks of other nodes may have parts of them.

    Raises `InvalidSetting` when the choice names a transport that cannot be used here.
    """
    receivers: list[Receiver] = []
    try:
        for name in _taken(settings, pool):
            if _lacks_segment(name, memory, pool):
                continue
            try:
                port = settings.port and settings.port + sum(map(listens, receivers))
                site = Site(pool, settings.context, settings.host, settings.links, port, memory.segment)
                receivers.append(_open_receiver(name, settings, site, layout))
            except InvalidSetting as error:
                _leave_out(settings, name, error)
    except BaseException:
        for receiver in receivers:
            receiver.close()
        raise
    return receivers


def _open_receiver(name: str, settings: TransportSettings, site: Site, layout: KvLayout | None) -> Receiver:
    if settings.plugged is not None and name == settings.plugged.name:
        return settings.plugged.open_receiver(site)
    pool = site.pool
    match name:
        case "shm":
            from baton.kvtransfer.transports.shm.direct import ShmReceiver

            return ShmReceiver(_required(site.segment))
        case "shm_slots":
            from baton.kvtransfer.transports.shm.slots_receiver import SlotsReceiver

            sweep_orphans()
            return SlotsReceiver(site.context, site.host, pool, site.links, inlets=_inlets(pool, layout))
        case "zmq":
            from baton.kvtransfer.transports.tcp_zmq import ZmqReceiver

            return ZmqReceiver(site.context, site.host, pool, site.links, site.port, _inlets(pool, layout))
        case "nixl":
            from baton.kvtransfer.transports.nixl.receiver import NixlDeviceReceiver, NixlReceiver

            agent = _open_nixl_agent(site)
            inlets = _inlets(pool, layout)
            return NixlDeviceReceiver(agent, inlets) if pool.is_device else NixlReceiver(agent, inlets)
        case "nccl":
            from baton.kvtransfer.transports.nccl.receiver import NcclReceiver

            return NcclReceiver(site.context, site.host, pool.memory, site.links, site.port)
        case _:
            raise ValueError(f"there is no transport {name!r}")


def _inlets(pool: KvPool, layout: KvLayout | None) -> Inlets:
    """Where parts of blocks go, which ranks of other nodes may have."""
    if layout is None:
        return WholeOnly(pool)
    from baton.kvtransfer.transports.part_inlets import RankInlets

    return RankInlets(pool, layout, WHOLE_BLOCK)


class SenderFactory:
    """Opens senders over `pool`; one in host memory was allocated by `memory`.

    Raises `InvalidSetting` when the choice names a transport that cannot be used here.
    """

    def __init__(self, settings: TransportSettings, memory: PoolMemory, pool: KvPool) -> None:
        self._settings = settings
        self._site = Site(pool, settings.context, settings.host, settings.links, segment=memory.segment)
        self._taken = _taken(settings, pool)
        self._nixl: NixlSenders | None = None
        if NIXL in self._taken and not _lacks_segment(NIXL, memory, pool):
            try:
                self._nixl = self._open_nixl_senders()
            except InvalidSetting as error:
                _leave_out(settings, NIXL, error)
                self._taken = tuple(name for name in self._taken if name != NIXL)
        if SLOTS in self._taken:
            sweep_orphans()

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """The first endpoint of `hello` that works from here: (transport name, sender). Raises `Refused`, and
        `Starting` where one of them will work in a moment."""
        reasons = []
        is_starting = False
        for endpoint in hello.endpoints:
            name = endpoint.transport
            if name not in self._taken:
                reasons.append(f"{name:.40}: this node takes {' or '.join(self._taken)}")
                continue
            try:
                return name, self._open(endpoint, hello)
            except (TransferFailed, InvalidSetting, OSError, MemoryError) as error:  # the latter where nothing is left
                reasons.append(f"{name}: {error}")
                is_starting = is_starting or isinstance(error, Starting)
        message = f"no KV transport in common ({'; '.join(reasons) or 'none offered'})"
        raise Starting(message) if is_starting else Refused(message)

    def poll(self) -> None:
        """Let the nixl agent, which serves all its senders, report what has happened."""
        if self._nixl is not None:
            self._nixl.poll()

    def wait_on(self) -> Sequence[Any]:
        """Sockets that are readable when `poll` has something to do."""
        return () if self._nixl is None else self._nixl.wait_on()

    def close(self) -> None:
        """End the nixl agent. The caller has closed all senders before."""
        if self._nixl is not None:
            self._nixl.close()

    def _open(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        site, pool, plugged = self._site, self._site.pool, self._settings.plugged
        if endpoint.transport in (SHM, SLOTS):
            self._require_shared_memory(hello)
        if endpoint.has_ranks:
            return self._open_parts(endpoint, hello)
        if plugged is not None and endpoint.transport == plugged.name:
            return plugged.open_sender(site, endpoint, hello.num_blocks)
        match endpoint.transport:
            case "shm":
                from baton.kvtransfer.transports.shm.direct import ShmSender

                return ShmSender(endpoint, pool.memory, hello.num_blocks)
            case "shm_slots":
                from baton.kvtransfer.transports.shm.slots_sender import SlotsSender

                return SlotsSender(site.context, endpoint, pool, site.links)
            case "zmq":
                from baton.kvtransfer.transports.tcp_zmq import ZmqSender

                return ZmqSender(site.context, endpoint, pool, site.links)
            case "nixl":
                if self._nixl is None:
                    raise TransferFailed("this node has no nixl agent")
                return self._nixl.open(endpoint, hello.num_blocks)
            case "nccl":
                from baton.kvtransfer.transports.nccl.sender import NcclSender

                return NcclSender(site.context, endpoint, pool.memory, site.links)
            case _:
                raise ValueError(f"there is no transport {endpoint.transport!r}")

    def _open_parts(self, endpoint: Endpoint, hello: PeerHello) -> Sender:
        """A sender to a node whose ranks have pools of their own."""
        from baton.kvtransfer.transports.part_registry import Network, RankPool, open_parts, ranks_at

        network = Network(self._site.context, self._site.host, self._site.links)
        own = RankPool(self._site.pool, hello.layout, WHOLE_BLOCK)
        sender, _ = open_parts(own, network, self._nixl, ranks_at(endpoint, hello.num_blocks))
        return sender

    def _require_shared_memory(self, hello: PeerHello) -> None:
        if not shares_memory(self._settings.process, hello.process):
            raise TransferFailed("the nodes do not share memory")

    def _open_nixl_senders(self) -> NixlSenders:
        from baton.kvtransfer.transports.nixl.sender import NixlSenders

        return NixlSenders(_open_nixl_agent(self._site), self._site.pool.block_bytes)


def _open_nixl_agent(site: Site) -> RunningAgent:
    """The agent over a pool, once it is up (1 to 30 s). Raises `InvalidSetting`."""
    pool = site.pool
    if pool.is_device:
        from baton.kvtransfer.transports.nixl.thread import AgentThread

        return AgentThread(pool.memory, site.host)
    from baton.kvtransfer.transports.nixl.process import AgentProcess

    return AgentProcess(_required(site.segment).descriptor, pool.num_blocks, pool.block_bytes, site.host)


def _taken(settings: TransportSettings, pool: KvPool) -> tuple[str, ...]:
    if settings.choice == NCCL and not pool.is_device:
        raise InvalidSetting("--kv-transport nccl: it is for KV on GPUs; in host memory use shm, zmq or nixl")
    names = settings.taken(on_device=pool.is_device)
    if settings.choice == AUTO and find_spec(NIXL) is None:
        names = tuple(name for name in names if name != NIXL)
    return names


def _leave_out(settings: TransportSettings, name: str, error: InvalidSetting) -> None:
    """Warn that this transport cannot be used. Raises `error` when the user asked for it by name."""
    if settings.choice != AUTO or name != NIXL:
        raise error
    _log.warning("%s cannot be used and is left out: %s", name, error)


def _lacks_segment(name: str, memory: PoolMemory, pool: KvPool) -> bool:
    """Whether this transport needs the pool in a shared segment, and the pool lies elsewhere. That of a node whose pool
    peers only read may be in one for its own processes: peers are not given it."""
    if name == SHM and memory.role == SENDER:
        return True
    return not pool.is_device and memory.segment is None and name in _IN_SEGMENT[memory.role]


def _required(segment: Segment | None) -> Segment:
    if segment is None:
        raise RuntimeError("this transport is only opened for pools in a segment")
    return segment
