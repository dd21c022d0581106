"""Helper: an OpenAI-compatible endpoint that answers as the last message asks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
GIVE_UP_S = 60.0


class FakeEndpoint(ThreadingHTTPServer):
    """Collects request bodies, authorization headers and the ids of last events; `client_left` is set when a client
    closes a running stream."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.last_ids: list[str | None] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_GET(self) -> None:
        self.server.authorizations.append(self.headers["Authorization"])
        self._send_json(200, MODELS)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        wish, last_id = body["messages"][-1]["content"], self.headers["Last-Event-ID"]
        self.server.last_ids.append(last_id)
        if wish == "refuse":
            message = "temperature must be at most 2"
            self._send_json(400, {"error": {"message": message, "param": "temperature", "code": "invalid_value"}})
            return
        if last_id and wish in ("forgotten", "down"):
            self._send_json(404 if wish == "forgotten" else 503, {"error": {"message": f"it is {wish}"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if wish in ("resume", "forgotten", "down"):
            self._send_numbered(["You ", "said ", f"{wish}."], int(last_id.split(".")[1]) if last_id else 0)
            return
        self._send_chunk({"role": "assistant", "content": ""})
        if wish == "think":
            self._send_chunk({"reasoning_content": "Let me see"})
            self._send_chunk({"reasoning": "."})
        self._send_chunk({"content": "You said "})
        if wish == "hang":
            self._wait_for_the_client_to_leave()
        elif wish == "fail":
            self._send_data(json.dumps({"error": {"message": "both nodes died", "code": "request_failed"}}))
        elif wish != "break":
            self._send_chunk({"content": f"{wish}."})
            self._send_chunk({}, "length" if wish == "long" else "stop")
            self._send_data(json.dumps({"choices": [], "usage": {"completion_tokens": 7}}))
            self._send_data("[DONE]")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send_numbered(self, texts: list[str], num_received: int) -> None:
        """One event with an id, and half of the next; the end behind the last."""
        for number in range(num_received + 1, len(texts) + 1):
            self.wfile.write(f"id: s.{number}\n".encode())
            self._send_chunk({"content": texts[number - 1]})
            if number < len(texts):
                self.wfile.write(f"id: s.{number + 1}\ndata: {{".encode())
                return
        self._send_data("[DONE]")

    def _wait_for_the_client_to_leave(self) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            try:
                self.wfile.write(b": still computing\n\n")
            except OSError:
                self.server.client_left.set()
                return
            time.sleep(0.02)

    def _send_chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> None:
        self._send_data(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}))

    def _send_data(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _send_json(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[FakeEndpoint]:
    """A running endpoint."""
    with FakeEndpoint() as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield endpoint
        endpoint.shutdown()
        thread.join()
