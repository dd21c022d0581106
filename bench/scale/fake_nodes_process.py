"""Many nodes without models: `python -m baton.bench.scale.fake_nodes_process`, driven by `baton.bench.child`.

Every node has a connection of its own to a real router, beats, and answers Pings. Prefill nodes tell token 1; decode
nodes repeat it and tell one token of each of their requests every `interval_s`, each node at a time of its own. When a
token is made is noted, by the number that the client has put into the prompt (`number_of_prompt`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from baton.bench.child import serve_parent
from baton.bench.scale.fake_cluster import LAYOUT, MAX_NUM_SEQS, NUM_BLOCKS
from baton.bench.scale.numbered_prompts import number_of_prompt
from baton.runtime.clock import host_clock
from baton.wire import messages
from baton.wire.errors import RequestFailed
from baton.wire.links import LinkSettings, connect, open_socket
from baton.wire.session import Session, number_of

_STATUS = messages.NodeStatus(1, 0, num_free_blocks=NUM_BLOCKS, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.0)
_BEAT_S = 1.0
_JOIN_S = 60.0


@dataclass(slots=True)
class _Leg:
    handoff_id: bytes
    attempt: int
    number: int
    num_tokens: int
    num_told: int = 0


@dataclass(slots=True)
class _Node:
    """`due_s`: its next step, `beat_s`: its next heartbeat."""

    role: str
    epoch: int
    link: zmq.Socket[bytes]
    due_s: float = 0.0
    beat_s: float = 0.0
    session: Session = field(default_factory=lambda: Session(0, messages.NODE_TO_ROUTER))
    legs: dict[bytes, _Leg] = field(default_factory=dict)

    def say(self, message: object) -> None:
        """Without a number."""
        self.link.send(messages.NODE_TO_ROUTER.encode(message))

    def tell(self, events: Sequence[messages.TokenEvent]) -> None:
        """Tokens."""
        self.link.send_multipart(self.session.frames(messages.Tokens(self.epoch, tuple(events))))


class FakeNodes:
    """See `baton.bench.child.Worker`. `spec`: `address` of the router, `fingerprint`, `token_id` that is told again and
    again, `num_prefills` and `num_decodes`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._token_id: int = spec["token_id"]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._by_link: dict[zmq.Socket[bytes], _Node] = {}
        self._stamps: dict[int, list[float]] = {}
        self._num_left = 0
        for role, count in ((messages.PREFILL, spec["num_prefills"]), (messages.DECODE, spec["num_decodes"])):
            for number in range(count):
                self._join(role, f"{role}-{number}", spec["address"], spec["fingerprint"])
        deadline_s = time.monotonic() + _JOIN_S
        while not all(node.session.number for node in self._by_link.values()):
            if time.monotonic() > deadline_s:
                raise RequestFailed("the router did not take all nodes in")
            self._take(0.1)

    def emit(self, count: int, interval_s: float, limit_s: float) -> list[list[float]]:
        """Wait until `count` requests have come, and answer them; when each token of each was made, in the order of
        their numbers."""
        self._stamps, self._num_left = {}, count
        deadline_s = time.monotonic() + limit_s
        decodes = [node for node in self._by_link.values() if node.role == messages.DECODE]
        while len(self._stamps) < count:
            self._require_time(deadline_s)
            self._take(0.1)
        now_s = time.monotonic()
        for place, node in enumerate(decodes):
            node.due_s = now_s + interval_s * place / len(decodes)
        while self._num_left:
            self._require_time(deadline_s)
            now_s = time.monotonic()
            for node in decodes:
                if node.due_s <= now_s:
                    node.due_s += interval_s
                    self._step(node)
            self._take(max(0.0, min(node.due_s for node in decodes) - time.monotonic()))
        return [self._stamps[number] for number in sorted(self._stamps)]

    def _require_time(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise RequestFailed(f"{len(self._stamps)} requests have come, {self._num_left} have not ended")

    def idle(self, for_s: float) -> None:
        """Beat and answer for so long."""
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            self._take(0.05)

    def close(self) -> None:
        """See `Worker`."""
        self._context.destroy(linger=0)

    def _join(self, role: str, node_id: str, address: str, fingerprint: str) -> None:
        epoch = secrets.randbits(63)
        link = open_socket(self._context, zmq.DEALER, LinkSettings())
        link.setsockopt(zmq.IDENTITY, messages.control_identity(epoch))
        connect(link, address, LinkSettings())
        node = _Node(role, epoch, link)
        hello = messages.Hello(
            role,
            node_id,
            epoch,
            fingerprint,
            LAYOUT,
            peer_address="tcp://127.0.0.1:9" if role == messages.PREFILL else "",
            http_address="",
            num_blocks=NUM_BLOCKS,
            max_request_tokens=2**14,
            max_num_seqs=MAX_NUM_SEQS,
            status=_STATUS,
            clock=host_clock(),
        )
        node.say(hello)
        self._by_link[link] = node
        self._poller.register(link, zmq.POLLIN)

    def _take(self, timeout_s: float) -> None:
        """Take what has come, and beat."""
        for link, _ in self._poller.poll(round(timeout_s * 1000)):
            node = self._by_link[link]
            while link.poll(0):
                self._on_message(node, link.recv_multipart())
        now_s = time.monotonic()
        for node in self._by_link.values():
            if node.beat_s <= now_s:
                node.beat_s = now_s + _BEAT_S
                node.say(messages.Heartbeat(node.epoch, _STATUS))

    def _on_message(self, node: _Node, frames: list[bytes]) -> None:
        message = messages.ROUTER_TO_NODE.decode(frames[-1])
        if number_of(frames):
            node.session.accept(number_of(frames))
        if isinstance(message, messages.Welcome):
            node.session = Session(message.session, messages.NODE_TO_ROUTER)
        elif isinstance(message, messages.Ping):
            session = node.session
            session.acknowledge(message.received)
            live = b"".join(messages.live_key(leg.handoff_id, leg.attempt) for leg in node.legs.values())
            node.say(messages.Pong(session.number, session.sent, session.received, live))
        elif isinstance(message, messages.Prefill):
            node.legs[message.handoff_id] = _Leg(message.handoff_id, message.attempt, -1, 0)
            node.tell([messages.TokenEvent(message.handoff_id, message.attempt, 0, (self._token_id,), (), "", 0)])
        elif isinstance(message, messages.Decode):
            number = number_of_prompt(message.token_ids)
            num_tokens = message.params.max_tokens or 1
            node.legs[message.handoff_id] = _Leg(message.handoff_id, message.attempt, number, num_tokens)
            self._stamps[number] = []
        elif isinstance(message, messages.Cancel):
            node.legs.pop(message.handoff_id, None)

    def _step(self, node: _Node) -> None:
        events, now_s = [], time.monotonic()
        for leg in list(node.legs.values()):
            index, leg.num_told = leg.num_told, leg.num_told + 1
            is_last = leg.num_told == leg.num_tokens
            reason = messages.FINISH_LENGTH if is_last else ""
            events.append(messages.TokenEvent(leg.handoff_id, leg.attempt, index, (self._token_id,), (), reason, 0))
            self._stamps[leg.number].append(now_s)
            if is_last:
                del node.legs[leg.handoff_id]
                self._num_left -= 1
        if events:
            node.tell(events)


if __name__ == "__main__":
    serve_parent(FakeNodes)
