"""Helper: a node without an engine. It speaks the control protocol over a real socket and answers as a test says."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import zmq

from baton.runtime.clock import host_clock
from baton.wire import links
from baton.wire.drafts import DraftsOfMethod, VerifiedDraft
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import (
    DECODE,
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    NodeStatus,
    Ping,
    Pong,
    Resume,
    Welcome,
    control_identity,
    live_key,
)
from baton.wire.messages.output import Failed, PromptRead, TokenEvent, TokenLogprobs, Tokens
from baton.wire.messages.prefixes import CacheEvents
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.session import Session, number_of
from baton.wire.tiers import TierTokens

LAYOUT = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=2, head_dim=16)] * 2)
FINGERPRINT = "f" * 32
DRAFTS = DraftsOfMethod("ngram", 4, (4, 3), (2, 1))
STATUS = NodeStatus(
    num_running=0,
    num_waiting=0,
    num_free_blocks=64,
    num_cached_blocks=0,
    num_held_blocks=0,
    loop_age_s=0.0,
    drafts=(DRAFTS,),
)
BEAT_S = 0.2
PATIENCE_S = 30.0

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LegMessage: TypeAlias = Prefill | Decode
Script: TypeAlias = Callable[["FakeNode", LegMessage], None]
MessageT = TypeVar("MessageT")
UNNUMBERED = (Hello, Heartbeat, Pong, Resume)


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
        self.session: Session | None = None
        self.live: set[bytes] = set()
        self._unread: list[Any] = []
        self._changed = asyncio.Event()
        self._context, self._address = context, address
        self._loop = asyncio.get_running_loop()
        self._socket = self._dial()
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
        """Send a message of the protocol, as part of the session if it belongs to one."""
        if isinstance(message, UNNUMBERED) or self.session is None:
            self.send_raw(NODE_TO_ROUTER.encode(message))
        else:
            self.send_raw(*self.session.frames(message))

    def send_raw(self, *frames: bytes) -> None:
        """Send any bytes."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._loop.call_soon(self._read)

    def lose(self, message: object) -> None:
        """Say something that gets lost on its way."""
        assert self.session is not None
        self.session.frames(message)

    def cut(self) -> None:
        """The connection breaks, and with it goes what was under way."""
        self._hang_up()

    def dial_again(self) -> None:
        """The connection is made again after a `cut`."""
        self._socket = self._dial()

    def emit(
        self,
        leg: LegMessage,
        token_ids: Sequence[int],
        index: int | None = None,
        finish: str = "",
        cached: int = 0,
        tiers: Sequence[TierTokens] = (),
        draft: VerifiedDraft | None = None,
    ) -> None:
        """Tokens of `leg`, from output `index` on (its first output when None)."""
        logprobs = () if leg.params.logprobs is None else tuple(TokenLogprobs(-0.5, (i,), (-0.5,)) for i in token_ids)
        first = first_index(leg) if index is None else index
        event = TokenEvent(leg.handoff_id, leg.attempt, first, tuple(token_ids), logprobs, finish, cached)
        event.tiers, event.draft = tuple(tiers) or None, draft
        if finish:
            self.live.discard(live_key(leg.handoff_id, leg.attempt))
        self.send(Tokens(self.hello.epoch, (event,)))

    def tell_prompt(self, leg: LegMessage, first: int = 1, num_rows: int | None = None) -> None:
        """Log probabilities of prompt tokens from place `first` on: -p for the token at place p, whose rank is p. Its
        alternatives are the tokens 100, 101, ... with -0.25 each."""
        num_top = leg.params.prompt_logprobs or 0
        last = leg.prompt.num_tokens if num_rows is None else first + num_rows
        top = (*range(100, 100 + num_top), *[-0.25] * num_top)
        row = struct.Struct(f"<fI{num_top}I{num_top}f")
        rows = b"".join(row.pack(-float(place), place, *top) for place in range(first, last))
        self.send(PromptRead(self.hello.epoch, leg.handoff_id, leg.attempt, first - 1, last - first, rows))

    def fail(self, leg: LegMessage, code: str, message: str = "as the test says") -> None:
        """Report that `leg` failed."""
        self.live.discard(live_key(leg.handoff_id, leg.attempt))
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
        self._heart.cancel()
        self._hang_up()

    def _dial(self) -> zmq.Socket[bytes]:
        dialled = links.open_socket(self._context, zmq.DEALER, links.LinkSettings())
        dialled.setsockopt(zmq.IDENTITY, control_identity(self.hello.epoch))
        links.connect(dialled, self._address, links.LinkSettings())
        self._loop.add_reader(dialled.fileno(), self._read)
        return dialled

    def _hang_up(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message, number = ROUTER_TO_NODE.decode(frames[-1]), number_of(frames)
            if number and (self.session is None or not self.session.accept(number)):
                continue
            if not self._is_about_session(message):
                self._unread.append(message)
                self._changed.set()
                self._take_leg(message)

    def _is_about_session(self, message: object) -> bool:
        """Act on a message that tests need not see."""
        session = self.session
        if isinstance(message, Welcome):
            if session is None or session.number != message.session:
                self.session = Session(message.session, NODE_TO_ROUTER)
                self.live.clear()
            return False
        if isinstance(message, Ping) and session is not None and session.number == message.session:
            self.num_pings += 1
            session.acknowledge(message.received)
            if session.lacks(message.sent):
                self.send(Resume(session.number, session.received + 1))
            if self.is_beating:
                self.send(Pong(session.number, session.sent, session.received, b"".join(self.live)))
        elif isinstance(message, Resume) and session is not None:
            for frames in session.since(message.first) or ():
                self.send_raw(*frames)
        return isinstance(message, Ping | Resume)

    def _take_leg(self, message: object) -> None:
        if isinstance(message, Introduce):
            self.send(replace(self.hello, session=self.session.number if self.session else 0))
        elif isinstance(message, Cancel):
            self.live.discard(live_key(message.handoff_id, message.attempt))
        elif isinstance(message, Prefill | Decode):
            self.live |= {live_key(leg.handoff_id, leg.attempt) for leg in choice_legs(message)}
            if self.script is not None:
                for leg in choice_legs(message):
                    self.script(self, leg)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self.is_beating and not self._socket.closed:
                self.send(Heartbeat(self.hello.epoch, self.hello.status))


def choice_legs(leg: LegMessage) -> list[LegMessage]:
    """The leg of each choice, as if it were alone."""
    return [
        replace(leg, handoff_id=handoff_id, params=replace(leg.params, choice=leg.params.choice + number), forks=())
        for number, handoff_id in enumerate((leg.handoff_id, *leg.forks))
    ]


def first_index(leg: LegMessage) -> int:
    """The output index of the first token that `leg` asks for."""
    return len(leg.output_ids)


def answering(token_ids: Sequence[int], finish: str = "stop") -> Script:
    """A script for both roles: the answer is `token_ids`, one message per token, the last with `finish`.

    A prefill node sends the first token it is asked for, a decode node sends all of them, that one included. Before
    that they tell of the prompt what they are asked for.
    """

    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.params.prompt_logprobs is not None and leg.prompt.num_tokens > 1:
            node.tell_prompt(leg)
        first = first_index(leg)
        last = first if isinstance(leg, Prefill) else len(token_ids) - 1
        for index in range(first, last + 1):
            node.emit(leg, token_ids[index : index + 1], index, finish if index == len(token_ids) - 1 else "")

    return script
