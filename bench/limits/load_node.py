"""A decode node without a model for loads on the router: a thread that answers every request at a fixed cadence.

Owns a thread with its sockets. Unlike `fake_node_process` it takes requests whenever they come, and reports log
probabilities where they are asked for; nothing is measured here.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass

import zmq

from baton.runtime.clock import host_clock
from baton.wire import messages
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.links import LinkSettings, connect, open_socket
from baton.wire.session import Session, number_of

_LAYOUT = KvLayout.of_layers("bfloat16", 16, [LayerKv(num_kv_heads=1, head_dim=64)])
_NUM_BLOCKS = 2**16
_MAX_TOKENS = 2**20
_STATUS = messages.NodeStatus(0, 0, num_free_blocks=_NUM_BLOCKS, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.0)
_MAX_EVENTS = 256
_BEAT_S = 0.5


@dataclass(slots=True)
class _Leg:
    handoff_id: bytes
    request: messages.Decode
    num_sent: int = 0


class LoadNode:
    """Says `token_id` again and again, one token of every request each `interval_s`. Context manager."""

    def __init__(self, address: str, fingerprint: str, token_id: int, interval_s: float) -> None:
        self._token_id = token_id
        self._interval_s = interval_s
        self._epoch = secrets.randbits(63)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = open_socket(self._context, zmq.DEALER, LinkSettings())
        self._link.setsockopt(zmq.IDENTITY, messages.control_identity(self._epoch))
        connect(self._link, address, LinkSettings())
        self._session = Session(0, messages.NODE_TO_ROUTER)
        self._legs: dict[tuple[bytes, int], _Leg] = {}
        self._stop, self.joined = threading.Event(), threading.Event()
        hello = messages.Hello(
            messages.DECODE,
            "load",
            self._epoch,
            fingerprint,
            _LAYOUT,
            peer_address="",
            http_address="",
            num_blocks=_NUM_BLOCKS,
            max_request_tokens=_MAX_TOKENS,
            max_num_seqs=1024,
            status=_STATUS,
            clock=host_clock(),
        )
        self._send(hello)
        self._thread = threading.Thread(target=self._run, name="load node", daemon=True)
        self._thread.start()

    def __enter__(self) -> LoadNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        due_s = beat_s = time.monotonic()
        while not self._stop.is_set():
            while self._link.poll(max(0, round((due_s - time.monotonic()) * 1000))):
                frames = self._link.recv_multipart()
                self._session.accept(number_of(frames))
                self._take(messages.ROUTER_TO_NODE.decode(frames[-1]))
            now_s = time.monotonic()
            due_s = max(due_s + self._interval_s, now_s)
            if now_s >= beat_s:
                beat_s = now_s + _BEAT_S
                self._send(messages.Heartbeat(self._epoch, _STATUS))
            self._step()

    def _take(self, message: object) -> None:
        if isinstance(message, messages.Welcome):
            self._session = Session(message.session, messages.NODE_TO_ROUTER)
            self.joined.set()
        elif isinstance(message, messages.Ping):
            self._session.acknowledge(message.received)
            live = b"".join(messages.live_key(*key) for key in self._legs)
            session = self._session
            self._send(messages.Pong(session.number, session.sent, session.received, live))
        elif isinstance(message, messages.Decode):
            for handoff_id in (message.handoff_id, *message.forks):
                self._legs[handoff_id, message.attempt] = _Leg(handoff_id, message)
        elif isinstance(message, messages.Cancel):
            self._legs.pop((message.handoff_id, message.attempt), None)

    def _step(self) -> None:
        events = [self._event(leg) for leg in self._legs.values()]
        for start in range(0, len(events), _MAX_EVENTS):
            tokens = messages.Tokens(self._epoch, tuple(events[start : start + _MAX_EVENTS]))
            self._link.send_multipart(self._session.frames(tokens))
        for event in events:
            if event.finish_reason:
                del self._legs[event.handoff_id, event.attempt]

    def _event(self, leg: _Leg) -> messages.TokenEvent:
        request, index = leg.request, leg.num_sent
        leg.num_sent += 1
        finish_reason = messages.FINISH_LENGTH if leg.num_sent == (request.params.max_tokens or _MAX_TOKENS) else ""
        scores: tuple[messages.TokenLogprobs, ...] = ()
        if request.params.logprobs is not None:
            count = request.params.logprobs
            top = tuple(range(self._token_id, self._token_id + count))
            scores = (messages.TokenLogprobs(-0.5, top, tuple(-0.1 - 0.3 * rank for rank in range(count))),)
        return messages.TokenEvent(leg.handoff_id, request.attempt, index, (self._token_id,), scores, finish_reason, 0)

    def _send(self, message: object) -> None:
        self._link.send(messages.NODE_TO_ROUTER.encode(message))
