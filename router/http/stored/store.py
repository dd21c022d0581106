"""Stored responses beside the event loop: every look into the database has a thread, a place in a bounded queue and a
deadline.

Owns that thread, the figures, and what a failure of the database means: a response that cannot be stored is answered
all the same, and counted; one that cannot be read now is `Overloaded`. Does not know SQL, nor what a response says.

Lives on one event loop. Invariant: a response of which its client is told that it was not stored is not found later.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.http.stored.conversations import Conversations
from baton.router.http.stored.database import Database
from baton.router.http.stored.locks import Locks
from baton.router.http.stored.records import Turn, Unfit
from baton.router.http.stored.responses import Responses
from baton.runtime.threads import StartedThreads
from baton.wire.errors import Overloaded

MAX_QUEUED = 64
PUT_S = 2.0
"""The end of an answer waits for this."""
READ_S = 10.0
_EXPIRE_EVERY_S = 60.0
_CLOSE_S = 2.0
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class ResponseStore(Collector):
    """The stored responses and conversations of one router. `responses` and `conversations` block, so they are for
    `ask`."""

    def __init__(self, database: Database) -> None:
        self.responses = Responses(database)
        self.conversations = Conversations(database)
        self.locks = Locks()
        self._database = database
        self._thread = StartedThreads(1, "stored responses")
        self._thread.start()
        self._num_queued = 0
        self._num_refused = 0
        self._is_failing = self._is_stuck = False
        self._figures = (0, 0, 0)
        self._expiry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Remove what is too old, now and then, until `close`."""
        self._expiry = asyncio.get_running_loop().create_task(self._expire())

    async def close(self) -> None:
        """Let what runs finish, for a moment, and close the database."""
        if self._expiry is not None:
            self._expiry.cancel()
        closed = self._thread.submit(self._database.close)
        self._thread.shutdown(wait=False)
        await asyncio.wait([asyncio.wrap_future(closed)], timeout=_CLOSE_S)

    async def put(self, owner: str, response_id: str, make: Callable[[], Turn]) -> None:
        """Store what `make` returns. Raises `Unfit`, which says why it is not stored."""
        try:
            undo = partial(self._forget, owner, response_id)
            await self._run(lambda: self.responses.put(owner, make()), PUT_S, undo)
        except Overloaded:
            self._num_refused += 1
            raise Unfit("the store of responses cannot be reached") from None
        except Unfit:
            self._num_refused += 1
            raise

    async def ask(self, work: Callable[[], _Result]) -> _Result:
        """What `work` finds in the database. Raises `Overloaded`, and what `work` raises."""
        return await self._run(work, READ_S)

    def collect(self) -> Iterable[Metric]:
        """How many responses there are, their bytes, and what was not stored."""
        num_responses, num_bytes, num_evicted = self._figures
        yield GaugeMetricFamily("baton:stored_responses", "Responses that are stored", num_responses)
        yield GaugeMetricFamily("baton:stored_response_bytes", "Bytes that they take", num_bytes)
        doc = "Stored responses that gave way to others"
        yield CounterMetricFamily("baton:stored_responses_evicted", doc, num_evicted)
        doc = "Responses that should have been stored and were not"
        yield CounterMetricFamily("baton:responses_not_stored", doc, self._num_refused)

    async def _run(
        self, work: Callable[[], _Result], within_s: float, undo: Callable[[], None] | None = None
    ) -> _Result:
        """The result of `work`, which is done all the same when it comes too late; `undo` follows it then."""
        if self._is_stuck or self._num_queued >= MAX_QUEUED:
            raise _unreachable()
        self._num_queued += 1
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)
        running.add_done_callback(self._note_done)
        try:
            async with asyncio.timeout(within_s):
                result = await asyncio.shield(running)  # what is queued counts until it is done
        except TimeoutError:
            self._is_stuck = True
            if undo is not None:
                self._thread.submit(undo)
            self._fail("it takes too long")
            raise _unreachable() from None
        except (sqlite3.Error, OSError) as error:
            self._fail(str(error))
            raise _unreachable() from None
        self._is_failing = False
        return result

    def _work(self, work: Callable[[], _Result]) -> _Result:
        """In the thread."""
        result, database = work(), self._database
        self._figures = (database.num_responses, database.num_bytes, database.num_evicted)
        return result

    def _note_done(self, done: asyncio.Future[_Result]) -> None:
        self._num_queued -= 1
        self._is_stuck = False
        if not done.cancelled():
            done.exception()  # nobody may be left to ask for it

    def _fail(self, reason: str) -> None:
        """Say so once, until it works again."""
        if not self._is_failing:
            _log.error("stored responses cannot be reached: %s", reason)
        self._is_failing = True

    def _forget(self, owner: str, response_id: str) -> None:
        """Remove what may have been stored too late; its client was told that it was not."""
        try:
            self.responses.delete(owner, response_id)
        except (sqlite3.Error, OSError) as error:
            _log.error("a response may be stored of which its client was told that it is not: %s", error)

    async def _expire(self) -> None:
        while True:
            try:
                await self._run(self._database.expire, READ_S)
            except Overloaded:
                _log.debug("stored responses that are too old are removed later")
            await asyncio.sleep(_EXPIRE_EVERY_S)


def _unreachable() -> Overloaded:
    return Overloaded("stored responses cannot be reached now: try again later")
