"""Moves: requests that generate on a decode node which leaves go on at another one, with the KV that is there already.

Owns which requests are moved when. A few at a time are: the others go on where they are meanwhile, so the pause of each
is that of its own KV and not of everybody's. A node that finds no room for a request elsewhere finishes it. The first
move waits a moment, because nodes that are stopped together say so one after the other. How a single request is moved
is in `router/requests/moving.py`, and what may happen to it meanwhile in docs/protocol.md. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.legs import Attempt, ControlSender, Legs, send_move
from baton.router.routing.route import Route
from baton.wire.messages import DECODE, Cancel, HandedOver, HandOver

FIRST_ROUND_S = 0.1
ROUND_S = 0.01
MAX_AT_ONCE = 4
ASK_AGAIN_S = 1.0
"""After a node said that it cannot hand a request over now."""


@dataclass(frozen=True, slots=True)
class Move:
    """One request that `source` was asked to hand over to `target`, as attempt `number`."""

    sender: ControlSender
    handoff_id: bytes
    source: Node
    target: Node
    number: int

    def ask(self, attempt: int, *, goes_on: bool = False) -> None:
        """Ask the node that generates `attempt`, which ends or `goes_on` there."""
        target = self.target
        order = HandOver(self.handoff_id, attempt, self.number, target.node_id, target.epoch, goes_on)
        self.sender.send(self.source.epoch, order)

    def carry_out(self, attempt: Attempt, handed: HandedOver, registry: NodeRegistry) -> Legs | None:
        """Let the other node go on after `attempt`. None when it is gone, or something else was handed over: nobody
        takes the KV then."""
        num_tokens = attempt.request.prompt.num_tokens + len(attempt.output_ids)
        if registry.get(self.target.epoch) is self.target and handed.num_tokens == num_tokens:
            return send_move(self.sender, Route(self.target, self.source), attempt)
        self.sender.send(self.source.epoch, Cancel(self.handoff_id, self.number))
        return None


class Movable(Protocol):
    """A request in flight."""

    @property
    def is_moving(self) -> bool:
        """Whether its node was asked to hand it over, or the next one has yet to go on."""
        ...

    def move_from(self, source: Node) -> bool:
        """Begin to move it away from `source`. False when it does not generate there, or cannot be moved now."""
        ...


class Moves:
    """See the module. `flights` are all requests in flight, by handoff id."""

    def __init__(self, registry: NodeRegistry, flights: Mapping[bytes, Movable]) -> None:
        self._registry = registry
        self._flights = flights
        self._leaving: dict[int, Node] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def begin(self, node: Node) -> None:
        """Move the requests of a node that leaves, until it has none or is gone. Harmless when repeated."""
        if node.role == DECODE and node.hello.peer_address and not self._is_closed:
            self._leaving[node.epoch] = node
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FIRST_ROUND_S, self._round)

    def close(self) -> None:
        """Move no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _round(self) -> None:
        self._leaving = {
            epoch: node for epoch, node in self._leaving.items() if self._registry.get(epoch) is node and node.num_legs
        }
        for node in self._leaving.values():
            self._move_some(node)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(ROUND_S, self._round) if self._leaving else None

    def _move_some(self, source: Node) -> None:
        room = MAX_AT_ONCE - sum(flight.is_moving for node in self._leaving.values() for flight in self._on(node))
        for flight in self._on(source):
            if room <= 0:
                return
            room -= flight.move_from(source)

    def _on(self, node: Node) -> list[Movable]:
        """The requests that generate there, or whose KV has yet to leave."""
        return [self._flights[handoff_id] for handoff_id in node.live_keys if handoff_id in self._flights]
