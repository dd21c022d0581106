"""The two ways in which an emitter's tokens come to whoever measures: through a router's streams, and without.

Owns the sockets and the stamps. A stamp is taken when bytes are there, before anybody looks at them, and looking at
them costs as little as it can: what a client needs for itself must not count as the router's. So this is no client for
anything else: it knows that every event of a stream is one token.

Stamps are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
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

from wire import links
from wire.errors import RequestFailed
from wire.messages import (
    NODE_TO_ROUTER,
    ROUTER_TO_NODE,
    Decode,
    Hello,
    Ping,
    Tokens,
    Welcome,
    control_identity,
)
from wire.sampling import DecodingParams

_HOST = "127.0.0.1"
_WAIT_S = 20.0
_READ_BYTES = 2**16
_ROUTER_EPOCH = 1


@dataclass(slots=True)
class Received:
    """One request: when it was sent, and when each of its tokens came."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


class EventCounter:
    """Counts the events of a stream that comes in pieces, chunked or not."""

    def __init__(self) -> None:
        self._tail = b""

    def count(self, piece: bytes) -> int:
        """How many events end in `piece`."""
        # a blank line ends an event; nothing else in a response has two line feeds in a row
        held = self._tail + piece
        num_ends = held.count(b"\n\n")
        self._tail = b"\n" if held.endswith(b"\n") and not held.endswith(b"\n\n") else b""
        return num_ends


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
        for prompt in prompts:
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), _WAIT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams.append((connection, _request(address.netloc, model, prompt, num_tokens), _Stream(num_tokens)))
        for connection, request, stream in streams:
            selector.register(connection, selectors.EVENT_READ, stream)
            stream.received.sent_s = time.monotonic()
            connection.sendall(request)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RequestFailed(f"{base_url}: a stream did not end in time")
            for key, _ in ready:
                piece = key.fileobj.recv(_READ_BYTES)  # type: ignore[union-attr]
                if key.data.take(piece, time.monotonic()):
                    selector.unregister(key.fileobj)
        return [stream.received for _, _, stream in streams]


class _Stream:
    """One answer as its bytes come."""

    def __init__(self, num_tokens: int) -> None:
        self.received = Received(0.0)
        self._num_tokens = num_tokens
        self._counter = EventCounter()
        self._beginning: bytes | None = b""

    def take(self, piece: bytes, now_s: float) -> bool:
        """Whether the stream has ended. Raises `RequestFailed`."""
        if self._beginning is not None:
            self._beginning += piece
            self._check_status(self._beginning)
        self.received.token_s += [now_s] * self._counter.count(piece)
        if len(self.received.token_s) <= self._num_tokens:
            if not piece:
                raise RequestFailed(f"a stream ended after {len(self.received.token_s)} of {self._num_tokens} tokens")
            return False
        del self.received.token_s[self._num_tokens :]  # [DONE] is an event too
        return True

    def _check_status(self, beginning: bytes) -> None:
        if b"\r\n\r\n" not in beginning:
            return
        status = beginning.split(b" ", 2)[1]
        if status != b"200":
            raise RequestFailed(f"the router answered {status.decode()}: {beginning[-300:].decode(errors='replace')}")
        self._beginning = None


def _request(netloc: str, model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class DirectReceiver:
    """The bare other end of an emitter's link: a socket of the router's kind and nothing behind it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = links.open_socket(self._context, zmq.ROUTER, links.LinkSettings())
        self.address = links.bind(self._link, _HOST, 0, links.LinkSettings())
        self._identity = b""

    def __enter__(self) -> DirectReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._context.destroy(linger=0)

    def welcome(self) -> None:
        """Take the emitter in when it says Hello. Raises `RequestFailed`."""
        deadline_s = time.monotonic() + _WAIT_S
        while not self._identity:
            for frame, _ in self._frames(deadline_s):
                message = NODE_TO_ROUTER.decode(frame)
                if isinstance(message, Hello):
                    self._identity = control_identity(message.epoch)
                    self._send(Welcome(_ROUTER_EPOCH))

    def receive(self, prompts: Sequence[Sequence[int]], num_tokens: int, duration_s: float) -> list[Received]:
        """As `receive_streams`, without a router."""
        self._send(Ping(_ROUTER_EPOCH))  # a node that hears none for long gives its router up
        received: dict[bytes, Received] = {}
        for prompt in prompts:
            leg = _leg(prompt, num_tokens)
            received[leg.handoff_id] = Received(time.monotonic())
            self._send(leg)
        deadline_s = time.monotonic() + duration_s + _WAIT_S
        while min(len(each.token_s) for each in received.values()) < num_tokens:
            # all that is there is stamped before any of it is looked at
            for frame, came_s in self._frames(deadline_s):
                message = NODE_TO_ROUTER.decode(frame)
                for event in message.events if isinstance(message, Tokens) else ():
                    received[event.handoff_id].token_s.append(came_s)
        return list(received.values())

    def _frames(self, deadline_s: float) -> list[tuple[bytes, float]]:
        """The messages that come next, of any node, each with the time at which it came. Raises `RequestFailed`."""
        if not self._link.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            raise RequestFailed("the emitter went silent")
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                _, frame = self._link.recv_multipart(zmq.NOBLOCK)
                found.append((frame, time.monotonic()))
        return found

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
