"""A small client of a router: model names, streamed chat completions, and what operators ask for.

Owns one connection per call, the decoding of server-sent events, and that a stream whose events have ids goes on when
its connection breaks. Does not know the terminal. Invariants: every failure is a `BatonError` whose message is for a
person; no line of a response is read without a limit; closing a stream early closes its connection, which cancels the
request.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from baton.wire.errors import InvalidSetting, RequestFailed

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""Longest wait for the next bytes: a long prompt on a slow machine computes for minutes."""
RESUME_S, RESUME_PAUSE_S = 30.0, 0.2
"""For how long after its last event a broken stream is asked for again, and how long to wait in between."""
MAX_BODY_BYTES = 1 << 20
DATA_PREFIX, ID_PREFIX = b"data:", b"id:"
END_OF_STREAM = b"[DONE]"


class _BrokeOff(RequestFailed):
    """The connection broke, or the endpoint cannot serve now: the same request may go well a moment later."""


class ApiClient:
    """Talks to the endpoint at `url` ("http://host:port", with or without "/v1"), and waits for its next bytes for
    `silence_s`. Raises `InvalidSetting` for another URL."""

    def __init__(self, url: str, api_key: str = "", silence_s: float = SILENCE_TIMEOUT_S) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise InvalidSetting(f"--url {url!r:.100} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSetting(f"--url {url!r:.100} is not of the form http://HOST:PORT")
        self._url = url
        self._silence_s = silence_s
        self._is_encrypted = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the served models, at least one. Raises `RequestFailed`."""
        with self._request("GET", "/models") as response:
            content = _decode_json(response.read(MAX_BODY_BYTES))
        match content:
            case {"data": [{"id": str()}, *_] as models}:
                return [str(model["id"]) for model in models]
            case _:
                raise RequestFailed(f"{self._url} lists no model")

    def nodes(self) -> list[dict[str, Any]]:
        """The router's view of its nodes, as in `/server_info`. Raises `RequestFailed`."""
        with self._request("GET", "/server_info", root="") as response:
            content = _decode_json(response.read(MAX_BODY_BYTES))
        match content:
            case {"nodes": list() as nodes} if all(isinstance(node, dict) for node in nodes):
                return nodes
            case _:
                raise RequestFailed(f"{self._url} does not list its nodes")

    def metrics(self) -> str:
        """The text of `/metrics`. Raises `RequestFailed`."""
        with self._request("GET", "/metrics", root="") as response:
            return response.read(MAX_BODY_BYTES).decode(errors="replace")

    def drain(self, node: str, *, restart: bool) -> int:
        """Drain a node. Returns how many requests it had. Raises `RequestFailed`."""
        body = json.dumps({"node": node, "restart": restart}).encode()
        with self._request("POST", "/admin/drain", body, root="") as response:
            content = _decode_json(response.read(MAX_BODY_BYTES))
        return int(content.get("num_requests", 0))

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Chunks of one streamed chat completion. One that breaks off is resumed behind its last event, if that had an
        id. Raises `RequestFailed`, also for a stream that ends early."""
        request, last_id, last_s = json.dumps({**body, "stream": True}).encode(), "", 0.0
        while True:
            try:
                with closing(self._chat_events(request, last_id)) as events:
                    for event_id, chunk in events:
                        last_id, last_s = event_id, time.monotonic()
                        yield chunk
            except _BrokeOff:
                if not last_id or time.monotonic() - last_s > RESUME_S:
                    raise
                time.sleep(RESUME_PAUSE_S)
            else:
                return

    def _chat_events(self, request: bytes, last_id: str) -> Generator[tuple[str, dict[str, Any]]]:
        """(id, chunk) of each event behind that of `last_id`."""
        event_id, headers = "", {"Last-Event-ID": last_id} if last_id else {}
        with self._request("POST", "/chat/completions", request, headers=headers) as response:
            while (line := response.readline(MAX_BODY_BYTES)).endswith(b"\n"):
                if line.startswith(ID_PREFIX):
                    event_id = line.removeprefix(ID_PREFIX).strip().decode(errors="replace")
                if not line.startswith(DATA_PREFIX):
                    continue  # blank lines end an event, a leading colon is a comment
                data = line.removeprefix(DATA_PREFIX).strip()
                if data == END_OF_STREAM:
                    return
                chunk = _decode_json(data)
                if "error" in chunk:
                    raise RequestFailed(describe_error(chunk))
                yield event_id, chunk
        raise _BrokeOff("the stream ended before the answer was complete")

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        root: str = "/v1",
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection_class = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = connection_class(self._host, self._port, timeout=min(CONNECT_TIMEOUT_S, self._silence_s))
        try:
            connection.connect()
            connection.sock.settimeout(self._silence_s)
            connection.request(method, self._root + root + path, body, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status != http.client.OK:
                error = _decode_json(response.read(MAX_BODY_BYTES))
                failed = _BrokeOff if response.status >= http.client.INTERNAL_SERVER_ERROR else RequestFailed
                raise failed(f"{describe_error(error)} (HTTP {response.status})")
            yield response
        except ConnectionRefusedError:
            raise _BrokeOff(f"nothing listens at {self._url}: is `baton serve` running?") from None
        except (OSError, http.client.HTTPException) as error:
            raise _BrokeOff(f"{self._url}: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()


def describe_error(content: Mapping[str, Any]) -> str:
    """The sentence in an OpenAI error envelope, with the field it is about."""
    match content:
        case {"error": {"message": str(message), "param": str(param)}} if param not in message:
            return f"{message} [{param}]"
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return message
        case _:
            return "the endpoint refused the request without a reason"


def _decode_json(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def chat_body(
    model: str, messages: Sequence[Mapping[str, str]], max_tokens: int | None, temperature: float | None
) -> dict[str, Any]:
    """The request body; what is None is left to the endpoint's default."""
    optional = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"model": model, "messages": list(messages), **given}
