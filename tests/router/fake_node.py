"""Helper: a node without an engine. It speaks the control protocol over a real socket and answers as a test says."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import zmq

from program.clock import host_clock
from wire import links
from wire.layout import KvLayout, LayerKv
from wire.messages import (
    DECODE,
    NODE_TO_ROUTER,
    ROUTER_TO_NODE,
    CacheEvents,
    Decode,
    Failed,
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    NodeStatus,
    Ping,
    Prefill,
    PromptLogprobs,
    TokenEvent,
    TokenLogprobs,
    Tokens,
    Welcome,
    control_identity,
)

LAYOUT = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=2, head_dim=16)] * 2)
FINGERPRINT = "f" * 32
STATUS = NodeStatus(
    num_running=0, num_waiting=0, num_free_blocks=64, num_cached_blocks=0, num_held_blocks=0, loop_age_s=0.0
)
BEAT_S = 0.2
PATIENCE_S = 30.0

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LegMessage: TypeAlias = Prefill | Decode
Script: TypeAlias = Callable[["FakeNode", LegMessage], None]
MessageT = TypeVar("MessageT")


def make_hello(role: str, **changes: Any) -> Hello:
    """The first message of a node of `role`; its epoch is random unless `changes` has one."""
    hello = Hello(
        role=role,
        node_id=f"{role}-{secrets.token_hex(3)}",
        epoch=secrets.randbits(63),
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        peer_address="tcp://127.0.0.1:9" if role != DECODE else "",
        http_address="",
        num_blocks=64,
        max_request_tokens=256,
        max_num_seqs=8,
        status=STATUS,
        clock=host_clock(),
    )
    return replace(hello, **changes)


class FakeNode:
    """One life of a node. `script` is called for every leg it is given."""

    def __init__(self, context: Context, address: str, hello: Hello, script: Script | None = None) -> None:
        self.hello = hello
        self.script = script
        self.is_beating = True
        self.num_pings = 0
        self._unread: list[Any] = []
        self._changed = asyncio.Event()
        self._socket = links.open_socket(context, zmq.DEALER, links.LinkSettings())
        self._socket.setsockopt(zmq.IDENTITY, control_identity(hello.epoch))
        links.connect(self._socket, address, links.LinkSettings())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._heart = self._loop.create_task(self._beat())
        self.send(hello)

    async def expect(
        self, kind: type[MessageT], within_s: float = PATIENCE_S, handoff_id: bytes | None = None
    ) -> MessageT:
        """The next message of that kind, or of that kind about one handoff, that no earlier call returned; others keep
        their places."""
        async with asyncio.timeout(within_s):
            while True:
                for position, message in enumerate(self._unread):
                    if isinstance(message, kind) and handoff_id in (None, getattr(message, "handoff_id", None)):
                        del self._unread[position]
                        return message
                self._changed.clear()
                await self._changed.wait()

    def has(self, kind: type[Any]) -> bool:
        """Whether an unread message of that kind is here."""
        return any(isinstance(message, kind) for message in self._unread)

    def send(self, message: object) -> None:
        """Send a message of the protocol."""
        self.send_raw(NODE_TO_ROUTER.encode(message))

    def send_raw(self, frame: bytes) -> None:
        """Send any bytes."""
        self._socket.send(frame, zmq.NOBLOCK)
        self._loop.call_soon(self._read)

    def emit(
        self, leg: LegMessage, token_ids: Sequence[int], index: int | None = None, finish: str = "", cached: int = 0
    ) -> None:
        """Tokens of `leg`, from output `index` on (its first output when None)."""
        logprobs = () if leg.params.logprobs is None else tuple(TokenLogprobs(-0.5, (i,), (-0.5,)) for i in token_ids)
        first = first_index(leg) if index is None else index
        event = TokenEvent(leg.handoff_id, leg.attempt, first, tuple(token_ids), logprobs, finish, cached)
        self.send(Tokens(self.hello.epoch, (event,)))

    def tell_prompt(self, leg: LegMessage, first: int = 1, num_rows: int | None = None) -> None:
        """Log probabilities of prompt tokens from place `first` on: -p for the token at place p, whose rank is p. Its
        alternatives are the tokens 100, 101, ... with -0.25 each."""
        num_top = leg.params.prompt_logprobs or 0
        last = leg.num_prompt_tokens if num_rows is None else first + num_rows
        top = (*range(100, 100 + num_top), *[-0.25] * num_top)
        row = struct.Struct(f"<fI{num_top}I{num_top}f")
        rows = b"".join(row.pack(-float(place), place, *top) for place in range(first, last))
        self.send(PromptLogprobs(self.hello.epoch, leg.handoff_id, leg.attempt, first, num_top, rows))

    def fail(self, leg: LegMessage, code: str, message: str = "as the test says") -> None:
        """Report that `leg` failed."""
        self.send(Failed(leg.handoff_id, leg.attempt, code, message))

    def report_cache(self, stored: bytes = b"", removed: bytes = b"", is_snapshot: bool = False) -> None:
        """Report changes of the prefix cache."""
        self.send(CacheEvents(self.hello.epoch, is_snapshot, stored, removed))

    def leave(self) -> None:
        """Ask for no more work."""
        self.send(Leaving(self.hello.epoch))

    async def join(self) -> None:
        """Wait until the router has taken this node in."""
        await self.expect(Welcome)

    def die(self) -> None:
        """Hang up without a word."""
        if not self._socket.closed:
            self._heart.cancel()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                message = ROUTER_TO_NODE.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Ping):
                self.num_pings += 1
                continue
            self._unread.append(message)
            self._changed.set()
            if isinstance(message, Introduce):
                self.send(self.hello)
            if isinstance(message, Prefill | Decode) and self.script is not None:
                for leg in choice_legs(message):
                    self.script(self, leg)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self.is_beating:
                self.send(Heartbeat(self.hello.epoch, self.hello.status))


def choice_legs(leg: LegMessage) -> list[LegMessage]:
    """The leg of each choice, as if it were alone."""
    return [
        replace(leg, handoff_id=handoff_id, params=replace(leg.params, choice=leg.params.choice + number), forks=())
        for number, handoff_id in enumerate((leg.handoff_id, *leg.forks))
    ]


def first_index(leg: LegMessage) -> int:
    """The output index of the first token that `leg` asks for."""
    return len(leg.token_ids) - leg.num_prompt_tokens


def answering(token_ids: Sequence[int], finish: str = "stop") -> Script:
    """A script for both roles: the answer is `token_ids`, one message per token, the last with `finish`.

    A prefill node sends the first token it is asked for, a decode node sends all of them, that one included. Before
    that they tell of the prompt what they are asked for.
    """

    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.params.prompt_logprobs is not None and leg.num_prompt_tokens > 1:
            node.tell_prompt(leg)
        first = first_index(leg)
        last = first if isinstance(leg, Prefill) else len(token_ids) - 1
        for index in range(first, last + 1):
            node.emit(leg, token_ids[index : index + 1], index, finish if index == len(token_ids) - 1 else "")

    return script
