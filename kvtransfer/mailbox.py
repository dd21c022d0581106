"""A queue between threads, with a socket on which the taker can wait.

Owns the queue and its wake-up. Items come out in the order in which they were put in, none is lost, and `wakeup` is
readable as long as items may be waiting.

Bound: the mailbox itself sets none; each caller of `put` documents what bounds its items.
"""

from __future__ import annotations

import collections
import contextlib
import socket
from typing import Any, Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")


class Takeable(Protocol[ItemT]):
    """The taker's end of a mailbox."""

    @property
    def wakeup(self) -> Any:
        """What is readable as long as items may be waiting."""
        ...

    def take(self) -> list[ItemT]:
        """All items that are waiting, oldest first."""
        ...

    def close(self) -> None:
        """Wake nobody any more."""
        ...


class Mailbox(Generic[ItemT]):
    """Any number of threads put items in; one thread takes them."""

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
            return  # the taker clears the mark before it takes items, so it will still find this one
        self._is_signalled = True
        # a full socket wakes the taker as well, and a closed one has no taker
        with contextlib.suppress(OSError):
            self._signal.send(b"\0")

    def take(self) -> list[ItemT]:
        """All items that are waiting, oldest first."""
        self._is_signalled = False
        # even without a mark, because the byte of a wake-up may arrive after its item was taken
        with contextlib.suppress(OSError):
            self.wakeup.recv(64)
        found = []
        while self._items:
            found.append(self._items.popleft())
        return found

    def close(self) -> None:
        """Close the sockets; there are no more wake-ups."""
        self.wakeup.close()
        self._signal.close()
