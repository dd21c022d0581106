"""Moves: requests that generate on a decode node which leaves go on at another one, with the KV that is there already.

Which requests are moved when: a few at a time. The others go on where they are meanwhile, so the pause of each is that
of its own KV and not of everybody's. A node that finds no room for a request elsewhere finishes it. The first move
waits a moment, because nodes that are stopped together say so one after the other.

How one request is moved: a stream stands still while its KV travels. So the full blocks of a long context, which
nothing changes any more, go to the other node first, while the request still generates: as a handoff under an attempt
of its own, whose leg is cancelled as soon as it has delivered. What it has brought stays in that node's prefix cache,
where the move finds it. A copy that fails, or takes too long, costs nothing but time: the move brings everything then.

Does not own the attempts of a request. What may happen to it meanwhile is in docs/protocol.md. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.attempt import Attempt, ControlSender, Legs, RelayRequest, send_move
from baton.router.requests.output import Output
from baton.router.routing.placement import Route
from baton.router.routing.selection import Routing
from baton.wire.messages.legs import Cancel, HandedOver, HandOver
from baton.wire.messages.membership import DECODE, live_key

FIRST_ROUND_S = 0.1
ROUND_S = 0.01
MAX_AT_ONCE = 4
ASK_AGAIN_S = 1.0
"""After a node said that it cannot hand a request over now."""
AHEAD_TOKENS = 512
"""A context of so many tokens is copied ahead."""
MAX_AHEAD_S = 10.0


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


class RequestMoves:
    """The moves of one request. Owns what was asked of which node, and takes it back in `end`."""

    def __init__(
        self, handoff_id: bytes, request: RelayRequest, output: Output, sender: ControlSender, routing: Routing
    ) -> None:
        self._handoff_id, self._request, self._output = handoff_id, request, output
        self._sender, self._routing = sender, routing
        self._move: Move | None = None
        self._may_move_s = 0.0
        self._copy: Move | None = None
        self._copy_until_s = 0.0
        self._copies_at: Node | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a node was asked and has not answered, or a copy has not arrived."""
        return self._move is not None or asyncio.get_running_loop().time() < self._copy_until_s

    def begin(self, source: Node, avoided: AbstractSet[int]) -> bool:
        """Begin to move the request away from `source`, where it generates. False when that cannot be done now."""
        request, output, num_output = self._request, self._output, len(self._output.token_ids)
        num_tokens, max_tokens = request.prompt.num_tokens + num_output, request.max_tokens_behind(num_output)
        has_copied = self._copy is not None and self._copy.source is source
        preferred = self._copy.target if has_copied and self._copy is not None else None
        self._end_copy()
        now_s = asyncio.get_running_loop().time()
        media = request.prompt.media_kinds
        target = self._routing.another_decode(request.model, num_tokens, avoided, max_tokens, preferred, media)
        if target is None or now_s < self._may_move_s or not output.can_move:
            return False
        move = Move(self._sender, self._handoff_id, source, target, output.reserve_attempt())
        if has_copied or num_tokens < AHEAD_TOKENS:
            self._move = move
            move.ask(output.attempt)
        else:
            self._copy, self._copy_until_s = move, now_s + MAX_AHEAD_S
            move.ask(output.attempt, goes_on=True)
        return True

    def answered(self, handed: HandedOver, source: Node) -> Move | None:
        """`source` answers. The move that is to be carried out now, if any."""
        move, copy = self._move, self._copy
        if move is not None and handed.attempt == move.number:
            self._move = None
            if handed.num_tokens:
                self._copy = None
                return move
            self._may_move_s = asyncio.get_running_loop().time() + ASK_AGAIN_S
        elif copy is not None and handed.attempt == copy.number and self._copy_until_s and handed.num_tokens:
            self._send_copy(copy, handed.num_tokens)
        elif copy is not None and handed.attempt == copy.number:
            self._end_copy()
        else:
            self.refuse(handed, source)
        return None

    def refuse(self, handed: HandedOver, source: Node) -> None:
        """Nobody takes what `source` has handed over: the request is elsewhere by now."""
        self._sender.send(source.epoch, Cancel(self._handoff_id, handed.attempt))

    def heard(self, attempt: int) -> None:
        """A node says something of another attempt than the one that generates: tokens when a copy has arrived, or that
        it has failed."""
        if self._copy is not None and attempt == self._copy.number:
            self._end_copy()

    def lost(self, node: Node) -> None:
        """A node is lost."""
        if self._copy is not None and (node is self._copy.source or node is self._copy.target):
            self._end_copy()
            self._copy = None

    def end(self) -> None:
        """The attempt is over, and with it whatever was asked."""
        self._end_copy()
        self._move = self._copy = None

    def _send_copy(self, copy: Move, num_tokens: int) -> None:
        request, num_prompt_tokens = self._request, self._request.prompt.num_tokens
        if num_tokens < num_prompt_tokens:
            request = replace(request, prompt=request.prompt.first(num_tokens))
        output_ids = tuple(self._output.token_ids[: max(0, num_tokens - num_prompt_tokens)])
        leg = Attempt(self._handoff_id, copy.number, request, output_ids).decode_leg(copy.source)
        self._sender.send(copy.target.epoch, leg)
        copy.target.num_legs += 1
        copy.target.live_keys[self._handoff_id] = live_key(self._handoff_id, copy.number)
        self._copies_at = copy.target

    def _end_copy(self) -> None:
        """Cancel the copy at both ends if it is under way; which one it was is remembered."""
        if self._copy is None or not self._copy_until_s:
            return
        self._copy_until_s = 0.0
        for node in (self._copy.source, self._copy.target):
            self._sender.send(node.epoch, Cancel(self._handoff_id, self._copy.number))
        if self._copies_at is not None:
            self._copies_at.num_legs -= 1
            self._copies_at.live_keys.pop(self._handoff_id, None)
            self._copies_at = None


class Movable(Protocol):
    """A request in flight."""

    @property
    def is_moving(self) -> bool:
        """Whether its node was asked to hand it over, or the next one has yet to go on."""
        ...

    def move_from(self, source: Node) -> bool:
        """Begin to move it away from `source`. False when it does not generate there, or cannot be moved now."""
        ...


class LeavingNodes:
    """The decode nodes that leave, and when which of their requests are moved. `flights` are all requests in flight, by
    handoff id."""

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
