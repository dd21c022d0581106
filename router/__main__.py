"""`python -m baton.router`: the router from its command line.

The start reads settings, loads the tokenizer, opens the control socket and the HTTP port, and says "ready". On SIGTERM
the router refuses new requests, lets the running ones finish until a deadline, and closes everything. A second signal
ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from aiohttp import web

from baton.engine.text.answers.formats import ParserNames
from baton.router.app import build_app
from baton.router.health.metrics import RouterMetrics
from baton.router.health.tracing import open_tracing
from baton.router.http.access.audit import AuditLog
from baton.router.http.access.guard import Guard, require_keys_beyond_loopback
from baton.router.http.access.keys import KEY_VARIABLE
from baton.router.http.access.tls import ServerTls
from baton.router.http.admission.admission import Admission, AdmissionSettings
from baton.router.http.admission.metrics import AccessMetrics
from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.request_templates import RequestTemplates
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.request_log import Observer
from baton.router.http.resume.logs import Folder, Memory
from baton.router.http.resume.streams import Streams
from baton.router.http.served_model import ModelOptions, ServedModel, load_served_models
from baton.router.http.serving.inherited import inherited_sockets
from baton.router.http.serving.limits import HttpLimits
from baton.router.http.serving.server import HttpServer
from baton.router.http.stored.database import Database
from baton.router.http.stored.store import ResponseStore
from baton.router.lives import Lives
from baton.router.nodes.control import ControlLink, ControlPort
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.relay import Relay, RelaySettings
from baton.router.routing.adaptation import Adaptation
from baton.router.routing.goals import AllowedGoals, Goals
from baton.router.routing.policies import make_policy
from baton.router.settings import RouterSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.events import Ready, emit
from baton.runtime.exit_status import report_errors
from baton.runtime.process import (
    configure_logging,
    freeze_startup_objects,
    give_back_freed_memory,
    start_authenticator,
)
from baton.runtime.settings import add_flags, check_file_keys, resolve
from baton.runtime.threads import StartedThreads
from baton.runtime.watchdog import Watchdog
from baton.wire import links
from baton.wire.errors import InvalidSetting, Overloaded
from baton.wire.keys import ROUTER, KeyRing
from baton.wire.messages.membership import PREFILL

_CLOSE_TIMEOUT_S = 2.0
_DAY_S = 86_400.0
_LOOP_LIMIT_S = 60.0
"""An event loop that stands for so long ends the router: its clients get nothing, and a new one starts in a second."""
# a look through all objects found nothing and took 0.3 s with 5,000 connections: it comes ten times as rarely as usual
_COLLECT_AFTER = (700, 10, 100)


def _load(settings: RouterSettings) -> list[ServedModel]:
    """What of a start takes long and is the same in every life. Raises `BatonError`."""
    configure_logging(settings.log_level, settings.log_format)
    options = ModelOptions(
        RequestTemplates() if settings.trust_request_chat_template else None,
        ParserNames(settings.tool_call_parser, settings.reasoning_parser),
        settings.generation_config,
        settings.model_impl,
        settings.limit_mm_per_prompt,
    )
    started = int(time.time())
    return load_served_models(settings.model, settings.served_model_name, settings.more_models, started, options)


async def serve(settings: RouterSettings, models: Sequence[ServedModel]) -> None:
    """Serve until told to stop. Raises `BatonError` when the router cannot start."""
    keys = KeyRing(Path(settings.cluster_key), ROUTER) if settings.cluster_key else None
    sockets = inherited_sockets(settings.listen_fds, "--listen-fds")
    hosts = [str(each.getsockname()[0]) for each in sockets] or [settings.host]
    guard = _guard(settings, hosts, keys)
    registry = NodeRegistry(
        {model.name: model.fingerprint for model in models}, {model.name: model.tokenizer_digest for model in models}
    )
    async with contextlib.AsyncExitStack() as stack:
        for model in models:
            stack.callback(model.prompts.close)
            model.prompts.start()
        asyncio.get_running_loop().set_default_executor(_started_threads())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        authenticator = start_authenticator(context, keys)
        if authenticator is not None:
            stack.callback(authenticator.stop)
        try:
            control = ControlLink(context, _control_port(settings, keys), registry)
        except InvalidSetting as error:
            raise InvalidSetting(f"--control-host, --control-port: {error}") from None
        stack.push_async_callback(control.close)
        relay = _relay(settings, registry, control)
        metrics = RouterMetrics(model.name for model in models)
        metrics.watch(relay, registry, control)
        adaptation = Adaptation(registry, relay.attainments, adapts=settings.adapt and _goals(settings) is not None)
        metrics.include(adaptation)
        stack.callback(adaptation.stop)
        admission = _admission(settings, relay)
        relay.node_wait.listen(admission.fill)
        metrics.include(AccessMetrics(admission, guard))
        endpoints = Endpoints(
            relay=relay,
            admission=admission,
            served={model.name: model for model in models},
            metrics=metrics,
            max_model_len=registry.max_request_tokens,
            is_strict=settings.strict,
            goals=_allowed_goals(settings),
        )
        if settings.metrics_aliases == "vllm":
            metrics.add_vllm_aliases()
        observers: list[Observer] = []
        if settings.otlp_traces_endpoint:
            tracing = open_tracing(settings.otlp_traces_endpoint)
            stack.callback(tracing.close)
            observers.append(tracing.observe)
        store = _response_store(settings)
        if store is not None:
            stack.push_async_callback(store.close)
            store.start()
            metrics.include(store)
            endpoints.stored = StoredResponses(store)
        streams = _streams(settings)
        if streams is not None:
            stack.callback(streams.close)
            metrics.include(streams)
        app = build_app(endpoints, registry, metrics, settings, _http_limits(settings), observers, streams)
        tls = _tls(settings)
        audit = AuditLog(settings.audit_log) if settings.audit_log else None
        if guard is not None:
            guard.protect(app)
        if audit is not None:
            stack.callback(audit.close)
            audit.watch(app)
        _on_hangup([part.reload for part in (guard, tls, audit, keys) if part is not None])
        address = await _listen(app, settings, sockets, stack, tls)
        control.start(relay)
        adaptation.start()
        freeze_startup_objects()
        gc.set_threshold(*_COLLECT_AFTER)
        watchdog = Watchdog()
        metrics.include(watchdog)
        watchdog.start(_LOOP_LIMIT_S)
        stack.callback(watchdog.close)
        metrics.loop_lag.start(watchdog.beat("event loop", _LOOP_LIMIT_S))
        stack.callback(metrics.loop_lag.stop)
        emit(Ready("router", address, control.address))
        await _until_stopped(endpoints, relay, settings.shutdown_timeout_s)


def _started_threads() -> StartedThreads:
    """What `asyncio.to_thread` uses."""
    threads = StartedThreads(None, "aside")
    threads.start()
    return threads


def _relay(settings: RouterSettings, registry: NodeRegistry, control: ControlLink) -> Relay:
    limits = RelaySettings(
        settings.local_prefill_tokens,
        settings.max_concurrent_requests,
        settings.max_attempts,
        settings.request_timeout_s,
        settings.node_wait_s,
        _goals(settings),
        settings.refuse_late,
    )
    return Relay(registry, control, make_policy(settings.prefill_policy), make_policy(settings.decode_policy), limits)


def _goals(settings: RouterSettings) -> Goals | None:
    if not (settings.goal_ttft_ms or settings.goal_tpot_ms):
        return None
    return Goals(settings.goal_ttft_ms / 1000, settings.goal_tpot_ms / 1000)


def _allowed_goals(settings: RouterSettings) -> AllowedGoals | None:
    """What requests may ask for. Raises `InvalidSetting`."""
    own, least = _goals(settings), {}
    for kind in ("ttft", "tpot"):
        goal, smallest = getattr(settings, f"goal_{kind}_ms"), getattr(settings, f"min_goal_{kind}_ms")
        if smallest > goal:
            raise InvalidSetting(f"--min-goal-{kind}-ms must not be above --goal-{kind}-ms")
        least[kind] = (smallest or goal) / 1000
    return None if own is None else AllowedGoals(own, Goals(least["ttft"], least["tpot"]))


def _http_limits(settings: RouterSettings) -> HttpLimits:
    return HttpLimits(
        max_body_bytes=settings.max_body_bytes,
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )


def _control_port(settings: RouterSettings, keys: KeyRing | None) -> ControlPort:
    """Where nodes dial. Raises `InvalidSetting`."""
    host, fd = settings.control_host, -1
    if settings.control_fd >= 0:
        (inherited,) = inherited_sockets([settings.control_fd], "--control-fd")
        host, fd = str(inherited.getsockname()[0]), inherited.detach()
    link = links.LinkSettings(cluster_key=keys.towards(PREFILL) if keys else None)
    return ControlPort(host, settings.control_port, link, fd, keys.is_of if keys and keys.tells_roles else None)


def _guard(settings: RouterSettings, hosts: Sequence[str], keys: KeyRing | None) -> Guard | None:
    """The guard of the HTTP endpoint at `hosts`, None without API keys. Raises `InvalidSetting` when keys are missing
    or bad."""
    api_key = os.environ.get(KEY_VARIABLE, "")
    has_keys = bool(settings.api_key_file or api_key)
    for host in hosts:
        require_keys_beyond_loopback(host, has_keys, settings.allow_unauthenticated)
    if not has_keys:
        return None
    # with a cluster key nodes find what they have cached again when the router restarts
    secret = secrets.token_bytes(32) if keys is None else hmac.digest(keys.secret, b"cache", "sha256")
    return Guard(Path(settings.api_key_file) if settings.api_key_file else None, api_key, secret)


def _streams(settings: RouterSettings) -> Streams | None:
    """The streams that can be resumed, None when none can. Raises `InvalidSetting`."""
    if settings.resumable_streams_s <= 0:
        return None
    place = Folder(Path(settings.journal_dir)) if settings.journal_dir else Memory()
    return Streams(place, settings.resumable_streams_s)


def _response_store(settings: RouterSettings) -> ResponseStore | None:
    """The store of responses, None when there is none. Raises `InvalidSetting`."""
    if not settings.responses_store_bytes:
        if settings.responses_store:
            raise InvalidSetting("--responses-store is of no use with --responses-store-bytes 0")
        return None
    folder = Path(settings.responses_store) if settings.responses_store else None
    keep_s = settings.responses_store_days * _DAY_S
    return ResponseStore(Database(folder, settings.responses_store_bytes, keep_s))


def _tls(settings: RouterSettings) -> ServerTls | None:
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise InvalidSetting("--ssl-keyfile is of no use without --ssl-certfile")
    return ServerTls(settings.ssl_certfile, settings.ssl_keyfile) if settings.ssl_certfile else None


def _on_hangup(reloads: Sequence[Callable[[], None]]) -> None:
    """Call all `reloads` on SIGHUP. Without any, SIGHUP ends the router as it ends other programs."""

    def on_signal() -> None:
        for reload in reloads:
            reload()

    if reloads:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_signal)


def _admission(settings: RouterSettings, relay: Relay) -> Admission:
    limits = AdmissionSettings(
        settings.max_concurrent_requests,
        settings.max_queued_requests,
        settings.max_queued_tokens,
        settings.max_queue_s,
    )
    return Admission(limits, lambda: relay.capacity)


async def _listen(
    app: web.Application,
    settings: RouterSettings,
    sockets: Sequence[socket.socket],
    stack: contextlib.AsyncExitStack,
    tls: ServerTls | None,
) -> str:
    server = await stack.enter_async_context(HttpServer(app, _CLOSE_TIMEOUT_S))
    context = None if tls is None else tls.context
    try:
        host, port = await server.listen(settings.host, settings.port, sockets, ssl_context=context)
    except OSError as error:
        # asyncio wraps the system's message in its own; errors of name resolution have negative numbers and only a text
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        where = f"{settings.host}:{settings.port}"
        raise InvalidSetting(f"cannot listen on {where}: {reason}; choose another port with --port") from None
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _until_stopped(endpoints: Endpoints, relay: Relay, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    stop_asked, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop_asked.is_set() else stop_asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await stop_asked.wait()
    endpoints.is_draining = True
    endpoints.admission.close()
    relay.stop_waiting()
    deadline_s = time.monotonic() + timeout_s
    while relay.num_in_flight and not stop_now.is_set() and time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop_now.wait(), 0.05)
    relay.fail_all(Overloaded("the router is shutting down", retry_after_s=5))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until it is told to stop; the exit status."""
    parser = CommandParser(prog="baton router", description="Run the router. It loads no weights of the model.")
    add_flags(parser, RouterSettings)
    flags = parser.parse(argv)

    def run() -> int:
        give_back_freed_memory()
        if flags.config:
            check_file_keys(flags.config, RouterSettings)
        settings = resolve(RouterSettings, flags)
        models = _load(settings)
        # only who has sockets to hand on can die and be followed by another
        return Lives(lambda: _live(settings, models)).run() if settings.listen_fds else _live(settings, models)

    return report_errors(run)


def _live(settings: RouterSettings, models: Sequence[ServedModel]) -> int:
    def run() -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, models))

    return report_errors(run)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
