"""The health port: `/health` and `/metrics` of a node, served by a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from baton.wire.errors import InvalidSetting

_REQUEST_TIMEOUT_S = 10
_NOTICES_CLOSE_S = 0.1
_MAX_CONNECTIONS = 32


class HealthServer:
    """Listens on a port until closed. `/health` answers 200 while `is_ready`, which its owner sets, and 503 before and
    as long as there is a `complaint`.

    Raises `InvalidSetting` when it cannot listen there.
    """

    def __init__(self, host: str, port: int, collector: Collector, complaint: Callable[[], str] = str) -> None:
        self._complaint = complaint
        self.is_ready = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._started_s = time.monotonic()
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise InvalidSetting(f"--http-port: cannot listen on {host}:{port}: {error.strerror}") from None
        self.address = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_NOTICES_CLOSE_S,), name="health", daemon=True
        )
        self._thread.start()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body) of a GET."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/health":
            complaint = self._complaint() or ("" if self.is_ready else "not registered")
            body = {"status": complaint or "ok", "uptime_s": time.monotonic() - self._started_s}
            return 200 if not complaint else 503, "application/json", json.dumps(body).encode()
        return 404, "application/json", b'{"error": {"message": "not found"}}'

    def watch(self, collector: Collector) -> None:
        """Show the metrics of `collector`, too."""
        self._registry.register(collector)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, for at most `_MAX_CONNECTIONS`; more are closed at once."""

    daemon_threads = True
    # those that wait to be accepted: with the default of 5 a burst of connections waits for seconds, probes among them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], health: HealthServer) -> None:
        self.health = health
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        status, content_type, body = self.server.health.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: health probes are too frequent."""
