"""`POST /admin/drain`: an operator takes a node out of service, or has it started anew, without an interrupted stream.

Owns who may ask for that: an API key whose entry says so, and on a router without keys whoever is on this machine. A
browser's script of another site cannot, because the content type of the body makes the browser ask first. What happens
to the requests of the node is `router.relay`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from aiohttp import web
from pydantic import Field

from router.access.guard import IDENTITY
from router.http.body import read_body
from router.nodes import NodeRegistry
from router.openai.errors import INVALID, envelope
from router.openai.request_body import parse_body
from router.openai.responses import json_bytes
from router.openai.strict_model import Strict
from router.relay import Relay
from wire.links import is_loopback

_MAX_NODE_ID = 128


class DrainRequest(Strict):
    """The body of `POST /admin/drain`. `restart`: whoever watches over the node starts it again."""

    refuses_unknown: ClassVar[bool] = True

    node: Annotated[str, Field(max_length=_MAX_NODE_ID)]
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Admin:
    """The handlers of one router."""

    relay: Relay
    nodes: NodeRegistry

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_post("/admin/drain", self.drain)

    async def drain(self, http: web.Request) -> web.Response:
        """`POST /admin/drain`: a node gets no more work, hands over what it generates, and ends."""
        _require_operator(http)
        order = parse_body(await read_body(http), http.headers.get("Content-Type"), DrainRequest)
        node = next((node for node in self.nodes.all() if node.node_id == order.node), None)
        if node is None:
            body = envelope("no node of that name is registered", INVALID, "node", "node_not_found")
            return web.Response(status=404, body=json_bytes(body), content_type="application/json")
        self.relay.drain(node, starts_again=order.restart)
        answer = {"node": node.node_id, "role": node.role, "num_requests": node.load}
        return web.Response(body=json_bytes(answer), content_type="application/json")


def _require_operator(http: web.Request) -> None:
    """Raise `HTTPForbidden` for whoever may not change the deployment."""
    identity = http.get(IDENTITY)
    if not (is_loopback(http.remote or "") if identity is None else identity.is_operator):
        raise web.HTTPForbidden
