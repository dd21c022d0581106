"""The health port: `/health` and `/metrics` of a node, served by a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from wire.errors import InvalidSetting
from wire.messages import NodeStatus

_REQUEST_TIMEOUT_S = 10


class NodeCollector(Collector):
    """Asks the engine and the leg for their figures when somebody scrapes."""

    def __init__(self, status: Callable[[], NodeStatus], extra: Callable[[], Iterable[Metric]]) -> None:
        self._status = status
        self._extra = extra

    def collect(self) -> Iterable[Metric]:
        """All metrics of this node."""
        status = self._status()
        yield GaugeMetricFamily("baton:num_requests_running", "Requests in the running batch", status.num_running)
        yield GaugeMetricFamily("baton:num_requests_waiting", "Requests waiting for a step", status.num_waiting)
        blocks = GaugeMetricFamily("baton:kv_blocks", "KV blocks by state; the sum is constant", labels=["state"])
        blocks.add_metric(["free"], status.num_free_blocks)
        blocks.add_metric(["cached"], status.num_cached_blocks)
        blocks.add_metric(["held"], status.num_held_blocks)
        yield blocks
        total = status.num_free_blocks + status.num_cached_blocks + status.num_held_blocks
        usage = status.num_held_blocks / total if total else 0.0
        yield GaugeMetricFamily("baton:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        yield from self._extra()


class HealthServer:
    """Listens on a port until closed. `is_ready` decides between 200 and 503 on `/health`."""

    def __init__(self, host: str, port: int, collector: NodeCollector, is_ready: Callable[[], bool]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(registry, is_ready))
        except OSError as error:
            raise InvalidSetting(f"--http-port: cannot listen on {host}:{port}: {error.strerror}") from None
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    started_s = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif self.path == "/health":
                ready = is_ready()
                body = {"status": "ok" if ready else "not registered", "uptime_s": time.monotonic() - started_s}
                self._answer(200 if ready else 503, "application/json", json.dumps(body).encode())
            else:
                self._answer(404, "application/json", b'{"error": {"message": "not found"}}')

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Health probes are not news."""

    return Handler
