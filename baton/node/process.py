"""One node process from its command line to its exit: settings, memory, engine, link, loop, cleanup.

Owns the order of start and stop. A `Role` says what differs between the roles; no code here asks which role it is.

The start reads settings, pins cores, allocates memory, loads weights, listens and registers. The stop leaves the
router, finishes requests until a deadline, saves the KV cache to a folder if it has one, and closes everything.

The process prints the progress of weights and graphs to stdout (`baton.runtime.events`), and that it is ready once it
is registered. An error that ends the process is one line "error: ..." on stderr and exit status 1.
"""

from __future__ import annotations

import math
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import zmq

from baton.engine.build import Engine, StartProgress, build_engine
from baton.node.health import HealthServer
from baton.node.heartbeat import HeartbeatThread
from baton.node.kv_events.config import FLAG, KvEventsConfig, read_config
from baton.node.lent_cores import LentCores
from baton.node.loop import EngineLoop
from baton.node.metrics import LinkCollector, NodeCollector, OffloadCollector
from baton.node.pool import Context, NodeParts, NodePool
from baton.node.role import Role
from baton.node.router_link import RouterLink
from baton.node.router_links import RouterLinks
from baton.node.settings import NodeSettings
from baton.node.stopper import Stopper
from baton.ranks.executor.choose import open_executor
from baton.runtime.clock import host_clock
from baton.runtime.events import GRAPHS, WEIGHTS, Drained, Loading, Ready, emit
from baton.runtime.process import (
    configure_logging,
    freeze_startup_objects,
    keep_freed_memory,
    pin_to_cores,
    start_authenticator,
)
from baton.runtime.watchdog import Beat, Watchdog
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.keys import ADMITTED, ROUTER, KeyRing
from baton.wire.messages.membership import Hello

_EVENT_INTERVAL_S = 0.2
SAVE_S = 5.0
"""The longest that a node which ends takes to save its KV cache."""
THREAD_LIMIT_S = 60.0
"""How long a thread may be still that turns several times a second; what it waits for within a turn has 10 s."""


def run_node(settings: NodeSettings, role: Role) -> None:
    """Serve until told to stop. Raises `BatonError` when the node cannot start or is refused."""
    if settings.data_parallel_size != 1:
        raise InvalidSetting(
            "--data-parallel-size: one node is one engine; `baton prefill`, `decode` and `node` start several"
        )
    _prepare_process(settings)
    keys = KeyRing(Path(settings.cluster_key), role.name) if settings.cluster_key else None
    to_router = links.LinkSettings(cluster_key=keys.towards(ROUTER) if keys else None)
    to_peers = links.LinkSettings(cluster_key=keys.towards(*ADMITTED[role.name]) if keys else None)
    links.require_key_beyond_loopback(settings.host, to_peers.cluster_key)
    with Stopper(settings.shutdown_timeout_s) as stopper, ExitStack() as stack:
        context: Context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        authenticator = start_authenticator(context, keys)
        if authenticator is not None:
            stack.callback(authenticator.stop)
        if keys is not None:
            signal.signal(signal.SIGHUP, lambda *_: keys.reload())
        pool = NodePool(settings, context, to_peers, role.name, role.pool)
        stack.callback(pool.close)
        _serve(settings, context, to_router, role, pool, stopper)


def _serve(
    settings: NodeSettings,
    context: Context,
    to_router: links.LinkSettings,
    role: Role,
    pool: NodePool,
    stopper: Stopper,
) -> None:
    begun_s = time.monotonic()
    events_config = _events_config(settings)
    node_id = settings.node_id or f"{role.name}-{secrets.token_hex(3)}"
    addresses = settings.router_addresses
    with ExitStack() as stack:
        progress = StartProgress(_Progress(role.name, WEIGHTS), _Progress(role.name, GRAPHS))
        engine = build_engine(settings, pool.allocate, progress, partial(open_executor, starter=pool.ranks))
        stack.callback(engine.device.close)
        stack.callback(engine.executor.close)
        stack.callback(engine.core.close)
        engine.learn_costs()
        watchdog = Watchdog()
        watch = partial(watchdog.beat, limit_s=THREAD_LIMIT_S)
        parts = NodeParts(engine, node_id, secrets.randbits(63), watch)
        ends = pool.open_ends(parts)
        stack.callback(ends.close)
        leg, peer_address = role.open_leg(engine, ends)
        core = engine.core
        collector = NodeCollector(core.status, core.costs, core.draft_counts.undrafted, leg.metrics)
        health = HealthServer(settings.host, settings.http_port, collector, lambda: watchdog.complaint)
        stack.callback(health.close)
        health.watch(watchdog)
        if core.offload is not None:
            health.watch(OffloadCollector(core.offload))
        if events_config is not None:
            stack.callback(_publish_blocks(engine, events_config, health))
        hello = _hello(role, parts, settings, peer_address, health.address, begun_s)
        hello = replace(hello, can_pull=leg.can_pull)
        dialled = [RouterLink(context, each, to_router, hello, core.status, time.monotonic()) for each in addresses]
        routers = RouterLinks(dialled)
        stack.callback(routers.close)
        health.watch(LinkCollector(routers))
        beat = watch("heartbeat thread")
        heartbeat = HeartbeatThread(context, addresses, to_router, parts.epoch, core.status(), beat=beat)
        stack.callback(heartbeat.stop)
        freeze_startup_objects()
        watchdog.start(settings.hang_timeout_s)
        stack.callback(watchdog.close)
        beat = watchdog.beat("engine loop", settings.hang_timeout_s)
        each_round = engine.executor.watched(_Announcer(hello, routers, health, beat))
        cores = LentCores(engine.loans, settings.max_rest_ms / 1000, settings.goal_tpot_ms / 1000)
        EngineLoop(core, leg, routers, heartbeat, stopper, cores=cores).run(each_round)
        beat.rest()
        _save_cache(engine, stopper)
    if stopper.stays_away:
        emit(Drained(role.name))


def _events_config(settings: NodeSettings) -> KvEventsConfig | None:
    """What KV events are asked for, before anything is loaded. Raises `InvalidSetting`."""
    config = read_config(settings.kv_events_config)
    if config is not None and not settings.enable_prefix_caching:
        raise InvalidSetting(f"{FLAG} tells of the prefix cache: it needs --enable-prefix-caching")
    return config


def _save_cache(engine: Engine, stopper: Stopper) -> None:
    """Have a folder keep the KV cache, within the time that the node has to end."""
    begun_s = time.monotonic()
    engine.core.save(lambda: min(begun_s + SAVE_S - (now_s := time.monotonic()), stopper.time_left_s(now_s)))


def _publish_blocks(engine: Engine, config: KvEventsConfig, health: HealthServer) -> Callable[[], None]:
    """Tell others what the prefix cache holds, from now until the returned function is called."""
    # only nodes that publish pay for the import
    from baton.node.kv_events.metrics import KvEventCollector
    from baton.node.kv_events.publisher import KvEventPublisher

    names = {digest: name for name, digest in engine.adapters.items()}
    tiers = () if engine.core.offload is None else engine.core.offload.tiers
    publisher = KvEventPublisher(config, engine.core.limits.block_size, names, tiers, engine.num_blocks)
    engine.core.log_blocks(publisher)
    health.watch(KvEventCollector(publisher))
    return publisher.close


@dataclass(slots=True)
class _Announcer:
    """Called every round: tells the watchdog, shows on `/health` whether the node is registered, and prints to stdout
    that it is, once."""

    hello: Hello
    routers: RouterLinks
    health: HealthServer
    beat: Beat
    is_done: bool = False

    def __call__(self) -> None:
        self.beat.touch()
        self.health.is_ready = self.routers.is_registered
        if self.routers.is_registered and not self.is_done:
            self.is_done = True
            emit(Ready(self.hello.role, self.hello.http_address, peer_address=self.hello.peer_address))


def _hello(
    role: Role, parts: NodeParts, settings: NodeSettings, peer_address: str, http_address: str, begun_s: float
) -> Hello:
    engine = parts.engine
    return Hello(
        role=role.name,
        prefers=role.preference,
        group=settings.node_group,
        node_id=parts.node_id,
        epoch=parts.epoch,
        fingerprint=engine.fingerprint,
        layout=engine.memory.layout,
        peer_address=peer_address,
        http_address=http_address,
        num_blocks=engine.num_blocks,
        max_request_tokens=engine.max_request_tokens,
        max_num_seqs=settings.max_num_seqs,
        status=engine.core.status(),
        clock=host_clock(),
        tokenizer=engine.tokenizer_digest,
        media=engine.core.media_kinds,
        start_ms=math.ceil(1000 * (time.monotonic() - begun_s)),
    )


def _prepare_process(settings: NodeSettings) -> None:
    configure_logging(settings.log_level, settings.log_format)
    if settings.cpu_affinity:
        pin_to_cores(settings.cpu_affinity)
    keep_freed_memory()


class _Progress:
    """Prints the progress of a stage of the start, a few times a second."""

    def __init__(self, role: str, stage: str) -> None:
        self._role = role
        self._stage = stage
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVENT_INTERVAL_S
            emit(Loading(self._role, done, total, self._stage))
