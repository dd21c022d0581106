"""The aiohttp application: routes, error envelope, request ids.

Owns what all endpoints share. Every error, also one that aiohttp raises by itself, is answered as JSON in the envelope
of its interface, and every answer carries `x-request-id`: the client's own if it sent a sane one. An internal bug is
answered with status 500 and without details.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton.router.health.metrics import RouterMetrics
from baton.router.http.anthropic.errors import is_of_messages, messages_error
from baton.router.http.cors import CorsPolicy
from baton.router.http.docs.serving import add_docs
from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.errors import error_body, http_layer_body, retry_after, status_of
from baton.router.http.openai.replies import json_bytes
from baton.router.http.openai.stored_conversations import StoredConversations
from baton.router.http.openai.tokenizing import Tokenizing
from baton.router.http.operators.admin import Admin
from baton.router.http.operators.debug_endpoints import DebugEndpoints
from baton.router.http.operators.operations import Operations
from baton.router.http.page.last_ends import LastEnds
from baton.router.http.page.relay_view import RelayView
from baton.router.http.page.serving import Page
from baton.router.http.request_log import (
    DEFAULT_NUM_KEPT,
    REQUEST_ID,
    Observer,
    RequestLog,
    choose_request_id,
    log_request,
)
from baton.router.http.resume.requests import add_resuming
from baton.router.http.resume.streams import Streams
from baton.router.http.serving.bodies import BODIES, Bodies
from baton.router.http.serving.limits import HTTP_LIMITS, HttpLimits
from baton.router.http.trailing_slashes import serve_trailing_slashes
from baton.router.nodes.registry import NodeRegistry
from baton.router.settings import RouterSettings
from baton.wire.errors import BatonError
from baton.wire.messages.membership import DECODE, PREFILL

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    endpoints: Endpoints,
    nodes: NodeRegistry,
    metrics: RouterMetrics,
    settings: RouterSettings,
    limits: HttpLimits,
    observers: Sequence[Observer] = (),
    streams: Streams | None = None,
) -> web.Application:
    """The application of one router; `observers` are told of ended requests. `streams`: those that can be resumed.

    Raises `InvalidSetting` when the settings of cross-origin requests do not fit.
    """
    ends = LastEnds()
    of_page = [] if settings.no_page else [ends.note]
    of_log = [log_request] if settings.enable_log_requests else []
    requests = RequestLog(DEFAULT_NUM_KEPT if settings.enable_debug_endpoints else 0, [*observers, *of_page, *of_log])
    app = web.Application(middlewares=[_envelope, requests.middleware()], client_max_size=limits.max_body_bytes)
    app[HTTP_LIMITS] = limits
    bodies = app[BODIES] = Bodies(limits)
    app.on_cleanup.append(_closing(bodies))
    app.on_response_prepare.append(_add_request_id)

    async def health(http: web.Request) -> web.Response:
        counts = {
            model: {role: len(nodes.available(role, model)) for role in (PREFILL, DECODE)} for model in endpoints.served
        }
        is_ready = any(of_model[DECODE] for of_model in counts.values()) and not endpoints.is_draining
        total = {role: sum(of_model[role] for of_model in counts.values()) for role in (PREFILL, DECODE)}
        body = {"status": "ok" if is_ready else "not ready", "nodes": total, "models": counts}
        return web.Response(status=200 if is_ready else 503, body=json_bytes(body), content_type="application/json")

    async def render_metrics(http: web.Request) -> web.Response:
        return web.Response(body=await metrics.render_aside(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_post("/v1/chat/completions", endpoints.chat)
    app.router.add_post("/v1/completions", endpoints.completions)
    app.router.add_post("/v1/responses", endpoints.responses)
    app.router.add_post("/v1/messages", endpoints.messages)
    app.router.add_post("/v1/messages/count_tokens", endpoints.count_tokens)
    app.router.add_get("/v1/models", endpoints.models)
    app.router.add_get("/v1/models/{name:.+}", endpoints.model)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", render_metrics)
    Operations(endpoints, nodes, settings).add_routes(app)
    Admin(endpoints.relay, nodes).add_routes(app)
    Tokenizing(endpoints).add_routes(app)
    endpoints.stored.add_routes(app)
    StoredConversations(endpoints.stored.store).add_routes(app)
    if streams is not None:
        add_resuming(app, streams)
    if settings.enable_debug_endpoints:
        DebugEndpoints(requests).add_routes(app)
    if not settings.no_page:
        Page(RelayView(endpoints, nodes, requests, metrics, ends)).add_routes(app)
    add_docs(app, settings.root_path)
    serve_trailing_slashes(app)
    CorsPolicy(
        settings.allowed_origins, settings.allowed_methods, settings.allowed_headers, settings.allow_credentials
    ).install(app)
    return app


def _closing(bodies: Bodies) -> Callable[[web.Application], Awaitable[None]]:
    async def close(_: web.Application) -> None:
        bodies.close()

    return close


@web.middleware
async def _envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    request_id = choose_request_id(request)
    request[REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except BatonError as error:
        response = _error_response(request, error)
    except web.HTTPException as error:
        response = _failed(request, error.status, http_layer_body(error.status))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except ConnectionError:
        raise  # the client is gone, or a stream was broken off on purpose
    except Exception as error:  # the outer edge of one request: the others go on
        _log.exception("request %s failed", request_id)
        response = _error_response(request, error)
    if not response.prepared:
        response.headers["x-request-id"] = request_id
    return response


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the id here, because a stream sends its headers before the middleware sees the response."""
    if REQUEST_ID in request:
        response.headers.setdefault("x-request-id", request[REQUEST_ID])
        if is_of_messages(request):
            response.headers.setdefault("request-id", request[REQUEST_ID])


def _error_response(request: web.Request, error: Exception) -> web.Response:
    response = _failed(request, status_of(error), error_body(error))
    seconds = retry_after(error)
    if seconds is not None:
        response.headers["Retry-After"] = seconds
    return response


def _failed(request: web.Request, status: int, body: dict[str, Any]) -> web.Response:
    told = messages_error(status, body, request[REQUEST_ID]) if is_of_messages(request) else body
    return web.Response(status=status, body=json_bytes(told), content_type="application/json")
