"""Endpoints for operators and load balancers: whether the router lives, whether it can serve, and what it consists of.

`/live` and `/ping` say that the process answers. `/ready` says whether a request would find a decode node now.
`/server_info` shows nodes and settings; of settings that are free text only those named here, so that a new one with a
secret in it stays hidden. Endpoints of pooling models answer that there is none. Nothing here changes anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.errors import INVALID, envelope
from baton.router.http.openai.replies import json_bytes
from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.settings import RouterSettings
from baton.wire.codec import PROTOCOL_VERSION
from baton.wire.messages.membership import DECODE, PREFILL

DISTRIBUTION = "baton-serve"
POOLING_PATHS = (
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
)
_SHOWN_TEXTS = frozenset({"model", "host", "control_host", "served_model_name"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Operations:
    """The handlers of one router."""

    endpoints: Endpoints
    nodes: NodeRegistry
    settings: RouterSettings

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_get("/live", self.live)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/ping", self.ping)
        app.router.add_post("/ping", self.ping)
        app.router.add_get("/version", self.version)
        app.router.add_get("/server_info", self.server_info)
        for path in POOLING_PATHS:
            app.router.add_post(path, self.no_pooling)

    async def live(self, http: web.Request) -> web.Response:
        """`GET /live`: the process answers."""
        return _json({"status": "ok"})

    async def ready(self, http: web.Request) -> web.Response:
        """`GET /ready`: 200 when a request would be taken, else 503 with the reason."""
        reason = ""
        if self.endpoints.is_draining:
            reason = "the router is shutting down"
        elif not any(node.role == DECODE and not node.is_leaving for node in self.nodes.all()):
            reason = "no decode node is registered"
        if reason:
            return _json({"status": "not ready", "reason": reason}, 503)
        return _json({"status": "ok"})

    async def ping(self, http: web.Request) -> web.Response:
        """`GET` or `POST /ping`, as SageMaker asks: 200 and an empty body."""
        return web.Response()

    async def version(self, http: web.Request) -> web.Response:
        """`GET /version`."""
        return _json({"version": installed_version()})

    async def server_info(self, http: web.Request) -> web.Response:
        """`GET /server_info`."""
        return _json(
            {
                "version": installed_version(),
                "protocol_version": PROTOCOL_VERSION,
                "settings": shown_settings(self.settings),
                "num_requests_running": self.endpoints.relay.num_in_flight,
                "nodes": [node_info(node) for node in self.nodes.all()],
            }
        )

    async def no_pooling(self, http: web.Request) -> web.Response:
        """`POST` to an endpoint of pooling models."""
        message = "no pooling model is served here: this router serves text generation only"
        return _json(envelope(message, INVALID, None, "no_pooling_model"), 404)


def installed_version() -> str:
    """The version of the installed distribution, "unknown" for a source tree that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def shown_settings(settings: object) -> dict[str, object]:
    """The fields of a settings dataclass that anyone may see: numbers, switches, choices, and few texts by name."""
    if not dataclasses.is_dataclass(settings):
        raise TypeError("settings are dataclasses")
    values = {field: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {
        field.name: value
        for field, value in values.items()
        if isinstance(value, int | float) or field.metadata.get("choices") or field.name in _SHOWN_TEXTS
    }


def node_info(node: Node) -> dict[str, object]:
    """What the router knows of a node, as `/server_info` and the page show it. `life` differs after each start."""
    hello, status = node.hello, node.status
    return {
        "id": node.node_id,
        "group": hello.group,
        "life": hashlib.blake2b(node.epoch.to_bytes(8, "little"), digest_size=8).hexdigest(),
        "role": node.role,
        "prefers": [role for role in (PREFILL, DECODE) if node.prefers(role)],
        "model": node.model,
        "is_leaving": node.is_leaving,
        "is_ejected": node.is_ejected,
        "load": node.load,
        "num_requests_of_other_routers": node.num_other_legs,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "num_blocks": hello.num_blocks,
        "num_free_blocks": status.num_free_blocks,
        "num_cached_blocks": status.num_cached_blocks,
        "num_held_blocks": status.num_held_blocks,
        "num_leased_blocks": status.num_leased_blocks,
        "num_drafts": sum(each.num_drafts for each in status.drafts),
        "num_draft_tokens": sum(sum(each.tokens_by_position) for each in status.drafts),
        "num_accepted_draft_tokens": sum(sum(each.accepted_by_position) for each in status.drafts),
        "kv_tiers": {each.tier: round(each.usage, 3) for each in status.tiers},
        "max_request_tokens": hello.max_request_tokens,
        "max_num_seqs": hello.max_num_seqs,
        "fingerprint": hello.fingerprint,
    }


def _json(payload: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, body=json_bytes(payload), content_type="application/json")
