"""One node process from its command line to its exit: settings, memory, engine, link, loop, cleanup.

Owns the order of start and stop. What a role adds comes in as a `LegFactory`; nothing here asks which role it is.

Start: read settings, pin, allocate, load, listen, register. Stop: leave, drain to a deadline, close everything.
Prints one JSON object per line on stdout for whoever started it: "loading" while weights load and graphs are recorded,
"ready" once registered. Errors that end the process are one line "error: ..." on stderr and exit status 1.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq
from prometheus_client.core import Metric

from engine.build import Engine, build_engine
from engine.runner.kv_memory import ByteArray
from node.health import HealthServer, NodeCollector
from node.heartbeat import HeartbeatThread
from node.loop import EngineLoop, Leg
from node.router_link import RouterLink
from node.settings import NodeSettings
from node.stopper import Stopper
from program.clock import host_clock
from program.events import GRAPHS, WEIGHTS, Loading, Ready, emit
from program.process import configure_logging, keep_freed_memory, spare_what_lasts, start_authenticator
from wire import links
from wire.errors import InvalidSetting
from wire.messages import Hello, NodeStatus

_EVENT_INTERVAL_S = 0.2
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a role builds its leg from."""

    settings: NodeSettings
    context: Context
    links: links.LinkSettings
    engine: Engine
    node_id: str
    epoch: int


class Role(Protocol):
    """A role: where the KV pool lives, the address other nodes dial, and the leg."""

    name: str

    def allocate(self, num_bytes: int) -> ByteArray:
        """Memory for the KV pool."""
        ...

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """The leg and its peer address ("" where nobody dials)."""
        ...

    def close(self) -> None:
        """Give up what `allocate` and `build_leg` opened; called in every case."""
        ...


RoleFactory = Callable[[NodeSettings, Context, links.LinkSettings], Role]


def run_node(settings: NodeSettings, make_role: RoleFactory) -> None:
    """Serve until told to stop. Raises `BatonError` when the node cannot start or is refused."""
    _prepare_process(settings)
    stopper = Stopper(settings.shutdown_timeout_s)
    stopper.install()
    key = links.ClusterKey.from_file(Path(settings.cluster_key)) if settings.cluster_key else None
    links.require_key_beyond_loopback(settings.host, key)
    link_settings = links.LinkSettings(cluster_key=key)
    context: Context = zmq.Context()
    authenticator = start_authenticator(context, key)
    role = make_role(settings, context, link_settings)
    try:
        _serve(settings, context, link_settings, role, stopper)
    finally:
        role.close()
        if authenticator is not None:
            authenticator.stop()
        context.destroy(linger=0)


def _serve(
    settings: NodeSettings, context: Context, link_settings: links.LinkSettings, role: Role, stopper: Stopper
) -> None:
    node_id = settings.node_id or f"{role.name}-{secrets.token_hex(3)}"
    epoch = secrets.randbits(63)
    engine = build_engine(settings, role.allocate, _Progress(role.name, WEIGHTS), _Progress(role.name, GRAPHS))
    leg, peer_address = role.build_leg(NodeParts(settings, context, link_settings, engine, node_id, epoch))
    core = engine.core

    def metrics() -> Iterable[Metric]:
        return leg.metrics()

    health: HealthServer | None = None
    router_address = links.parse_address(settings.router, "--router")
    heartbeat = HeartbeatThread(context, router_address, link_settings, epoch, core.status())
    try:
        health = HealthServer(
            settings.host, settings.http_port, NodeCollector(core.status, metrics), lambda: router.is_registered
        )

        def hello() -> Hello:
            return _hello(role.name, node_id, epoch, engine, peer_address, health.address, core.status(), settings)

        router = RouterLink(context, router_address, link_settings, hello, epoch, time.monotonic())
        router.send_cache_events(core.cached_hashes(), [], is_snapshot=True)
        heartbeat.start()
        announce = _Announcer(role.name, health.address, peer_address, router)
        loop = EngineLoop(core, leg, router, heartbeat, stopper)
        spare_what_lasts()
        loop.run(announce)
    finally:
        heartbeat.stop()
        leg.close()
        engine.device.close()
        if health is not None:
            health.close()


@dataclass(slots=True)
class _Announcer:
    """Prints the ready line, once the router has welcomed this node."""

    role: str
    address: str
    peer_address: str
    router: RouterLink
    is_done: bool = False

    def __call__(self) -> None:
        if not self.is_done and self.router.is_registered:
            self.is_done = True
            emit(Ready(self.role, self.address, peer_address=self.peer_address))


def _hello(
    role: str,
    node_id: str,
    epoch: int,
    engine: Engine,
    peer_address: str,
    http_address: str,
    status: NodeStatus,
    settings: NodeSettings,
) -> Hello:
    return Hello(
        role=role,
        node_id=node_id,
        epoch=epoch,
        fingerprint=engine.fingerprint,
        layout=engine.memory.layout,
        peer_address=peer_address,
        http_address=http_address,
        num_blocks=engine.num_blocks,
        max_request_tokens=engine.max_request_tokens,
        max_num_seqs=settings.max_num_seqs,
        status=status,
        clock=host_clock(),
    )


def _prepare_process(settings: NodeSettings) -> None:
    configure_logging(settings.log_level)
    if settings.cpu_affinity:
        _pin(settings.cpu_affinity)
    keep_freed_memory()


def _pin(cores: str) -> None:
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise InvalidSetting(f"--cpu-affinity {cores!r} is not a list of cores of this machine ({error})") from None


class _Progress:
    """Prints "loading" events, a few a second."""

    def __init__(self, role: str, stage: str) -> None:
        self._role = role
        self._stage = stage
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVENT_INTERVAL_S
            emit(Loading(self._role, done, total, self._stage))
