"""The inbox of an answer: a queue between the relay and the task that writes to the client.

All requests of an answer share one inbox, and one task takes from it. Deliveries that came while that task was busy are
taken together, and so they are written together. An inbox that holds `MAX_DUE` deliveries `is_behind`: its requests
stop until they are taken (`router/requests/flight.py`), and a client that reads nothing is dropped when the deadline of
a write passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.router.requests.output import Delivery
from baton.wire.errors import BatonError

MAX_DUE = 1024
"""More than one turn of the event loop can bring, so that a busy router is not taken for a slow reader."""
_MAX_TAKEN = 64


class Inbox:
    """Holds deliveries in the order of their arrival, each with the index of its choice, and the error that ends the
    answer."""

    def __init__(self) -> None:
        self._due: list[tuple[int, Delivery]] = []
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._when_read: list[Callable[[], None]] = []

    @property
    def is_behind(self) -> bool:
        """Whether its reader does not keep up."""
        return len(self._due) >= MAX_DUE

    def when_read(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when everything has been taken."""
        self._when_read.append(callback)

    def put(self, index: int, delivery: Delivery) -> None:
        """Add a delivery for choice `index`."""
        self._due.append((index, delivery))
        self._wake()

    def fail(self, error: BatonError) -> None:
        """No more deliveries come: `take` raises `error` once all of them have been taken. Only the first error
        counts."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[tuple[int, Delivery]]:
        """Return what has come since the last call: at least one delivery, and at most `_MAX_TAKEN`."""
        if self._due:
            # deliveries were waiting already: other tasks run first, so that one busy answer does not slow them down
            await asyncio.sleep(0)
        while not self._due:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken = self._due[:_MAX_TAKEN]
        del self._due[:_MAX_TAKEN]
        if self._when_read and not self._due:
            callbacks, self._when_read = self._when_read, []
            for callback in callbacks:
                callback()
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
