"""A decode node without a model: `python -m baton.bench.limits.fake_node_process`, driven by `baton.bench.child`.

It registers like any node, takes the requests it is given, answers the first token of each at once and the others in
steps at a fixed cadence: one message for all requests of a step, stamped (CLOCK_MONOTONIC) before it is made. Two ends
can take it in: the router, and whoever measures what the router is held against.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from baton.bench.child import serve_parent
from baton.runtime.clock import host_clock
from baton.wire import messages
from baton.wire.errors import RequestFailed
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.links import LinkSettings, connect, open_socket
from baton.wire.session import Session, number_of

_LAYOUT = KvLayout.of_layers("bfloat16", 16, [LayerKv(num_kv_heads=1, head_dim=64)])
_NUM_BLOCKS = 2**16
_STATUS = messages.NodeStatus(0, 0, num_free_blocks=_NUM_BLOCKS, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.0)
_BEAT_S = 1.0
_WAIT_S = 20.0


@dataclass(slots=True)
class _End:
    """One end that has taken this node in, under an epoch of its own."""

    link: zmq.Socket[bytes]
    epoch: int
    session: Session

    def next(self, deadline_s: float) -> object:
        if not self.link.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            raise RequestFailed(f"what the fake node waits for did not come within {_WAIT_S:g} s")
        frames = self.link.recv_multipart()
        message = messages.ROUTER_TO_NODE.decode(frames[-1])
        if number_of(frames):
            self.session.accept(number_of(frames))
        elif isinstance(message, messages.Welcome):
            self.session = Session(message.session, messages.NODE_TO_ROUTER)
        elif isinstance(message, messages.Ping):
            self.session.acknowledge(message.received)
        return message

    def send_tokens(self, legs: list[messages.Decode], index: int, token_id: int, finish_reason: str = "") -> None:
        events = (
            messages.TokenEvent(leg.handoff_id, leg.attempt, index, (token_id,), (), finish_reason, 0) for leg in legs
        )
        self.link.send_multipart(self.session.frames(messages.Tokens(self.epoch, tuple(events))))


class FakeNode:
    """See `baton.bench.child.Worker`. `spec`: `token_id`, which it says again and again, and the `fingerprint` of the
    model that the router has the tokenizer of.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._fingerprint: str = spec["fingerprint"]
        self._token_id: int = spec["token_id"]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends: dict[str, _End] = {}
        self._stop = threading.Event()

    def join(self, end: str, address: str) -> None:
        """Register at `address` and stay there. Raises `RequestFailed`."""
        epoch = secrets.randbits(63)
        link = open_socket(self._context, zmq.DEALER, LinkSettings())
        link.setsockopt(zmq.IDENTITY, messages.control_identity(epoch))
        connect(link, address, LinkSettings())
        hello = messages.Hello(
            messages.DECODE,
            f"fake-{end}",
            epoch,
            self._fingerprint,
            _LAYOUT,
            peer_address="",
            http_address="",
            num_blocks=_NUM_BLOCKS,
            max_request_tokens=2**14,
            max_num_seqs=1024,
            status=_STATUS,
            clock=host_clock(),
        )
        link.send(messages.NODE_TO_ROUTER.encode(hello))
        self._ends[end] = _End(link, epoch, Session(0, messages.NODE_TO_ROUTER))
        deadline_s = time.monotonic() + _WAIT_S
        while not isinstance(self._ends[end].next(deadline_s), messages.Welcome):
            continue
        threading.Thread(target=self._beat, args=(address, epoch), name="heartbeat", daemon=True).start()

    def emit(self, end: str, count: int, num_tokens: int, interval_s: float) -> list[float]:
        """Take `count` requests and answer each with `num_tokens`; when each step after the first token was made."""
        to = self._ends[end]
        legs: list[messages.Decode] = []
        deadline_s = time.monotonic() + _WAIT_S
        while len(legs) < count:
            message = to.next(deadline_s)
            if isinstance(message, messages.Decode):
                to.send_tokens([message], 0, self._token_id)
                legs.append(message)
        stamps_s = []
        due_s = time.monotonic()
        for index in range(1, num_tokens):
            due_s += interval_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            stamps_s.append(time.monotonic())
            to.send_tokens(legs, index, self._token_id, messages.FINISH_LENGTH if index == num_tokens - 1 else "")
        return stamps_s

    def close(self) -> None:
        """See `Worker`: heartbeats end with the process."""
        self._stop.set()

    def _beat(self, address: str, epoch: int) -> None:
        link = open_socket(self._context, zmq.DEALER, LinkSettings())
        connect(link, address, LinkSettings())
        while not self._stop.wait(_BEAT_S):
            link.send(messages.NODE_TO_ROUTER.encode(messages.Heartbeat(epoch, _STATUS)))


if __name__ == "__main__":
    serve_parent(FakeNode)
