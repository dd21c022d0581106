"""The two ways in which a fake node's tokens come to whoever measures: through a router's streams, and without.

Owns the sockets and the stamps. A stamp is taken when bytes are there, before anybody looks at them, and looking at
them costs as little as it can: what a client needs for itself must not count as the router's. So this is no client for
anything else: it knows that every event of a stream is one token.

Stamps are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq

from wire.errors import RequestFailed
from wire.links import LinkSettings, bind, open_socket
from wire.messages import NODE_TO_ROUTER, ROUTER_TO_NODE, Decode, Hello, Ping, Tokens, Welcome, control_identity
from wire.sampling import DecodingParams

_HOST = "127.0.0.1"
_WAIT_S = 20.0
_READ_BYTES = 2**16
_ROUTER_EPOCH = 1


@dataclass(slots=True)
class Received:
    """One request: when it was sent, and when each of its tokens came."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)


def receive_streams(
    base_url: str, model: str, prompts: Sequence[Sequence[int]], num_tokens: int, duration_s: float
) -> list[Received]:
    """Send all prompts at once and read their streams to the end, `duration_s` and some patience at most.

    Raises `RequestFailed` when an answer is an error, or not one event for each of `num_tokens` tokens.
    """
    address = urlsplit(base_url)
    deadline_s = time.monotonic() + duration_s + _WAIT_S
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        streams = []
        for _ in prompts:
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), _WAIT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams.append((connection, _Stream(num_tokens)))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
        for prompt, (connection, stream) in zip(prompts, streams, strict=True):
            request = _request(address.netloc, model, prompt, num_tokens)
            stream.received.sent_s = time.monotonic()
            connection.sendall(request)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RequestFailed(f"{base_url}: a stream did not end in time")
            for key, _ in ready:
                connection, stream = key.data
                piece = connection.recv(_READ_BYTES)
                if stream.take(piece, time.monotonic()):
                    selector.unregister(connection)
        return [stream.received for _, stream in streams]


class _Stream:
    """One answer as its bytes come, chunked or not."""

    def __init__(self, num_tokens: int) -> None:
        self.received = Received()
        self._num_events = num_tokens + 1  # [DONE] is an event too
        self._head: bytes | None = b""
        self._tail = b""

    def take(self, piece: bytes, now_s: float) -> bool:
        """Whether the stream has ended. Raises `RequestFailed`."""
        if self._head is not None:
            self._head += piece
            if b"\r\n\r\n" in self._head:
                status = self._head.split(b" ", 2)[1].decode()
                if status != "200":
                    said = self._head[-300:].decode(errors="replace")
                    raise RequestFailed(f"the router answered {status}: {said}")
                self._head = None
        # a blank line ends an event; nothing else in a response has two line feeds in a row
        held = self._tail + piece
        self.received.token_s += [now_s] * held.count(b"\n\n")
        self._tail = b"\n" if held.endswith(b"\n") and not held.endswith(b"\n\n") else b""
        num_events = len(self.received.token_s)
        if not piece and num_events < self._num_events:
            raise RequestFailed(f"a stream ended after {num_events} of {self._num_events - 1} tokens")
        if num_events < self._num_events:
            return False
        del self.received.token_s[self._num_events - 1 :]
        return True


def _request(netloc: str, model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    members = {"model": model, "prompt": list(prompt), "max_tokens": num_tokens}
    body = json.dumps({**members, "ignore_eos": True, "temperature": 0.0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class DirectEnd:
    """The other end of a fake node's link: a socket of the router's kind with nothing behind it. Context manager."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = open_socket(self._context, zmq.ROUTER, LinkSettings())
        self.address = bind(self._link, _HOST, 0, LinkSettings())
        self._identity = b""

    def __enter__(self) -> DirectEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def welcome(self) -> None:
        """Take the node in when it says Hello. Raises `RequestFailed`."""
        while not self._identity:
            _, message = self._next(time.monotonic() + _WAIT_S)
            if isinstance(message, Hello):
                self._identity = control_identity(message.epoch)
                self._send(Welcome(_ROUTER_EPOCH))

    def receive(self, prompts: Sequence[Sequence[int]], num_tokens: int, duration_s: float) -> list[Received]:
        """As `receive_streams`, without a router."""
        self._send(Ping(_ROUTER_EPOCH))  # as a router does
        received: dict[bytes, Received] = {}
        for prompt in prompts:
            leg = _leg(prompt, num_tokens)
            received[leg.handoff_id] = Received(time.monotonic())
            self._send(leg)
        deadline_s = time.monotonic() + duration_s + _WAIT_S
        while min(len(each.token_s) for each in received.values()) < num_tokens:
            came_s, message = self._next(deadline_s)
            for event in message.events if isinstance(message, Tokens) else ():
                received[event.handoff_id].token_s.append(came_s)
        return list(received.values())

    def _next(self, deadline_s: float) -> tuple[float, object]:
        """When the next message came, before it was looked at, and the message. Raises `RequestFailed`."""
        if not self._link.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            raise RequestFailed("the fake node went silent")
        _, frame = self._link.recv_multipart()
        return time.monotonic(), NODE_TO_ROUTER.decode(frame)

    def _send(self, message: object) -> None:
        self._link.send_multipart([self._identity, ROUTER_TO_NODE.encode(message)])


def _leg(prompt: Sequence[int], num_tokens: int) -> Decode:
    return Decode(
        handoff_id=secrets.token_bytes(16),
        attempt=1,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        params=DecodingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        cache_salt=b"",
        prefill_peer=None,
    )
