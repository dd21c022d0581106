"""The health port: `/health` and `/metrics` of a node, served by threads of its own.

Invariant: no thread is started for a request. CPython waits without a deadline for a new thread to say that it runs, so
a node that had no memory for one would never answer again.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from baton.wire.errors import InvalidSetting

_REQUEST_TIMEOUT_S = 10
_NOTICES_CLOSE_S = 0.1
_NUM_THREADS, _MAX_WAITING = 8, 24


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


class _Server(HTTPServer):
    """Each connection has a thread, or waits for one; where too many wait it is closed at once."""

    # those that wait to be accepted: with the default of 5 a burst of connections waits for seconds, probes among them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], health: HealthServer) -> None:
        self.health = health
        self._waiting: queue.Queue[tuple[Any, Any] | None] = queue.Queue(_MAX_WAITING)
        super().__init__(address, _Handler)
        for _ in range(_NUM_THREADS):
            threading.Thread(target=self._serve, name="health", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            self._waiting.put_nowait((request, client_address))
        except queue.Full:
            self.shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for _ in range(_NUM_THREADS):
            with suppress(queue.Full):
                self._waiting.put_nowait(None)

    def _serve(self) -> None:
        while (taken := self._waiting.get()) is not None:
            with suppress(Exception):  # without memory it cannot even be told; others wait for this thread
                self._answer(*taken)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)


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
