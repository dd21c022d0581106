"""Waiting for a node: how long a request may, and those that cannot even be checked before the first node has joined.

A request is given up when no node takes it within `timeout_s`; 0: at once. Where nobody has said how long, that follows
what starts of nodes have taken: one that comes back takes as long, and longer on a machine that is busier then. The
limits of the model are known from nodes, so while there is no node at all a request waits here, before it is checked
and admitted. Once checked, it waits as a flight (`router/requests/flight.py`). Tells those that listen when nodes have
more room. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.wire.errors import NoNode, Overloaded

_RETRY_S = 1
LEAST_S, MOST_S = 10.0, 60.0
NUM_STARTS = 4
"""How many of the longest start a wait is, unless it was set."""


class NodeWait:
    """How long requests wait for a node, and who waits for the first one. `has_node` says whether a model has any node;
    at most `max_waiting` requests wait here. `num_paused`: requests that wait for their readers, and so are at no
    node."""

    def __init__(self, has_node: Callable[[str], bool], timeout_s: float | None, max_waiting: int) -> None:
        self.num_paused = 0
        self._timeout_s = timeout_s
        self._longest_start_s = 0.0
        self._has_node = has_node
        self._max_waiting = max_waiting
        self._listeners: list[Callable[[], None]] = []
        self._waiting: dict[asyncio.Future[None], None] = {}  # a dictionary keeps the order in which they came

    @property
    def timeout_s(self) -> float:
        """How long a request waits for a node."""
        if self._timeout_s is not None:
            return self._timeout_s
        return min(max(LEAST_S, NUM_STARTS * self._longest_start_s), MOST_S)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def listen(self, on_node_joined: Callable[[], None]) -> None:
        """Call `on_node_joined` whenever a node has joined, or there is more room for another reason."""
        self._listeners.append(on_node_joined)

    async def for_any_node(self, model: str) -> None:
        """Return at once when `model` has a node, otherwise when one joins. Raises `NoNode` when none does,
        `Overloaded` when too many wait."""
        if self._has_node(model):
            return
        if self.timeout_s <= 0:
            raise _no_node()
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait for a node to join")
        try:
            async with asyncio.timeout(self.timeout_s):
                while not self._has_node(model):
                    await self._next_node()
        except TimeoutError:
            raise _no_node() from None

    async def _next_node(self) -> None:
        joined = asyncio.get_running_loop().create_future()
        self._waiting[joined] = None
        try:
            await joined
        finally:
            self._waiting.pop(joined, None)

    def on_node_joined(self, start_s: float) -> None:
        """Let those go on that wait, in the order in which they came. `start_s`: what the node's start took."""
        self._longest_start_s = max(self._longest_start_s, start_s)
        for joined in self._waiting:
            if not joined.done():
                joined.set_result(None)
        self.has_more_room()

    def has_more_room(self) -> None:
        """Tell those that listen."""
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """The router shuts down: nobody waits any more."""
        self._timeout_s = 0.0
        for joined in self._waiting:
            if not joined.done():
                joined.set_exception(_no_node())


def _no_node() -> NoNode:
    return NoNode("no node is available", _RETRY_S)
