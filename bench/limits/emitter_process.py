"""A decode node without a model: `python -m bench.limits.emitter_process`, driven by `bench.child`.

Owns the emission. It registers like any node, through the link that real nodes have, takes the requests it is given,
answers the first token of each at once and the others in steps at a fixed cadence: one message for all requests of a
step. It stamps every step before its message is made. Two ends can take it in: the router, and whoever measures what
the router is held against; both get the same messages from the same code.

Stamps are seconds of CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import zmq

from bench.child import Worker, serve_parent
from node.heartbeat import HeartbeatThread
from node.router_link import RouterLink
from program.clock import host_clock
from wire.errors import RequestFailed
from wire.layout import KvLayout, LayerKv
from wire.links import LinkSettings
from wire.messages import DECODE, FINISH_LENGTH, Decode, Hello, NodeStatus, TokenEvent

MAX_REQUEST_TOKENS = 2**14
_LAYOUT = KvLayout.of_layers("bfloat16", 16, [LayerKv(num_kv_heads=1, head_dim=64)])
_STATUS = NodeStatus(
    num_running=0, num_waiting=0, num_free_blocks=2**16, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.0
)
_MAX_NUM_SEQS = 1024
_WAIT_S = 20.0
_LOOK_MS = 200


class Emitter:
    """Says `token_id` again and again. `fingerprint` is that of the model that the router has the tokenizer of."""

    def __init__(self, fingerprint: str, token_id: int) -> None:
        self._fingerprint = fingerprint
        self._token_ids = (token_id,)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, RouterLink] = {}
        self._hearts: list[HeartbeatThread] = []

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "join", {"end": str(end), "address": str(address)}:
                return self._join(end, address)
            case "emit", {"end": str(end), "count": int(count), "num_tokens": int(num_tokens), "interval_s": interval}:
                return self._emit(self._links[end], count, num_tokens, float(interval))
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        for heart in self._hearts:
            heart.stop()
        self._context.destroy(linger=0)

    def _join(self, end: str, address: str) -> None:
        """Register at `address`. Raises `RequestFailed`."""
        epoch = secrets.randbits(63)
        settings = LinkSettings()
        hello = Hello(
            role=DECODE,
            node_id=f"emitter-{end}",
            epoch=epoch,
            fingerprint=self._fingerprint,
            layout=_LAYOUT,
            peer_address="",
            http_address="",
            num_blocks=_STATUS.num_free_blocks,
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_num_seqs=_MAX_NUM_SEQS,
            status=_STATUS,
            clock=host_clock(),
        )
        heart = HeartbeatThread(self._context, address, settings, epoch, _STATUS)
        link = RouterLink(self._context, address, settings, hello, lambda: _STATUS, time.monotonic())
        self._hearts.append(heart)
        self._links[end] = link
        deadline_s = time.monotonic() + _WAIT_S
        while not link.is_registered:
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"{address} did not take the emitter in within {_WAIT_S:g} s")
            link.socket.poll(_LOOK_MS)
            link.receive(time.monotonic())

    def _emit(self, link: RouterLink, count: int, num_tokens: int, interval_s: float) -> list[float]:
        """Take `count` requests and answer each with `num_tokens`; when each step after the first token was made."""
        legs = self._first_tokens(link, count)
        stamps_s = []
        due_s = time.monotonic()
        for index in range(1, num_tokens):
            due_s += interval_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            finish_reason = FINISH_LENGTH if index == num_tokens - 1 else ""
            stamps_s.append(time.monotonic())
            link.send_tokens([self._event(leg, index, finish_reason) for leg in legs])
        return stamps_s

    def _first_tokens(self, link: RouterLink, count: int) -> list[Decode]:
        """Answer the first token of every request when it comes."""
        legs: list[Decode] = []
        deadline_s = time.monotonic() + _WAIT_S
        while len(legs) < count:
            if time.monotonic() > deadline_s:
                raise RequestFailed(f"{len(legs)} of {count} requests came to the emitter within {_WAIT_S:g} s")
            link.socket.poll(_LOOK_MS)
            messages, _ = link.receive(time.monotonic())
            new = [message for message in messages if isinstance(message, Decode)]
            link.send_tokens([self._event(leg, 0) for leg in new])
            legs += new
        return legs

    def _event(self, leg: Decode, index: int, finish_reason: str = "") -> TokenEvent:
        return TokenEvent(
            handoff_id=leg.handoff_id,
            attempt=leg.attempt,
            index=index,
            token_ids=self._token_ids,
            logprobs=(),
            finish_reason=finish_reason,
            num_cached_tokens=0,
        )


def _begin(spec: dict[str, Any]) -> Worker:
    return Emitter(**spec)


if __name__ == "__main__":
    serve_parent(_begin)
