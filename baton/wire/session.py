"""A session: one registration of a node at a router. It makes the work messages of both ends arrive once and in order.

Owns, for one of the two ends, the numbers of its messages, those that the other end has not acknowledged, and how far
the other end's have come. Connections may break and be made again meanwhile: whoever misses messages asks for them
(`Resume` of `baton.wire.messages.membership`). Does not own a socket, and has no timers: `Ping` and `Pong` say twice a
second how far both ends are.

The numbers of a session follow on its own random number, so that a message of an earlier session is never taken for one
of this. A numbered message travels as two frames: the number, and the envelope.

Invariants: each message is accepted once, in the order of its number; what was not acknowledged can be sent again, up
to `MAX_UNACKNOWLEDGED_BYTES`; beyond that the session is `is_overfull`, and its owner has to end it. The payload
of media does not count there: a message with media is kept itself, and encoded when it is asked for, so payload exists
once however many sessions have it, and whoever made it bounds how much there is (`baton.router.http.images`).
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Iterator

from baton.wire.codec import Codec
from baton.wire.media import num_payload_bytes
from baton.wire.messages.legs import Decode, Prefill

MAX_UNACKNOWLEDGED_BYTES = 64 * 2**20
_NUMBER = struct.Struct("<Q")
_WINDOW = 2**31
_LOWEST, _NUM_CHOSEN = 2**32, 2**62
_Kept = tuple[int, bytes | Prefill | Decode]
"""What a message counts for, and its envelope, or the message where it has media."""


def new_session_number() -> int:
    """The number of a new session."""
    return _LOWEST + secrets.randbelow(_NUM_CHOSEN)


def number_of(frames: list[bytes]) -> int:
    """The number of a message that came as these frames, 0 when it has none."""
    return _NUMBER.unpack(frames[0])[0] if len(frames) == 2 and len(frames[0]) == _NUMBER.size else 0


class Session:
    """One end of the session `number`, whose messages are of `codec`. `sent` and `received` are the last numbers that
    were given to a message of this end, and accepted from the other."""

    def __init__(self, number: int, codec: Codec) -> None:
        self.number = self.sent = self.received = number
        self._codec = codec
        self._acknowledged = number
        self._asked_at: int | None = None
        self._unacknowledged: deque[_Kept] = deque()
        self._num_bytes = 0

    @property
    def is_untouched(self) -> bool:
        """Whether the other end has neither sent nor acknowledged a message."""
        return self.received == self._acknowledged == self.number

    @property
    def is_overfull(self) -> bool:
        """Whether more is unacknowledged than this end can keep."""
        return self._num_bytes > MAX_UNACKNOWLEDGED_BYTES

    def frames(self, message: object) -> list[bytes]:
        """Number a message and keep it. Raises `InvalidMessage` when it is too large."""
        frame = self._codec.encode(message)
        self.sent += 1
        kept: _Kept = (len(frame), frame)
        if isinstance(message, Prefill | Decode) and message.prompt.media:
            kept = (len(frame) - num_payload_bytes(message.prompt.media), message)
        self._unacknowledged.append(kept)
        self._num_bytes += kept[0]
        return [_NUMBER.pack(self.sent), frame]

    def acknowledge(self, number: int) -> None:
        """The other end has everything up to that number."""
        while self._acknowledged < number <= self.sent:
            self._acknowledged += 1
            self._num_bytes -= self._unacknowledged.popleft()[0]

    def since(self, first: int) -> Iterator[list[bytes]] | None:
        """The frames of every message from number `first` on, one after another; None when some of them are not kept
        any more."""
        if not self._acknowledged < first <= self.sent + 1:
            return None
        kept = [each for _, each in list(self._unacknowledged)[first - self._acknowledged - 1 :]]
        frames = (each if isinstance(each, bytes) else self._codec.encode(each) for each in kept)
        return ([_NUMBER.pack(number), frame] for number, frame in enumerate(frames, first))

    def accept(self, number: int) -> bool:
        """Whether a message that has come is the next one. Any other must be dropped."""
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def lacks(self, sent: int) -> bool:
        """Whether the other end, which has sent up to that number, has to send something again."""
        return self.received < sent < self.received + _WINDOW

    def must_ask(self, number: int) -> bool:
        """Whether a message that was not accepted shows a gap that nobody has asked about."""
        if self._asked_at == self.received or not self.lacks(number - 1):
            return False
        self._asked_at = self.received
        return True
