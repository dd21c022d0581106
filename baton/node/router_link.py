"""A node's connection to one router: registration, messages in, tokens out.

Owns the control socket and the session, and knows whether the router lives. Does not know what the messages ask for,
nor of other routers (`baton.node.router_links`).

The router may come later than the node, restart, pause, or vanish, and the connection may break. `Hello` is sent at
start, whenever a router says that it does not know us, and when its Ping names a session that is not ours. A new
session, or `ROUTER_TIMEOUT_S` without a word, makes every earlier request void; after such a silence, and after a
handshake that ZMQ does not try again, the node dials again. Within a session nothing is lost (`baton.wire.session`), so
a pause of the router or a short cut of the connection changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from baton.engine.scheduler.reading import RowsRead
from baton.node.borrower import Arrived
from baton.node.events import prompt_read
from baton.wire import links
from baton.wire.errors import BatonError, InvalidMessage, Refused
from baton.wire.link_watch import DIAL_PAUSE_S, open_watched
from baton.wire.messages.legs import HandedOver, HandOver
from baton.wire.messages.membership import (
    LIVE_KEY_BYTES,
    Hello,
    Introduce,
    Leaving,
    NodeStatus,
    Ping,
    Pong,
    Refusal,
    Resume,
    Welcome,
    control_identity,
    live_key,
)
from baton.wire.messages.output import Failed, TokenEvent, Tokens
from baton.wire.messages.prefixes import CacheEvents, Lend, Pulled
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.request_key import RequestKey, owner_of_epoch
from baton.wire.session import Session, number_of

ROUTER_TIMEOUT_S = 10.0
NEXT_KEY_S = 3.0
"""For so long a router with two keys is waited for before it is dialled by the other one."""
LEAVE_WAIT_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 30.0
_CLOSE_LINGER_MS = 500
_MAX_HASHES = 2**16
_MAX_LIVE = 2**20 // LIVE_KEY_BYTES
_log = logging.getLogger(__name__)


class RouterLink:
    """Registers with the router at `address` by `hello` with a fresh status. Used by the engine loop. `owner`: how the
    ids of this router's requests begin, b"" before it is known. `was_registered`: it has taken this node before."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: links.LinkSettings,
        hello: Hello,
        status: Callable[[], NodeStatus],
        now_s: float,
    ) -> None:
        self.socket, self._watch = open_watched(context, zmq.DEALER, settings)
        self.socket.setsockopt(zmq.IDENTITY, control_identity(hello.epoch))
        self.address, self._settings, self._num_dialled = address, settings, 0
        self._dialled = links.connect(self.socket, address, settings)
        self.num_rejected_messages = 0
        self._hello = hello
        self._status = status
        self._epoch = hello.epoch
        self._session: Session | None = None
        self.owner = b""
        self.was_registered = self._is_void = self.owes_pong = False
        self._heard_s = self._dialled_s = self._retry_s = now_s
        self._retry_delay_s = FIRST_RETRY_S
        self._left_at: int | None = None
        self._leave_until_s = 0.0
        self._introduce()

    @property
    def is_registered(self) -> bool:
        """Whether a router knows this node, as far as can be told."""
        return self._session is not None

    @property
    def session_number(self) -> int:
        """The number of the session that it is in, 0 without one."""
        return 0 if self._session is None else self._session.number

    def receive(self, now_s: float) -> tuple[list[Any], bool]:
        """(requests of the router in order, whether everything that it asked before them is void now). Raises `Refused`
        when the router does not take this node, unless it has had it before."""
        requests: list[Any] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = ROUTER_TO_NODE.decode(frames[-1])
            except InvalidMessage as error:
                self.reject(str(error))
                continue
            except Refused as error:  # it has another version of the protocol
                if self.is_registered:  # or not, since it had this one: the message was damaged
                    self.reject(str(error))
                else:
                    self.refused(str(error), now_s)
                continue
            self._heard_s = now_s
            if number := number_of(frames):
                if self._accepts(number):
                    requests.append(message)
            elif self._meet(message, now_s):
                requests.clear()
        self._look_for_silence(now_s)
        if not self.is_registered:
            requests.clear()
        is_void, self._is_void = self._is_void, False
        return requests, is_void

    def reject(self, why: str) -> None:
        """Count a message of the router that is not acted on."""
        self.num_rejected_messages += 1
        _log.warning("message from the router rejected: %s", why)

    def send(self, message: object) -> None:
        """Send one message. It arrives although the connection breaks meanwhile; it is dropped when no router knows
        this node, or when the session ends before."""
        if self._session is None:
            return
        self._send_frames(self._session.frames(message))
        if self._session.is_overfull:
            self._end_session("the router does not take what is sent to it")

    def send_tokens(self, events: Sequence[TokenEvent]) -> None:
        """Send the tokens of all requests of a step in one message."""
        if events:
            self.send(Tokens(self._epoch, tuple(events)))

    def send_read(self, key: RequestKey, read: RowsRead) -> None:
        """What a step read of a prompt, in as many messages as needed."""
        for message in prompt_read(key, read, self._epoch):
            self.send(message)

    def send_failed(self, handoff_id: bytes, attempt: int, error: BatonError) -> None:
        """Tell the router that this attempt ended without finishing."""
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

    def answer_ping(self, live: Iterable[RequestKey], num_other_legs: int = 0, num_other_tokens: int = 0) -> None:
        """Answer the router's Ping, which is owed. To be called when everything that was received has been acted on and
        reported.

        `live` are this router's attempts that are known to this node then. For the rest see `Pong`.
        """
        session, self.owes_pong = self._session, False
        if session is not None:
            keys = b"".join([live_key(*key) for key in live][:_MAX_LIVE])
            pong = Pong(session.number, session.sent, session.received, keys, num_other_legs, num_other_tokens)
            self._send_unnumbered(pong)

    def send_handed_over(self, order: HandOver, num_tokens: int) -> None:
        """Answer a `HandOver`."""
        self.send(HandedOver(self._epoch, order.handoff_id, order.next_attempt, num_tokens))

    def send_lent(self, order: Lend, num_tokens: int) -> None:
        """Answer a `Lend`."""
        self.send(HandedOver(self._epoch, order.handoff_id, order.attempt, num_tokens))

    def send_pulled(self, arrived: Arrived) -> None:
        """Answer a `Pull` that has brought its prefix."""
        figures = arrived.figures
        self.send(Pulled(self._epoch, *arrived.key, arrived.num_tokens, figures.num_bytes, figures.transfer_us))

    def leave(self, now_s: float) -> None:
        """Ask the router to route nothing more here."""
        self.send(Leaving(self._epoch))
        self._leave_until_s = now_s + LEAVE_WAIT_S
        self._left_at = None if self._session is None else self._session.sent

    def has_left(self, now_s: float) -> bool:
        """Whether everything has come that the router sent before it heard that this node leaves; also when it does not
        answer for `LEAVE_WAIT_S`."""
        return self._left_at is None or now_s >= self._leave_until_s

    def close(self) -> None:
        """Close the connection; what was sent before has `_CLOSE_LINGER_MS` to reach the router."""
        self._watch.close()
        self.socket.close(linger=_CLOSE_LINGER_MS)

    def _introduce(self) -> None:
        self._send_unnumbered(replace(self._hello, status=self._status(), session=self.session_number))

    def _meet(self, message: object, now_s: float) -> bool:
        """Act on a message that is about the session; returns True when everything asked before is void."""
        session = self._session
        if isinstance(message, Welcome):
            return self._begin_session(message)
        if isinstance(message, Refusal):
            return self.refused(message.message, now_s)
        if isinstance(message, Introduce) or (isinstance(message, Ping) and not self._is_of_session(message.session)):
            if now_s >= self._retry_s:
                self._introduce()
        elif isinstance(message, Ping) and session is not None:
            self.owes_pong = True
            session.acknowledge(message.received)
            if session.lacks(message.sent):
                self._ask(session)
            elif self._left_at is not None and message.received >= self._left_at:
                self._left_at = None
        elif isinstance(message, Resume) and session is not None and self._is_of_session(message.session):
            again = session.since(message.first)
            if again is None:
                self._end_session("the router misses messages that are not kept any more")
                return True
            for frames in again:
                self._send_frames(frames)
        return False

    def _accepts(self, number: int) -> bool:
        session = self._session
        if session is None or session.accept(number):
            return session is not None
        if session.must_ask(number):
            self._ask(session)
        return False

    def _ask(self, session: Session) -> None:
        self._send_unnumbered(Resume(session.number, session.received + 1))

    def _is_of_session(self, number: int) -> bool:
        return self._session is not None and self._session.number == number

    def _begin_session(self, welcome: Welcome) -> bool:
        if self._is_of_session(welcome.session):
            return False
        self._session, self.owner = Session(welcome.session, NODE_TO_ROUTER), owner_of_epoch(welcome.epoch)
        self._retry_delay_s = FIRST_RETRY_S
        self.was_registered = self._is_void = True
        return True

    def _end_session(self, reason: str) -> None:
        _log.warning("%s: its requests are dropped", reason)
        self._session = None
        self._is_void = True

    def refused(self, reason: str, now_s: float) -> bool:
        """Router and node do not go together: end the session, and ask again later. Returns True. Raises `Refused` when
        this router has never had the node."""
        if now_s < self._retry_s and self._session is None:
            return True
        delay_s = self._retry_delay_s
        self._retry_s, self._retry_delay_s = now_s + delay_s, min(2 * delay_s, LAST_RETRY_S)
        if not self.was_registered:
            raise Refused(f"the router at {self.address} refused this node: {reason}")
        _log.error("the router at %s refuses this node, which asks again in %g s: %s", self.address, delay_s, reason)
        if self._session is not None:
            self._end_session("the router has refused this node")
        return True

    def _look_for_silence(self, now_s: float) -> None:
        if now_s - self._heard_s >= ROUTER_TIMEOUT_S and self._session is not None:
            self._end_session(f"the router was silent for {ROUTER_TIMEOUT_S:g} s")
        patience_s = ROUTER_TIMEOUT_S if links.num_expected_keys(self._settings) == 1 else NEXT_KEY_S
        waited_s = now_s - max(self._heard_s, self._dialled_s)
        if waited_s >= patience_s or (waited_s >= DIAL_PAUSE_S and self._watch.look()):
            self._dial_again(now_s)

    def _dial_again(self, now_s: float) -> None:
        """Make a new connection: somebody else may have taken this node's identity, and its answers with it; or the
        router has another of the keys by which it may be known; or a bit of the handshake was turned on its way."""
        self._dialled_s = now_s
        self._num_dialled += 1
        self.socket.disconnect(self._dialled)
        self._watch.dialled()
        self._dialled = links.connect(self.socket, self.address, self._settings, self._num_dialled)
        self._introduce()

    def _send_unnumbered(self, message: object) -> None:
        self._send_frames([NODE_TO_ROUTER.encode(message)])

    def _send_frames(self, frames: list[bytes]) -> None:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            _log.debug("the queue to the router is full")  # the router will ask for what it misses
