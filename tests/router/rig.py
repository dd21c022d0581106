"""Helper: a router's relay and control link over real sockets, with fake nodes; and the HTTP server that uses them."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
from aiohttp import web

from baton.engine.models.generation_defaults import GenerationDefaults
from baton.router.app import build_app
from baton.router.health.metrics import RouterMetrics
from baton.router.http.access.audit import AuditLog
from baton.router.http.access.guard import Guard
from baton.router.http.admission.admission import Admission, AdmissionSettings
from baton.router.http.admission.metrics import AccessMetrics
from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.resume.streams import Streams
from baton.router.http.served_model import ServedModel
from baton.router.http.serving.limits import HttpLimits
from baton.router.http.serving.server import HttpServer
from baton.router.nodes.control import ControlLink, ControlPort
from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.router.requests.relay import Relay, RelaySettings
from baton.router.routing.policies import Policy, RoundRobin
from baton.router.routing.prefix_ways import PrefixWays
from baton.router.settings import RouterSettings
from baton.wire import links
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import PATIENCE_S, Context, FakeNode, Script, make_hello

PROMPT = tuple(range(10, 30))
MODEL = "org/tiny"
SEND_BUFFER_BYTES = 16_384  # small, so that a client that does not read is noticed after few tokens
DEFAULT_MODELS: Mapping[str, str | None] = {MODEL: None}
NO_DEFAULTS = GenerationDefaults()
NONE_STORED = StoredResponses()
ROUTER_SETTINGS = RouterSettings()
DEFAULTS = RelaySettings(local_prefill_tokens=4, max_concurrent_requests=64, max_attempts=3, request_timeout_s=20.0)
LIMITS = HttpLimits()


@dataclass(slots=True)
class Rig:
    """One router without HTTP, and the nodes that joined it."""

    context: Context
    registry: NodeRegistry
    relay: Relay
    control: ControlLink
    nodes: list[FakeNode] = field(default_factory=list)
    members: list[Node] = field(default_factory=list)

    async def join(self, role: str, script: Script | None = None, **changes: Any) -> FakeNode:
        """A new node, registered."""
        node = self.dial(role, script, **changes)
        await node.join()
        member = self.registry.get(node.hello.epoch)
        assert member is not None
        self.members.append(member)
        return node

    def dial(self, role: str, script: Script | None = None, **changes: Any) -> FakeNode:
        """A new node that has just said Hello."""
        node = FakeNode(self.context, self.control.address, make_hello(role, **changes), script)
        self.nodes.append(node)
        return node

    async def pair(self, script: Script | None = None) -> tuple[FakeNode, FakeNode]:
        """A prefill and a decode node."""
        return await self.join(PREFILL, script), await self.join(DECODE, script)

    def call(
        self, prompt_ids: Sequence[int] = PROMPT, params: DecodingParams | None = None, cache_salt: bytes = b""
    ) -> Call:
        """Start a request."""
        return Call(
            self.relay, RelayRequest(MODEL, Prompt.of(prompt_ids, cache_salt), params or DecodingParams(max_tokens=16))
        )

    def member(self, node: FakeNode) -> Node:
        """What the router knows of `node`."""
        member = self.registry.get(node.hello.epoch)
        assert member is not None
        return member

    async def loses(self, role: str, within_s: float = PATIENCE_S) -> None:
        """Wait until there is no node of `role` that could be given a leg."""
        await self.loses_all_but(role, 0, within_s)

    async def loses_all_but(self, role: str, number: int, within_s: float = PATIENCE_S) -> None:
        """Wait until only so many nodes of `role` could be given a leg."""
        async with asyncio.timeout(within_s):
            while len(self.registry.available(role, MODEL)) > number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def waits_for_a_node(self, number: int, within_s: float = PATIENCE_S) -> None:
        """Wait until so many requests wait for the first node."""
        async with asyncio.timeout(within_s):
            while self.relay.node_wait.num_waiting != number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def has_in_flight(self, number: int, within_s: float = PATIENCE_S) -> None:
        """Wait until so many requests are in flight."""
        async with asyncio.timeout(within_s):
            while self.relay.num_in_flight != number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def has_heard(self, node: FakeNode, within_s: float = PATIENCE_S) -> None:
        """Wait until the router has taken in all that `node` has sent so far."""
        mark = secrets.token_bytes(16)
        node.report_cache(mark)
        async with asyncio.timeout(within_s):
            while mark not in self.member(node).cached_hashes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def settle(self, within_s: float = PATIENCE_S) -> None:
        """Wait until no request is in flight and the load of every node, lost ones included, is 0."""

        def is_loaded(member: Node) -> bool:
            return bool(member.load or member.num_awaiting or len(member.prompts) or member.live_keys)

        async with asyncio.timeout(within_s):
            while self.relay.num_in_flight or any(map(is_loaded, self.members)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


class Call:
    """A request in a task of its own, and the deliveries it has had so far."""

    def __init__(self, relay: Relay, request: RelayRequest) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.flight: Flight | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(relay, request))

    async def result(self, within_s: float = PATIENCE_S) -> list[int]:
        """All tokens; raises what the relay raised."""
        async with asyncio.timeout(within_s):
            await self._task
        return self.token_ids

    async def has_tokens(self, count: int, within_s: float = PATIENCE_S) -> list[int]:
        """Wait for `count` tokens."""
        async with asyncio.timeout(within_s):
            while len(self.token_ids) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.token_ids

    async def cancel(self) -> None:
        """The client leaves."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, relay: Relay, request: RelayRequest) -> None:
        inbox = Inbox()
        flight = self.flight = relay.start(request, inbox)
        try:
            while not self.finish_reason:
                for _, delivery in await inbox.take():
                    self.token_ids.extend(delivery.token_ids)
                    self.finish_reason = delivery.finish_reason
                    self._changed.set()
        finally:
            relay.close(flight)


@asynccontextmanager
async def relaying(
    settings: RelaySettings = DEFAULTS,
    port: int = 0,
    decode_policy: Policy | None = None,
    models: Mapping[str, str | None] = DEFAULT_MODELS,
    ways: PrefixWays | None = None,
) -> AsyncIterator[Rig]:
    """A running relay without nodes. `models`: see `NodeRegistry`."""
    context: Context = zmq.Context()
    registry = NodeRegistry(models)
    control = ControlLink(context, ControlPort("127.0.0.1", port, links.LinkSettings()), registry)
    relay = Relay(registry, control, RoundRobin(), decode_policy or RoundRobin(), settings, ways)
    control.start(relay)
    rig = Rig(context, registry, relay, control)
    try:
        yield rig
    finally:
        for node in rig.nodes:
            node.die()
        await control.close()
        context.destroy(linger=0)


@dataclass(slots=True)
class Server:
    """A router with its HTTP endpoint."""

    rig: Rig
    endpoints: Endpoints
    metrics: RouterMetrics
    http: HttpServer
    host: str
    port: int
    app: web.Application | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serving(
    prompts: PromptMaker,
    settings: RelaySettings = DEFAULTS,
    limits: HttpLimits = LIMITS,
    models: Mapping[str, str | None] = DEFAULT_MODELS,
    router_settings: RouterSettings = ROUTER_SETTINGS,
    guard: Guard | None = None,
    queue: AdmissionSettings | None = None,
    audit: AuditLog | None = None,
    decode_policy: Policy | None = None,
    streams: Streams | None = None,
    defaults: GenerationDefaults = NO_DEFAULTS,
    stored: StoredResponses = NONE_STORED,
) -> AsyncIterator[Server]:
    """A router on a loopback port, set up as `python -m baton.router` does, without nodes. Without `queue` no request
    waits for room."""
    async with relaying(settings, decode_policy=decode_policy, models=models) as rig:
        metrics = RouterMetrics(models)
        metrics.watch(rig.relay, rig.registry, rig.control)
        admission = Admission(queue or AdmissionSettings(settings.max_concurrent_requests, 0, 0, 0.0), lambda: 10**6)
        metrics.include(AccessMetrics(admission, guard))
        endpoints = Endpoints(
            relay=rig.relay,
            admission=admission,
            served={
                name: ServedModel(name, prompts, fingerprint, 1_700_000_000, defaults=defaults)
                for name, fingerprint in models.items()
            },
            metrics=metrics,
            max_model_len=rig.registry.max_request_tokens,
            stored=stored,
        )
        app = build_app(endpoints, rig.registry, metrics, router_settings, limits, streams=streams)
        if guard is not None:
            guard.protect(app)
        if audit is not None:
            audit.watch(app)
        async with HttpServer(app, close_s=0.2) as http:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(("127.0.0.1", 0))
            host, port = await http.listen(socks=[listener])
            yield Server(rig, endpoints, metrics, http, host, port, app)
