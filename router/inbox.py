"""Between the relay and the task that writes an answer: what is due to its client.

One inbox for all requests of an answer, one task that takes. What came while that task was busy is taken together, so
it leaves together. An inbox holds no more than the tokens its requests may have; a client that takes nothing is dropped
by the deadline of its write.
"""

from __future__ import annotations

import asyncio

from router.journal import Delivery
from wire.errors import BatonError

_MAX_TAKEN = 64


class Inbox:
    """Deliveries as they come, each with the index of its choice, and the error that ends the answer."""

    def __init__(self) -> None:
        self._due: list[tuple[int, Delivery]] = []
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, delivery: Delivery) -> None:
        """A delivery for choice `index`."""
        self._due.append((index, delivery))
        self._wake()

    def fail(self, error: BatonError) -> None:
        """Nothing good comes any more: `error` is raised when all deliveries have been taken. The first one counts."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[tuple[int, Delivery]]:
        """What has come since the last call, at least one and not more than a turn of the loop should take."""
        if self._due:
            # the taker is behind: the others come before its next share
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
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
