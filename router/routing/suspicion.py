"""Whether nodes die of a request: with which nodes it was lost, and which it may still be given to.

A request that makes a program crash does so when a node begins to compute it, or computes on from where it was. So a
loss is suspicious when the node had not said anything of the attempt yet. That happens to innocent requests too, when
nodes die for other reasons: therefore nothing is refused for two such losses. But a request that was lost with two
nodes, the last time suspiciously, is confined: these nodes get it again, once they have been started again, and no
third one is put at risk. When they do not come back in time it may go anywhere, so that no innocent request is lost for
want of them. Confined requests begin one at a time at each node (`Probation`), so that one that dies then has died of
that request and not of another. With the third suspicious loss a request ends, a little later
(`baton.router.requests.retries`). A node that comes back in the same life was not dead, and its loss is forgotten.
Nodes that are lost in the same moment are one loss. What ends an attempt may hide that another node has died of it: one
that is gone when the next attempt begins, and had not said anything of the one before, counts too, unless a loss that
counts has ended that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.router.nodes.registry import Node
from baton.wire.errors import RequestFailed
from baton.wire.messages.membership import DECODE

MAX_SUSPICIOUS = 3
AGAIN_AND_AGAIN = "nodes were lost again and again as they began to compute this request"
MAX_WAIT_S = 5.0
"""A confined request waits for its nodes no longer. A node that was killed takes a few seconds to start again."""
_NUM_NODES = 2


@dataclass(frozen=True, slots=True)
class _Loss:
    node_id: str
    is_decode: bool
    is_suspicious: bool
    behind_epoch: int | None = None
    """Of the node whose loss has ended the attempt: while that counts, this one does not."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The nodes, by id, that a request may be given to. No decode nodes: only prefill nodes were lost with it, so any
    decode node will do, which computes no prompt. `is_lifted`: any node will do that no other confined request begins
    at."""

    prefills: frozenset[str]
    decodes: frozenset[str]
    is_lifted: bool = False


class Suspicion:
    """The nodes that were lost with one request, and what follows for its next attempt."""

    def __init__(self) -> None:
        self._losses: dict[int, _Loss] = {}
        self._silent: dict[int, _Loss] = {}
        self._is_lifted = False

    @property
    def is_certain(self) -> bool:
        """Whether the request has to end."""
        return sum(loss.is_suspicious for loss in self._counted()) >= MAX_SUSPICIOUS

    @property
    def confinement(self) -> Confinement | None:
        """Which nodes may still be given the request; None: all."""
        losses = self._counted()
        if not losses or not losses[-1].is_suspicious or len({loss.node_id for loss in losses}) < _NUM_NODES:
            return None
        return Confinement(
            frozenset(loss.node_id for loss in losses if not loss.is_decode),
            frozenset(loss.node_id for loss in losses if loss.is_decode),
            self._is_lifted,
        )

    def wait_s(self, node_wait_s: float) -> float:
        """How long to wait for a node that the request may be given to."""
        confinement = self.confinement
        return node_wait_s if confinement is None or confinement.is_lifted else min(node_wait_s, MAX_WAIT_S)

    def lift(self) -> bool:
        """The nodes have not come back: the request may go anywhere, until the next loss. False if it may already."""
        confinement = self.confinement
        self._is_lifted = confinement is not None
        return confinement is not None and not confinement.is_lifted

    def lost(self, node: Node, *, is_suspicious: bool) -> None:
        """A node was lost while it had a leg of the request."""
        self._is_lifted = False
        self._losses[node.epoch] = _Loss(node.node_id, node.role == DECODE, is_suspicious)

    def ended(self, silent: Iterable[Node], lost_epoch: int | None) -> None:
        """An attempt has ended, because the node of `lost_epoch` was lost or for another reason. These had not said
        anything of it."""
        self._silent = {
            node.epoch: _Loss(node.node_id, node.role == DECODE, True, lost_epoch)
            for node in silent
            if node.epoch != lost_epoch
        }

    def begins(self, node_of: Callable[[int], Node | None]) -> None:
        """The next attempt begins; `node_of` an epoch is None where that is gone. Raises `RequestFailed` when the
        request has to end."""
        gone = {epoch: loss for epoch, loss in self._silent.items() if node_of(epoch) is None}
        self._losses, self._silent = gone | self._losses, {}
        if self.is_certain:
            raise RequestFailed(AGAIN_AND_AGAIN)

    def _counted(self) -> list[_Loss]:
        return [loss for loss in self._losses.values() if loss.behind_epoch not in self._losses]

    def is_back(self, epoch: int) -> None:
        """A node has joined: if it was lost, it was not dead."""
        self._losses.pop(epoch, None)


class Probation:
    """At which nodes a confined request begins now, and which others wait for their turn, by names of requests. Lives
    on one event loop."""

    def __init__(self) -> None:
        self._begins_at: dict[int, bytes] = {}
        self._waiting: dict[bytes, Callable[[], None]] = {}

    def is_free(self, epoch: int) -> bool:
        """Whether no confined request begins at this node."""
        return epoch not in self._begins_at

    @property
    def is_taken(self) -> bool:
        """Whether a confined request begins anywhere: it will be the turn of another one."""
        return bool(self._begins_at)

    def begin(self, name: bytes, epochs: Iterable[int]) -> None:
        """A confined request begins at these nodes."""
        self._waiting.pop(name, None)
        self._begins_at |= dict.fromkeys(epochs, name)

    def wait(self, name: bytes, begin: Callable[[], None]) -> None:
        """Call `begin` whenever it may be the turn of this request, until it has begun."""
        self._waiting[name] = begin

    def end(self, name: bytes) -> None:
        """A request has begun well, or has ended, or waits no longer. Harmless for any other."""
        self._waiting.pop(name, None)
        left = [epoch for epoch, owner in self._begins_at.items() if owner == name]
        for epoch in left:
            del self._begins_at[epoch]
        if left:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        for begin in list(self._waiting.values()):
            begin()
