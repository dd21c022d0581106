"""Values handed from one thread to another, with something to wait on.

Owns the queue and its wake-up. What is put in first comes out first, nothing is lost, and `wakeup` is readable as long
as something may be waiting.

Bound: none of its own. Whoever puts things in says what bounds them.
"""

from __future__ import annotations

import collections
import contextlib
import socket
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Mailbox(Generic[ItemT]):
    """Any number of threads put, one takes."""

    def __init__(self) -> None:
        self._items: collections.deque[ItemT] = collections.deque()
        self._is_signalled = False
        self.wakeup, self._signal = socket.socketpair()
        self.wakeup.setblocking(False)
        self._signal.setblocking(False)

    def put(self, item: ItemT) -> None:
        """Add an item and wake the taker."""
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake the taker without an item."""
        if self._is_signalled:
            return  # the taker clears the mark before it looks, so it has not looked yet
        self._is_signalled = True
        # a full pipe wakes the taker as well; a closed one has no taker
        with contextlib.suppress(OSError):
            self._signal.send(b"\0")

    def take(self) -> list[ItemT]:
        """Everything that is there."""
        self._is_signalled = False
        # whether or not it was marked: the byte of a wake-up may come after its item was taken
        with contextlib.suppress(OSError):
            self.wakeup.recv(64)
        found = []
        while self._items:
            found.append(self._items.popleft())
        return found

    def close(self) -> None:
        """No more wake-ups."""
        self.wakeup.close()
        self._signal.close()
