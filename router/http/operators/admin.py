"""`POST /admin/drain`: an operator takes a node out of service, or has it started anew, without an interrupted stream.
`POST /admin/prefer`: a mixed node is given other legs from now on; those under way end where they are.

Owns who may ask for that: an API key whose entry says so, and on a router without keys whoever is on this machine. A
browser's script of another site cannot, because the content type of the body makes the browser ask first. What happens
to the requests of the node is `baton.router.requests.relay`'s.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from aiohttp import web
from pydantic import Field

from baton.router.http.access.guard import IDENTITY
from baton.router.http.openai.errors import INVALID, envelope
from baton.router.http.openai.replies import json_bytes
from baton.router.http.openai.request_body import read_request
from baton.router.http.openai.strict_model import Strict
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.relay import Relay
from baton.wire.links import is_loopback

_MAX_NODE_ID = 128
_NodeName = Annotated[str, Field(min_length=1, max_length=_MAX_NODE_ID)]
"""Not empty: that would be the group of all nodes that belong to none."""
_log = logging.getLogger(__name__)


class DrainRequest(Strict):
    """The body of `POST /admin/drain`. `node`: of a node or of a group. `restart`: whoever watches over the node starts
    it again."""

    refuses_unknown: ClassVar[bool] = True

    node: _NodeName
    restart: bool = False


class PreferRequest(Strict):
    """The body of `POST /admin/prefer`."""

    refuses_unknown: ClassVar[bool] = True

    node: _NodeName
    role: Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class Admin:
    """The handlers of one router."""

    relay: Relay
    nodes: NodeRegistry

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_post("/admin/drain", self.drain)
        app.router.add_post("/admin/prefer", self.prefer)

    async def drain(self, http: web.Request) -> web.Response:
        """`POST /admin/drain`: a node gets no more work, hands over what it generates, and ends; or each of a group."""
        _require_operator(http)
        order = await read_request(http, DrainRequest)
        nodes = self.nodes.named(order.node)
        if not nodes:
            return _not_found("no node of that name is registered", "node_not_found")
        for node in nodes:
            self.relay.drain(node, starts_again=order.restart)
        answer = {"node": order.node, "role": nodes[0].role, "num_requests": sum(node.load for node in nodes)}
        return web.Response(body=json_bytes(answer), content_type="application/json")

    async def prefer(self, http: web.Request) -> web.Response:
        """`POST /admin/prefer`: what a mixed node is given where there is a choice."""
        _require_operator(http)
        order = await read_request(http, PreferRequest)
        nodes = [node for node in self.nodes.named(order.node) if node.hello.prefers]
        if not nodes:
            return _not_found("no mixed node of that name is registered", "node_not_found")
        for node in nodes:
            self.nodes.prefer(node.epoch, order.role)
            _log.info("node %s prefers %s from now on: an operator said so", node.node_id, order.role)
        answer = {"node": order.node, "prefers": order.role}
        return web.Response(body=json_bytes(answer), content_type="application/json")


def _not_found(message: str, code: str) -> web.Response:
    body = envelope(message, INVALID, "node", code)
    return web.Response(status=404, body=json_bytes(body), content_type="application/json")


def _require_operator(http: web.Request) -> None:
    """Raise `HTTPForbidden` for whoever may not change the deployment."""
    identity = http.get(IDENTITY)
    if not (is_loopback(http.remote or "") if identity is None else identity.is_operator):
        raise web.HTTPForbidden
