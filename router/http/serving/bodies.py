"""What bodies may take before they are requests: of memory, and of the one thread that parses large ones.

Owns how many bytes are held, in all and of each client, and the order in which large bodies are parsed: one at a time,
because a second thread would only take the interpreter from the event loop more often, and fairly by bytes between
clients. A client is an API key or, on a router without keys, an address. Does not know what is in a body.

Lives on one event loop. Invariants: what a body holds is given back when its `place` ends. Freed memory goes back to
the system soon after a large body: the allocator would keep it for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from baton.router.http.access.guard import IDENTITY
from baton.router.http.admission.fair_queue import FairQueue
from baton.router.http.serving.limits import HttpLimits
from baton.runtime.process import return_freed_memory
from baton.runtime.threads import StartedThreads
from baton.wire.errors import Overloaded

MAX_INLINE_BYTES = 2**14
"""A body of at most so many is parsed by the event loop itself, in a millisecond or two."""
_RETURN_MEMORY_AFTER_S = 1.0
_ResultT = TypeVar("_ResultT")


class Bodies:
    """The request bodies of one application that are held in memory."""

    def __init__(self, limits: HttpLimits) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._bytes_of: Counter[str] = Counter()
        self._thread = StartedThreads(1, "large-bodies")
        self._thread.start()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._is_parsing = False
        self._next_return: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Parse no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._next_return is not None:
            self._next_return.cancel()

    @contextmanager
    def place(self, http: web.Request) -> Iterator[Place]:
        """Room for the body of one request, as long as it is needed."""
        identity = http.get(IDENTITY)
        place = Place(self, (http.remote or "") if identity is None else identity.name)
        try:
            yield place
        finally:
            self._change(place.client, -place.num_bytes)
            if place.num_bytes > MAX_INLINE_BYTES and self._next_return is None:
                loop = asyncio.get_running_loop()
                self._next_return = loop.call_later(_RETURN_MEMORY_AFTER_S, self._return_memory)

    def add(self, client: str, num_bytes: int) -> None:
        """Count `num_bytes` bytes more that are held for `client`. Raises `Overloaded` when that is too much."""
        limits = self._limits
        limit = max(limits.max_body_bytes, limits.max_held_bytes_per_client)
        if self._bytes_of[client] + num_bytes > limit:
            raise Overloaded(f"the bodies that this client sends at once are larger than {limit:,} bytes together")
        if self.num_bytes + num_bytes > max(limit, limits.max_held_bytes):
            raise Overloaded("the bodies that all clients send at once are too large together: try again")
        self._change(client, num_bytes)

    async def parse(self, place: Place, parse: Callable[[], _ResultT]) -> _ResultT:
        """The result of `parse` for the body in `place`. A small body is parsed here, others in the thread when their
        turn has come. Raises what `parse` raises, and `Overloaded` when its turn does not come in time."""
        if place.num_bytes <= MAX_INLINE_BYTES:
            return parse()
        await self._take_turn(place)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, parse)
        finally:
            self._end_turn()

    async def _take_turn(self, place: Place) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(place.client, turn, place.num_bytes, 0)
        self._give_turn()
        try:
            async with asyncio.timeout(self._limits.parse_wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            self._waiting.remove(place.client, turn)
            if turn.done() and not turn.cancelled():
                self._end_turn()
            if isinstance(error, TimeoutError):
                raise Overloaded("many large bodies wait to be read: try again") from None
            raise

    def _give_turn(self) -> None:
        while len(self._waiting) and not self._is_parsing:
            turn = self._waiting.pop()
            if not turn.done():  # a client may have left meanwhile
                self._is_parsing = True
                turn.set_result(None)

    def _end_turn(self) -> None:
        self._is_parsing = False
        self._give_turn()

    def _change(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[client] += num_bytes
        if not self._bytes_of[client]:
            del self._bytes_of[client]

    def _return_memory(self) -> None:
        self._next_return = None
        self._thread.submit(return_freed_memory)


@dataclass(slots=True)
class Place:
    """The room of one body. `client` is whose it is."""

    bodies: Bodies
    client: str
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Count the body's next bytes. Raises `Overloaded`."""
        self.bodies.add(self.client, num_bytes)
        self.num_bytes += num_bytes


BODIES = web.AppKey("bodies", Bodies)
"""Where an application keeps them."""
