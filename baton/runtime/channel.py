"""Messages between two processes of one node, over a pair of sockets that has no name.

Owns the framing, and descriptors that travel with a message. A message is msgpack that msgspec has checked against its
class; whatever else comes is a `ChannelBroken`. Which messages there are is the subclass's knowledge.

Every send and every receive has a deadline, unless a receive is told to wait on: that ends with the other process.
Several threads may send, while one receives.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from baton.wire.errors import BatonError

MAX_MESSAGE_BYTES = 64 * 2**20
_MOST_DESCRIPTORS = 6
_LENGTH = struct.Struct("<I")


class ChannelBroken(BatonError):
    """The other end is gone, stands still, or says what is no message."""

    code = "internal_error"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base class of all messages."""


MessageT = TypeVar("MessageT")


class Channel(Generic[MessageT]):
    """One end of the pair. `closed_by`: who is at the other end, for errors. A subclass has a decoder of its
    messages."""

    encoder: ClassVar = msgspec.msgpack.Encoder()
    decoder: ClassVar[Any]

    def __init__(self, end: socket.socket, closed_by: str) -> None:
        self._socket = end
        self._closed_by = closed_by
        self._descriptors: list[int] = []
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The descriptor of the socket, for `select`."""
        return self._socket.fileno()

    def send(self, message: MessageT, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it. Raises `ChannelBroken`."""
        self.send_encoded(self.encode(message), timeout_s, descriptors)

    @classmethod
    def encode(cls, message: MessageT) -> bytes:
        """A message for `send_encoded`, so that several get it and it is encoded once."""
        body = cls.encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send_encoded(self, frame: bytes, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message that is encoded already, with `descriptors` beside its first byte. Raises `ChannelBroken`
        after `timeout_s` seconds."""
        deadline_s, rest = time.monotonic() + timeout_s, memoryview(frame)
        try:
            with self._sending:
                while num_sent := self._write(rest, descriptors, deadline_s):
                    rest, descriptors = rest[num_sent:], ()
        except OSError as error:
            raise ChannelBroken(f"{self._closed_by} takes no messages: {error}") from None

    def _write(self, rest: memoryview, descriptors: Sequence[int], deadline_s: float) -> int:
        """Wait until something can be sent, and send it. How many bytes; the first one carries descriptors. Raises
        `OSError`."""
        while rest:
            with contextlib.suppress(BlockingIOError, TimeoutError):
                if descriptors:
                    return socket.send_fds(self._socket, [rest[:1]], descriptors, socket.MSG_DONTWAIT)
                # without the timeout of the socket, which is that of whoever receives
                return self._socket.send(rest, socket.MSG_DONTWAIT)
            if not select.select([], [self._socket], [], max(0.0, deadline_s - time.monotonic()))[1]:
                raise TimeoutError("timed out")
        return 0

    @property
    def is_readable(self) -> bool:
        """Whether a message has come, or the other end is gone."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self, timeout_s: float | None) -> MessageT:
        """The next message. Raises `ChannelBroken`, also when none comes within `timeout_s`; None: waits on."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelBroken(f"{self._closed_by} announces a message of {length} bytes")
        try:
            message: MessageT = self.decoder.decode(self._read(length, timeout_s))
        except msgspec.MsgspecError as error:
            raise ChannelBroken(f"{self._closed_by} says what is no message: {error}") from None
        return message

    def take_descriptor(self) -> int:
        """The next descriptor that came with a message; the caller closes it. Raises `ChannelBroken`."""
        if not self._descriptors:
            raise ChannelBroken(f"{self._closed_by} sent no descriptor")
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Close this end; a read at the other end then fails."""
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
