"""What the router's work costs with so many nodes and requests in flight: the real relay, routing, registry and control
link, with nodes that have no models, in one process.

Owns the order of what is done, and the stopwatch, which counts this process's CPU time. Prompts share their beginnings,
which prefill and decode nodes report as cached. HTTP and text are left out: they cost a request the same whatever the
cluster's size (`baton.bench.scale.streams` has them).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.bench.scale.fake_cluster import FINGERPRINT, LAYOUT, FakeCluster
from baton.engine.cache.hashing import extend_hashes, root_hash
from baton.router.health.metrics import RouterMetrics
from baton.router.nodes.control import PING_INTERVAL_S, ControlLink
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.router.requests.legs import RelayRequest
from baton.router.requests.relay import Relay, RelaySettings
from baton.router.routing.ejection import Ejections
from baton.router.routing.policies import make_policy
from baton.router.routing.selection import Routing
from baton.router.routing.suspicion import Probation
from baton.wire.errors import RequestFailed
from baton.wire.links import LinkSettings
from baton.wire.sampling import DecodingParams

_MODEL = "scale"
_NUM_CONVERSATIONS = 64
_SHARED_TOKENS = 256
_WAIT_S = 300.0
_DECISIONS = 200
_AT_ONCE = 64
_LOCAL_TOKENS = 16
_IDLE_S = 1.5
_BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`num_nodes`, half of them prefill nodes; `num_requests` in flight, with prompts of `num_prompt_tokens`;
    `blocks_per_node` in the prefix index."""

    num_nodes: int
    num_requests: int
    num_prompt_tokens: int = 512
    blocks_per_node: int = 1000


@dataclass(frozen=True, slots=True)
class ClusterCosts:
    """Microseconds of CPU: of a node that joins; of choosing a route; of a request from its start until both legs are
    sent, and until its end; of a heartbeat; of a Ping with its Pong; of a relayed token. Seconds that nothing else can
    run: by heartbeats and Pings, and while metrics are rendered. `core_share`: what heartbeats and Pings take of a
    core. Bytes: of a request in flight, of a block in the prefix index."""

    plan: ClusterPlan
    join_us: float
    decision_us: float
    start_us: float
    end_us: float
    heartbeat_us: float
    ping_us: float
    token_us: float
    longest_turn_s: float
    metrics_s: float
    core_share: float
    request_bytes: float
    block_bytes: float


def measure_cluster(plan: ClusterPlan) -> ClusterCosts:
    """Raises `RequestFailed` when something did not come."""
    return asyncio.run(_measure(plan))


async def _measure(plan: ClusterPlan) -> ClusterCosts:
    cluster = FakeCluster()
    registry = NodeRegistry({_MODEL: FINGERPRINT})
    control = ControlLink(cast("Any", cluster), "127.0.0.1", 1, LinkSettings(), registry)
    policies = make_policy("prefix"), make_policy("prefix")
    settings = RelaySettings(_LOCAL_TOKENS, plan.num_requests + 1, max_attempts=3, request_timeout_s=3600.0)
    relay = Relay(registry, control, *policies, settings)
    metrics = RouterMetrics([_MODEL])
    metrics.watch(relay, registry, control)
    control.start(relay)
    try:
        routing = Routing(registry, *policies, _LOCAL_TOKENS, Probation(), Ejections(registry))
        return await _Cluster(plan, cluster, registry, relay, metrics, control, routing).measure()
    finally:
        await control.close()


@dataclass(slots=True)
class _Cluster:
    plan: ClusterPlan
    nodes: FakeCluster
    registry: NodeRegistry
    relay: Relay
    metrics: RouterMetrics
    control: ControlLink
    routing: Routing

    async def measure(self) -> ClusterCosts:
        plan = self.plan
        requests = _requests(plan)
        joined_s = await self._cpu_s(self._join)
        before = _rss_bytes()
        await self._cache()
        per_block = (_rss_bytes() - before) / (plan.num_nodes * plan.blocks_per_node)
        before = _rss_bytes()
        flights: list[Flight] = []
        started_s = await self._cpu_s(self._start, requests, flights)
        per_request = (_rss_bytes() - before) / plan.num_requests
        decided_s = await self._cpu_s(self._decide, requests)
        stepped_s = [await self._cpu_s(self._take_in, self.nodes.step()) for _ in range(3)]
        beaten_s = [await self._cpu_s(self._take_in, self.nodes.beat()) for _ in range(2)]
        pinged_s = [await self._cpu_s(self._ping) for _ in range(2)]
        longest_s = await self._longest_turn_s()
        rendered_s = await self._cpu_s(self._render)
        ended_s = await self._cpu_s(self._end, flights)
        return ClusterCosts(
            plan,
            join_us=1e6 * joined_s / plan.num_nodes,
            decision_us=1e6 * decided_s / _DECISIONS,
            start_us=1e6 * started_s / plan.num_requests,
            end_us=1e6 * ended_s / plan.num_requests,
            heartbeat_us=1e6 * min(beaten_s) / plan.num_nodes,
            ping_us=1e6 * min(pinged_s) / plan.num_nodes,
            token_us=1e6 * min(stepped_s) / plan.num_requests,
            longest_turn_s=longest_s,
            metrics_s=rendered_s,
            core_share=min(beaten_s) / _BEAT_S + min(pinged_s) / PING_INTERVAL_S,
            request_bytes=per_request,
            block_bytes=per_block,
        )

    async def _cpu_s(self, work: Callable[..., Awaitable[None]], *arguments: object) -> float:
        """What the router takes of the processor for it."""
        begun_s = time.thread_time() - self.nodes.own_s
        await work(*arguments)
        return time.thread_time() - self.nodes.own_s - begun_s

    async def _take_in(self, _: int) -> None:
        """The router takes in what was said."""
        await _until(lambda: not self.nodes.poll())

    async def _join(self) -> None:
        num_prefills = self.plan.num_nodes // 2
        self.nodes.join(num_prefills, self.plan.num_nodes - num_prefills)
        await _until(lambda: len(self.registry) == self.plan.num_nodes)

    async def _cache(self) -> None:
        shared = [b"".join(_hashes(_prompt(number, _SHARED_TOKENS))) for number in range(_NUM_CONVERSATIONS)]
        await self._take_in(self.nodes.cache(shared, self.plan.blocks_per_node))

    async def _start(self, requests: list[RelayRequest], flights: list[Flight]) -> None:
        for number, request in enumerate(requests):
            flights.append(self.relay.start(request, Inbox()))
            if not number % _AT_ONCE:
                await asyncio.sleep(0)

    async def _decide(self, requests: list[RelayRequest]) -> None:
        for number in range(_DECISIONS):
            prompt_ids = requests[number % len(requests)].prompt_ids
            self.routing.choose(_MODEL, prompt_ids, b"", frozenset(), 64, now_s=time.monotonic(), allows_handoff=True)

    async def _ping(self) -> None:
        for number, node in enumerate(self.registry.all()):
            self.control.is_reachable(node)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        await self._take_in(0)

    async def _longest_turn_s(self) -> float:
        """The longest time for which heartbeats and Pings let nothing else run."""
        loop = asyncio.get_running_loop()
        longest_s, end_s = 0.0, loop.time() + _IDLE_S
        while loop.time() < end_s:
            before_s = time.thread_time() - self.nodes.own_s
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - self.nodes.own_s - before_s)
        return longest_s

    async def _render(self) -> None:
        await self.metrics.render_aside()

    async def _end(self, flights: list[Flight]) -> None:
        for number, flight in enumerate(flights):
            self.relay.close(flight)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)


async def _until(is_done: Callable[[], bool]) -> None:
    """Raises `RequestFailed`."""
    deadline_s = time.monotonic() + _WAIT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise RequestFailed("the router did not take in what its nodes said")
        await asyncio.sleep(0)


def _requests(plan: ClusterPlan) -> list[RelayRequest]:
    params = DecodingParams(max_tokens=64, ignore_eos=True)
    prompts = [_prompt(number, plan.num_prompt_tokens) for number in range(_NUM_CONVERSATIONS)]
    return [RelayRequest(_MODEL, prompts[number % len(prompts)], params) for number in range(plan.num_requests)]


def _prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + num_tokens))


def _hashes(token_ids: tuple[int, ...]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, LAYOUT.block_size, root_hash(FINGERPRINT, b""))
    return hashes


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
