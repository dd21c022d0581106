"""Helper: HTTP by hand, so that a test sees every byte and decides when a connection breaks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.router.rig import MODEL, Server

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. Header names are lower case; `is_whole` is False when a chunked body has no last chunk.

    `pieces` are the chunks of a chunked body: the writes of the server.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True
    pieces: tuple[bytes, ...] = ()

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The content of the error envelope, whose shape is checked."""
        assert self.headers["content-type"].startswith("application/json")
        envelope = self.json()
        assert list(envelope) == ["error"]
        error: dict[str, Any] = envelope["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert len(self.headers["x-request-id"]) == 32
        return error

    @property
    def events(self) -> list[str]:
        """The data of the server-sent events."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        return [part.removeprefix("data: ") for part in parts]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream that ended well, without the closing [DONE]."""
        *events, last = self.events
        assert (self.status, self.is_whole, last) == (200, True, "[DONE]")
        return [json.loads(event) for event in events]


@dataclass(slots=True)
class Connection:
    """One connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, marker: bytes, num_times: int = 1, within_s: float = PATIENCE_S) -> bytes:
        """Read until `marker` has come so often; all that was read so far."""
        async with asyncio.timeout(within_s):
            while self.received.count(marker) < num_times:
                data = await self.reader.read(65536)
                assert data, f"the connection ended after {bytes(self.received[-500:])!r}"
                self.received += data
        return bytes(self.received)

    async def to_end(self, within_s: float = PATIENCE_S) -> bytes:
        """Read until the server hangs up; all that was read."""
        async with asyncio.timeout(within_s):
            while data := await self.reader.read(65536):
                self.received += data
        return bytes(self.received)

    def pause(self) -> None:
        """Leave in the system's buffer what comes from now on."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """End a `pause`."""
        self._transport.resume_reading()

    @property
    def _transport(self) -> asyncio.Transport:
        assert isinstance(self.writer.transport, asyncio.Transport)
        return self.writer.transport

    def break_off(self) -> None:
        """Hang up without reading the rest."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(
    server: Server, buffer_bytes: int | None = None, source: str | None = None
) -> AsyncIterator[Connection]:
    """A connection that is closed at the end. `buffer_bytes` is what the system may receive ahead of the reader;
    `source`: the address it comes from."""
    client = socket.socket()
    if source is not None:
        client.bind((source, 0))
    if buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (server.host, server.port))
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, is_last: bool = True
) -> bytes:
    """A request. JSON is its content type unless `headers` says otherwise; an empty value leaves the header out."""
    lines = {"host": "test", "content-type": "application/json", "content-length": str(len(body))}
    lines |= {"connection": "close"} if is_last else {}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def fetch(
    server: Server, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Reply:
    """One request on a connection of its own."""
    async with connected(server) as connection:
        await connection.send(request_bytes(method, path, body, headers))
        return parse_reply(await connection.to_end())


def parse_reply(raw: bytes) -> Reply:
    """What a server sent on one connection, for one request."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    status = int(status_line.split()[1])
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, headers, body, len(body) == int(headers.get("content-length", len(body))))
    pieces: list[bytes] = []
    is_whole = False
    while body and not is_whole:
        size, _, rest = body.partition(b"\r\n")
        is_whole = int(size, 16) == 0
        if not is_whole:
            pieces.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return Reply(status, headers, b"".join(pieces), is_whole, tuple(pieces))


def chat_body(**members: Any) -> dict[str, Any]:
    """A good chat request, changed by `members`."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Where does the river go?"}]} | members


def completion_body(**members: Any) -> dict[str, Any]:
    """A good completions request, changed by `members`."""
    return {"model": MODEL, "prompt": "The quick brown fox jumps over"} | members


async def post_chat(server: Server, **members: Any) -> Reply:
    """Ask for a chat completion."""
    return await fetch(server, "POST", "/v1/chat/completions", json.dumps(chat_body(**members)).encode())


async def post_completion(server: Server, **members: Any) -> Reply:
    """Ask for a completion."""
    return await fetch(server, "POST", "/v1/completions", json.dumps(completion_body(**members)).encode())
