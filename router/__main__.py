"""`python -m router`: the router from its command line.

The start reads settings, loads the tokenizer, opens the control socket and the HTTP port, and says "ready". On SIGTERM
the router refuses new requests, lets the running ones finish until a deadline, and closes everything. A second signal
ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
from aiohttp import web

from program.command_line import CommandParser
from program.events import Ready, emit
from program.process import configure_logging, freeze_startup_objects, report_errors, start_authenticator
from program.settings import add_flags, check_file_keys, resolve
from router.app import build_app
from router.control import ControlLink
from router.metrics import RouterMetrics
from router.nodes import NodeRegistry
from router.openai.endpoints import Endpoints
from router.openai.request_templates import RequestTemplates
from router.policies import make_policy
from router.relay import Relay, RelaySettings
from router.served_model import load_served_models
from router.settings import RouterSettings
from wire import links
from wire.errors import InvalidSetting, Overloaded

_KEEPALIVE_S = 75.0
_CLOSE_TIMEOUT_S = 2.0


async def serve(settings: RouterSettings) -> None:
    """Serve until told to stop. Raises `BatonError` when the router cannot start."""
    configure_logging(settings.log_level, settings.log_format)
    key = links.ClusterKey.from_file(Path(settings.cluster_key)) if settings.cluster_key else None
    templates = RequestTemplates() if settings.trust_request_chat_template else None
    models = load_served_models(
        settings.model, settings.served_model_name, settings.more_models, int(time.time()), templates
    )
    registry = NodeRegistry({model.name: model.fingerprint for model in models})
    async with contextlib.AsyncExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        authenticator = start_authenticator(context, key)
        if authenticator is not None:
            stack.callback(authenticator.stop)
        try:
            control = ControlLink(
                context,
                settings.control_host,
                settings.control_port,
                links.LinkSettings(cluster_key=key),
                registry,
                secrets.randbits(63),
            )
        except InvalidSetting as error:
            raise InvalidSetting(f"--control-host, --control-port: {error}") from None
        stack.push_async_callback(control.close)
        relay = _relay(settings, registry, control)
        metrics = RouterMetrics()
        metrics.watch(relay, registry)
        endpoints = Endpoints(
            relay=relay,
            served={model.name: model for model in models},
            metrics=metrics,
            max_model_len=registry.max_request_tokens,
            is_strict=settings.strict,
        )
        app = build_app(endpoints, registry, metrics, settings)
        address = await _listen(app, settings, stack)
        control.start(relay)
        freeze_startup_objects()
        emit(Ready("router", address, control.address))
        await _until_stopped(endpoints, relay, settings.shutdown_timeout_s)


def _relay(settings: RouterSettings, registry: NodeRegistry, control: ControlLink) -> Relay:
    limits = RelaySettings(
        settings.local_prefill_tokens,
        settings.max_concurrent_requests,
        settings.max_attempts,
        settings.request_timeout_s,
    )
    return Relay(registry, control, make_policy(settings.prefill_policy), make_policy(settings.decode_policy), limits)


async def _listen(app: web.Application, settings: RouterSettings, stack: contextlib.AsyncExitStack) -> str:
    # without handler_cancellation a client that leaves would keep its request running on the nodes
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, settings.host, settings.port)
    try:
        await site.start()
    except OSError as error:
        # asyncio wraps the system's message in its own; errors of name resolution have negative numbers and only a text
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise InvalidSetting(f"--port: cannot listen on {settings.host}:{settings.port}: {reason}") from None
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _until_stopped(endpoints: Endpoints, relay: Relay, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    stop_asked, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop_asked.is_set() else stop_asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await stop_asked.wait()
    endpoints.is_draining = True
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

    def run() -> None:
        if flags.config:
            check_file_keys(flags.config, RouterSettings)
        settings = resolve(RouterSettings, flags)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings))

    return report_errors(run)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
