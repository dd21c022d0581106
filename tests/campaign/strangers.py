"""Clients beside the others that send random bodies, a few at a time and not too many a second.

Owns these connections and what was answered. Every wait has a deadline. A status of 5xx is a finding but for those
that docs/api.md has for what a client may try again, and so is a whole request without an answer; whether a fault of
the router excuses it is for `checks` to judge.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.bodies import Sent, make_sent

ANSWERED_S = 100.0
"""No answer to a random body takes longer, beside its steps; one to a good one may wait for a decode node."""
PAUSE_S = 0.5
_CLOSE_S = 2.0
_HEAD_BYTES = 2**16
NONE = 0
_UNAVAILABLE = 503
"""With it a router says that somebody has to come back."""


@dataclass(slots=True)
class Answered:
    """What came of a random body. `status`: 0 where nothing came. `end` and `message` are for `checks.excuse`."""

    sent: Sent
    begun_s: float
    ended_s: float | None = None
    status: int = NONE
    end: str = ""
    message: str = ""

    @property
    def is_well(self) -> bool:
        """Whether this may come without any fault."""
        if self.status == NONE:
            return not self.sent.is_owed_an_answer
        return self.status < 500 or self.status == _UNAVAILABLE

    def __str__(self) -> str:
        took_s = (self.ended_s or time.monotonic()) - self.begun_s
        return f"{self.sent}: {self.status or 'no answer'} after {took_s:.1f} s: {self.message}"


class Strangers:
    """See the module. `statuses` counts all answers; `done` is called for each. `longest_s`: what the tokens of the
    longest answer take, because a body may ask for a whole context."""

    def __init__(
        self, port: int, seed: int, done: Callable[[Answered], None], *, sees: bool, longest_s: float = 0.0
    ) -> None:
        self.statuses: Counter[int] = Counter()
        self.worst_s = 0.0
        self._port, self._seed, self._done, self._sees = port, seed, done, sees
        self._answered_s = ANSWERED_S + longest_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    def start(self, number: int) -> None:
        """Begin to send, so many bodies at a time."""
        self._tasks = [asyncio.ensure_future(self._send_on(place)) for place in range(number)]

    async def stop(self) -> None:
        """Send no more, and wait for what was sent."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    def summary(self) -> str:
        """What was answered, in a line."""
        told = ", ".join(f"{count} {status or 'nothing'}" for status, count in sorted(self.statuses.items()))
        return f"{self.statuses.total()} random bodies, answered by: {told}; the slowest after {self.worst_s:.1f} s"

    async def _send_on(self, number: int) -> None:
        rng = random.Random(f"stranger {self._seed} {number}")
        while not self._is_over:
            sent = await asyncio.to_thread(make_sent, rng, sees=self._sees)
            answered = await answer_to(sent, self._port, self._answered_s)
            self.statuses[answered.status] += 1
            self.worst_s = max(self.worst_s, (answered.ended_s or 0) - answered.begun_s)
            self._done(answered)
            await asyncio.sleep(PAUSE_S * 2 * rng.random())


async def answer_to(sent: Sent, port: int, within_s: float = ANSWERED_S) -> Answered:
    """Send it on a connection of its own; what comes, up to the end of its first piece."""
    answered = Answered(sent, time.monotonic())
    try:
        async with asyncio.timeout(within_s):
            await _exchange(answered, port)
    except TimeoutError:
        answered.message = f"nothing after {within_s:g} s"
    except OSError as error:
        answered.message = answered.message or repr(error)
    answered.ended_s = time.monotonic()
    return answered


async def _exchange(answered: Answered, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writing = asyncio.ensure_future(_write(writer, answered.sent))
    try:
        head = await _head(reader, writing if not answered.sent.is_owed_an_answer else None)
        if head.startswith(b"HTTP/1.1 "):
            answered.status = int(head[9:12])
        if answered.status >= 400:
            answered.message = (head + await reader.read(_HEAD_BYTES))[-300:].decode(errors="replace")
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, sent: Sent) -> None:
    """A router may answer and close before it has read everything."""
    writer.write(sent.head)
    for piece in sent.pieces:
        await asyncio.sleep(sent.pause_s)
        writer.write(piece)
        await writer.drain()


async def _head(reader: asyncio.StreamReader, writing: asyncio.Future[None] | None) -> bytes:
    """What comes first. Where no answer is owed, nobody waits for one for long after all was written."""
    if writing is None:
        return await reader.read(_HEAD_BYTES)
    await asyncio.wait([writing])
    try:
        return await asyncio.wait_for(reader.read(_HEAD_BYTES), _CLOSE_S * random.random())
    except TimeoutError:
        return b""
