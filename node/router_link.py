"""A node's connection to the router: registration, messages in, tokens out.

Owns the control socket and knows whether the router lives. Does not know what the messages ask for.

The router may come later than the node, restart, or vanish. `Hello` is sent at start and whenever a router says it does
not know us; another router epoch, or `ROUTER_TIMEOUT_S` without a Ping, makes every earlier request void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from engine.scheduler.request import PromptScores
from node.events import prompt_logprobs
from wire import links
from wire.errors import BatonError, InvalidMessage, Refused
from wire.messages import (
    NODE_TO_ROUTER,
    ROUTER_TO_NODE,
    CacheEvents,
    Failed,
    Hello,
    Introduce,
    Leaving,
    NodeStatus,
    Ping,
    Refusal,
    TokenEvent,
    Tokens,
    Welcome,
    control_identity,
)

ROUTER_TIMEOUT_S = 10.0
_CLOSE_LINGER_MS = 500
_MAX_HASHES = 2**16
_HASH_BYTES = 16
_log = logging.getLogger(__name__)


class RouterLink:
    """Registers with one router at a time by `hello` with a fresh status. Used by the engine loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: links.LinkSettings,
        hello: Hello,
        status: Callable[[], NodeStatus],
        now_s: float,
    ) -> None:
        self.socket = links.open_socket(context, zmq.DEALER, settings)
        self.socket.setsockopt(zmq.IDENTITY, control_identity(hello.epoch))
        links.connect(self.socket, address, settings)
        self.is_registered = False
        self.num_rejected_messages = 0
        self._hello = hello
        self._status = status
        self._epoch = hello.epoch
        self._router_epoch: int | None = None
        self._heard_s = now_s
        self._introduce()

    def receive(self, now_s: float) -> tuple[list[Any], bool]:
        """(requests of the router in order, whether everything asked before them is void now). Raises `Refused`."""
        requests: list[Any] = []
        is_void = False
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return requests, self._is_silent(now_s) or is_void
            try:
                message = ROUTER_TO_NODE.decode(frame)
            except InvalidMessage as error:
                self.num_rejected_messages += 1
                _log.warning("message from the router rejected: %s", error)
                continue
            self._heard_s = now_s
            if isinstance(message, Refusal):
                raise Refused(f"the router refused this node: {message.message}")
            if isinstance(message, Welcome | Ping | Introduce):
                if self._meet(message):
                    requests, is_void = [], True
            else:
                requests.append(message)

    def send(self, message: object) -> None:
        """Send one message. It is dropped, with a log line, when the queue to the router is full."""
        try:
            self.socket.send(NODE_TO_ROUTER.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("the queue to the router is full: %s dropped", type(message).__name__)

    def send_tokens(self, events: Sequence[TokenEvent]) -> None:
        """One message for all requests of a step."""
        if events:
            self.send(Tokens(self._epoch, tuple(events)))

    def send_prompt_logprobs(self, scores: PromptScores) -> None:
        """What a step found out about a prompt, in as many messages as needed."""
        for message in prompt_logprobs(scores, self._epoch):
            self.send(message)

    def send_failed(self, handoff_id: bytes, attempt: int, error: BatonError) -> None:
        """This attempt ended without finishing."""
        self.send(Failed(handoff_id, attempt, error.code[:128], str(error)[:1024]))

    def send_cache_events(self, stored: Sequence[bytes], removed: Sequence[bytes], *, is_snapshot: bool) -> None:
        """Send which blocks the prefix cache gained and lost, in as many messages as needed."""
        first = 0
        while first == 0 or first < max(len(stored), len(removed)):
            last = first + _MAX_HASHES
            events = CacheEvents(
                epoch=self._epoch,
                is_snapshot=is_snapshot and first == 0,
                stored=b"".join(stored[first:last]),
                removed=b"".join(removed[first:last]),
            )
            self.send(events)
            first = last

    def leave(self) -> None:
        """Ask the router to route nothing more here."""
        self.send(Leaving(self._epoch))

    def close(self) -> None:
        """Close the connection; what was sent before has `_CLOSE_LINGER_MS` to reach the router."""
        self.socket.close(linger=_CLOSE_LINGER_MS)

    def _introduce(self) -> None:
        self.send(replace(self._hello, status=self._status()))

    def _meet(self, message: Welcome | Ping | Introduce) -> bool:
        """Remember the router's epoch; returns True when it differs from the last one."""
        is_new = self._router_epoch is not None and message.router_epoch != self._router_epoch
        self._router_epoch = message.router_epoch
        if isinstance(message, Introduce):
            self._introduce()
        else:  # only nodes that are registered hear a Ping
            self.is_registered = True
        return is_new

    def _is_silent(self, now_s: float) -> bool:
        if self._router_epoch is None or now_s - self._heard_s < ROUTER_TIMEOUT_S:
            return False
        _log.warning("the router was silent for %g s: its requests are dropped", ROUTER_TIMEOUT_S)
        self._router_epoch = None
        self.is_registered = False
        return True
