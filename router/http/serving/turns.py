"""Lets requests begin a few at a time, so that a burst of them does not hold the event loop for seconds.

Owns the order in which requests begin: that of their arrival. Between two turns the loop does everything else that is
due. Invariant: whoever waits is let through, as long as the loop turns.
"""

from __future__ import annotations

import asyncio
from collections import deque

_PER_TURN = 4


class Turns:
    """Lets requests begin, `_PER_TURN` of them in each turn of the event loop that it lives on."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_left = _PER_TURN
        self._next: asyncio.Handle | None = None

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._turn, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next, self._num_left = None, _PER_TURN
        while self._waiting and self._num_left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a client may have left meanwhile
                waiter.set_result(None)
                self._num_left -= 1
        if self._waiting:
            self._next = loop.call_soon(self._turn, loop)
