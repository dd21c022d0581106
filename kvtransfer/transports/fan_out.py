"""One sender made of several: each takes its part of every block, to another rank of the receiver.

Owns what some of them have taken and others have not: a piece counts as taken when the first has it, and the next one
is taken when all have it. Knows no bytes: what of a block a sender sends is its own knowledge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.transports.base import Move, Sender
from baton.wire.request_key import RequestKey


class FanOutSender:
    """A sender to each rank of a receiver, used as one. None of them is silent or pushes parts."""

    is_silent = False
    pushes_parts = False
    piece_bytes = 2**20

    def __init__(self, senders: Sequence[Sender]) -> None:
        self._senders = senders
        self.writers: Sequence[ProcessIdentity] = tuple(
            dict.fromkeys(writer for sender in senders for writer in sender.writers)
        )
        self._waiting: list[deque[tuple[RequestKey, Sequence[Move]]]] = [deque() for _ in senders]

    @property
    def needs_fence(self) -> bool:
        """Whether one of the senders needs a fence of the receiver."""
        return any(sender.needs_fence for sender in self._senders)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Give the moves to all senders. A sender that takes none now gets them later; until then nothing more is
        accepted."""
        self._push_waiting()
        if any(self._waiting):
            return False
        have_taken = [sender.push(key, moves) for sender in self._senders]
        if not any(have_taken):
            return not self._senders
        for has_taken, waiting in zip(have_taken, self._waiting, strict=True):
            if not has_taken:
                waiting.append((key, moves))
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Raise `NotImplementedError`: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """Notice what has finished at every sender, and give them what waits. Raises `TransferFailed`."""
        for sender in self._senders:
            sender.poll()
        self._push_waiting()

    def wait_on(self) -> Sequence[Any]:
        """Sockets and files that are readable when one of the senders has something to do."""
        return [source for sender in self._senders for source in sender.wait_on()]

    def is_reading(self, key: RequestKey) -> bool:
        """Whether a sender reads blocks of this handoff, or has still to take them."""
        is_waiting = any(each == key for waiting in self._waiting for each, _ in waiting)
        return is_waiting or any(sender.is_reading(key) for sender in self._senders)

    def close(self) -> None:
        """Close all senders, and drop what waits for them."""
        for sender, waiting in zip(self._senders, self._waiting, strict=True):
            waiting.clear()
            sender.close()

    def _push_waiting(self) -> None:
        for sender, waiting in zip(self._senders, self._waiting, strict=True):
            while waiting and sender.push(*waiting[0]):
                waiting.popleft()
