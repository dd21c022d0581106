"""What the driver of an engine and its other ranks say to each other: plain values over a pair of sockets.

Owns the messages, their framing, and a descriptor that travels with one of them. Both ends are processes of one node:
the sockets have no name that anybody else could connect to. A message is msgpack that msgspec has checked against its
class; whatever else comes is a `ChannelBroken`.

Every send and every receive has a deadline, but for a rank's wait for its next order: that ends with the driver.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import msgspec

from wire.errors import BatonError

MAX_MESSAGE_BYTES = 64 * 2**20
_MOST_DESCRIPTORS = 5
_LENGTH = struct.Struct("<I")
Setting: TypeAlias = str | int | float | bool


class ChannelBroken(BatonError):
    """The other end is gone, stands still, or says what is no message."""

    code = "internal_error"


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Begin(_Message, frozen=True):
    """Driver: the rank is process `number` of those of `settings`, which are the fields of `EngineSettings`. The ranks
    of a stage find each other in a file whose name begins with `meeting`, and know each other by `nonce`."""

    number: int
    settings: dict[str, Setting]
    meeting: str
    nonce: bytes
    num_threads: int


class UsePool(_Message, frozen=True):
    """Driver: the KV pool has `num_blocks` blocks. A descriptor comes with it, of a file of `num_bytes` bytes. In a
    later stage come the receiver's end and the memory of the passage from the stage before, and in an earlier stage the
    sender's end and the memory of the passage to the next."""

    num_blocks: int
    num_bytes: int


class Share(_Message, frozen=True):
    """One sequence's part of a step, as `SequenceShare`. `blocks`: its block table, int32."""

    start: int
    num_tokens: int
    blocks: bytes


class Compute(_Message, frozen=True):
    """Driver: compute a step. token_ids: int64, all sequences one after another. `scored` and `due`: the rows, int64,
    of which logits are wanted, in this order."""

    shares: tuple[Share, ...]
    token_ids: bytes
    scored: bytes
    due: bytes


class Stop(_Message, frozen=True):
    """Driver: end."""


class Here(_Message, frozen=True):
    """Rank: it runs and will meet the others now."""


class Loaded(_Message, frozen=True):
    """Rank: its share of the weights is there."""


class Ready(_Message, frozen=True):
    """Rank: it computes what it is told from now on."""


class Failed(_Message, frozen=True):
    """Rank: it ends. `is_own`: not only because another rank did."""

    reason: str
    is_own: bool


Order: TypeAlias = Begin | UsePool | Compute | Stop
Report: TypeAlias = Here | Loaded | Ready | Failed


class Channel:
    """One end of the pair. `closed_by`: who is at the other end, for errors."""

    _encoder: ClassVar = msgspec.msgpack.Encoder()
    _decoder: ClassVar = msgspec.msgpack.Decoder(Order | Report)

    def __init__(self, end: socket.socket, closed_by: str) -> None:
        self._socket = end
        self._closed_by = closed_by
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Order | Report, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it. Raises `ChannelBroken`."""
        self.send_encoded(self.encode(message), timeout_s, descriptors)

    @classmethod
    def encode(cls, message: Order | Report) -> bytes:
        """A message for `send_encoded`, so that several get it and it is encoded once."""
        body = cls._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send_encoded(self, frame: bytes, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """See `send`."""
        try:
            self._socket.settimeout(timeout_s)
            if descriptors:
                # the first byte carries them
                socket.send_fds(self._socket, [frame[:1]], descriptors)
                frame = frame[1:]
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelBroken(f"{self._closed_by} takes no messages: {error}") from None

    def receive(self, timeout_s: float | None) -> Order | Report:
        """The next message. Raises `ChannelBroken`, also when none comes within `timeout_s`; None: waits on."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelBroken(f"{self._closed_by} announces a message of {length} bytes")
        try:
            message: Order | Report = self._decoder.decode(self._read(length, timeout_s))
        except msgspec.MsgspecError as error:
            raise ChannelBroken(f"{self._closed_by} says what is no message: {error}") from None
        return message

    def take_descriptor(self) -> int:
        """The next descriptor that came with a message; the caller closes it. Raises `ChannelBroken`."""
        if not self._descriptors:
            raise ChannelBroken(f"{self._closed_by} sent no descriptor")
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Close this end. Whoever reads at the other end learns that."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _read(self, num_bytes: int, timeout_s: float | None) -> bytes:
        read = bytearray()
        try:
            self._socket.settimeout(timeout_s)
            while len(read) < num_bytes:
                piece, descriptors, _, _ = socket.recv_fds(self._socket, num_bytes - len(read), _MOST_DESCRIPTORS)
                self._descriptors += descriptors
                if not piece:
                    raise ChannelBroken(f"{self._closed_by} is gone")
                read += piece
        except TimeoutError:
            raise ChannelBroken(f"{self._closed_by} said nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelBroken(f"{self._closed_by} is gone: {error}") from None
        return bytes(read)
