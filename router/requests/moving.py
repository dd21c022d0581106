"""The moves of one request: its node is asked to hand it over, and before that, for a long context, to copy ahead.

A stream stands still while its KV travels. So the full blocks of a long context, which nothing changes any more, go to
the other node first, while the request still generates: as a handoff under an attempt of its own, whose leg is
cancelled as soon as it has delivered. What it has brought stays in that node's prefix cache, where the move finds it.
A copy that fails, or takes too long, costs nothing but time: the move brings everything then.

Owns what was asked of which node, and takes it back in `end`. Does not own the attempts of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from dataclasses import replace

from baton.router.nodes.registry import Node
from baton.router.requests.flight_context import FlightContext
from baton.router.requests.journal import Journal
from baton.router.requests.legs import Attempt, RelayRequest
from baton.router.requests.moves import ASK_AGAIN_S, Move
from baton.wire.messages import Cancel, HandedOver, live_key

AHEAD_TOKENS = 512
"""A context of so many tokens is copied ahead."""
MAX_AHEAD_S = 10.0


class Moving:
    """See the module."""

    def __init__(self, handoff_id: bytes, request: RelayRequest, journal: Journal, context: FlightContext) -> None:
        self._handoff_id, self._request, self._journal, self._context = handoff_id, request, journal, context
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
        request, journal, num_output = self._request, self._journal, len(self._journal.token_ids)
        num_tokens, max_tokens = request.prompt.num_tokens + num_output, request.max_tokens_behind(num_output)
        has_copied = self._copy is not None and self._copy.source is source
        preferred = self._copy.target if has_copied and self._copy is not None else None
        self._end_copy()
        routing, now_s = self._context.routing, asyncio.get_running_loop().time()
        images = request.prompt.images
        target = routing.another_decode(request.model, num_tokens, avoided, max_tokens, preferred, images)
        if target is None or now_s < self._may_move_s or not journal.can_move:
            return False
        move = Move(self._context.sender, self._handoff_id, source, target, journal.reserve_attempt())
        if has_copied or num_tokens < AHEAD_TOKENS:
            self._move = move
            move.ask(journal.attempt)
        else:
            self._copy, self._copy_until_s = move, now_s + MAX_AHEAD_S
            move.ask(journal.attempt, goes_on=True)
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
        self._context.sender.send(source.epoch, Cancel(self._handoff_id, handed.attempt))

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
        output_ids = tuple(self._journal.token_ids[: max(0, num_tokens - num_prompt_tokens)])
        leg = Attempt(self._handoff_id, copy.number, request, output_ids).decode_leg(copy.source)
        self._context.sender.send(copy.target.epoch, leg)
        copy.target.num_legs += 1
        copy.target.live_keys[self._handoff_id] = live_key(self._handoff_id, copy.number)
        self._copies_at = copy.target

    def _end_copy(self) -> None:
        """Cancel the copy at both ends if it is under way; which one it was is remembered."""
        if self._copy is None or not self._copy_until_s:
            return
        self._copy_until_s = 0.0
        for node in (self._copy.source, self._copy.target):
            self._context.sender.send(node.epoch, Cancel(self._handoff_id, self._copy.number))
        if self._copies_at is not None:
            self._copies_at.num_legs -= 1
            self._copies_at.live_keys.pop(self._handoff_id, None)
            self._copies_at = None
