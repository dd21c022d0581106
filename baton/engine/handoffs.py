"""The engine's side of handoffs: KV that leaves it for other nodes, and KV of other nodes that comes.

The only place that moves blocks between handoffs (`baton.engine.held_blocks`), requests and the prefix cache. The
program that asked for held blocks decides how long they are held, by a lease, and calls `release`. Does not know how KV
travels, or when a step is computed.

The blocks of a request pass to a handoff when it was added with `first_token_only`: they are held until another node
has them. The blocks of a handoff pass to a request in `add_reserved`: another node has written the KV. `hand_over` is
the way back: the blocks of a request that generates are held for a handoff, and another node goes on with it. `lend`
and `publish` are the same for a prefix without a request: blocks of the prefix cache are held, and reserved ones become
part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.cache.block_pool import BlockPool, BlockTable
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.held_blocks import HeldBlocks, Reservation
from baton.engine.new_requests import NewRequests
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.steps_in_flight import StepsInFlight
from baton.wire.errors import BatonError
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a choice that another node has sampled; `params` are the choice's own."""

    key: RequestKey
    params: DecodingParams
    token_id: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What another node needs to go on with a request: the KV of `prompt`, or of its beginning, and of `output_ids` in
    `block_table`, and the next token."""

    prompt: Prompt
    output_ids: tuple[int, ...]
    next_token_id: int
    block_table: BlockTable

    @property
    def num_tokens(self) -> int:
        """How many have their KV there."""
        return self.prompt.num_tokens + len(self.output_ids)


class Handoffs:
    """Blocks of `pool` that are held for other nodes, in `held`: their ways from and to an engine's requests.
    `drafted`: what of the pool has KV of a draft."""

    def __init__(
        self,
        held: HeldBlocks,
        pool: BlockPool,
        scheduler: Scheduler,
        in_flight: StepsInFlight,
        new_requests: NewRequests,
        drafted: DraftCoverage | None = None,
    ) -> None:
        self._held = held
        self._drafted = drafted
        self._pool = pool
        self._requests = scheduler.requests
        self._blocks = scheduler.blocks
        self._limits = scheduler.limits
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._new_requests = new_requests

    def num_drafted(self, block_table: Sequence[int]) -> int:
        """How many tokens of a sequence have KV of a draft, and all before them."""
        return 0 if self._drafted is None else self._drafted.of(block_table, len(block_table) * self._limits.block_size)

    def is_used(self, key: RequestKey) -> bool:
        """Whether blocks are held under `key`, or a request or a fork has it."""
        return key in self._held or key in self._requests

    def require_new(self, key: RequestKey) -> None:
        """Raise `ValueError` for a key in use."""
        if self.is_used(key):
            raise ValueError(f"{key!r} is in use already")

    def reserve(self, key: RequestKey, prompt: Prompt, output_ids: Sequence[int] = ()) -> Reservation | None:
        """Hold blocks for the KV of `prompt` and `output_ids`, reusing cached ones. Returns None when there is no room
        now, or when that would take the room which a request of the engine itself waits for. Raises
        `ContextLengthExceeded` when there will never be room, and `ModelNotFound` without its adapter."""
        num_tokens = prompt.num_tokens + len(output_ids)
        self._limits.check_size(num_tokens)
        self._limits.check_adapter(prompt)
        self.require_new(key)
        waiting = self._requests.first_without_blocks
        if waiting is not None and not self._blocks.has_room_beside(waiting, num_tokens):
            return None
        hashes = self._new_requests.block_hashes(prompt, output_ids, self._limits.block_size)
        taken = self._blocks.take(hashes, num_tokens, num_tokens)
        if taken is None:
            return None
        block_table, num_cached_tokens = taken
        self._blocks.give_away(block_table[num_cached_tokens // self._limits.block_size :])
        return self._held.reserve(key, block_table, num_cached_tokens, self._limits.block_size, hashes)

    def add_reserved(
        self,
        reservation: Reservation,
        prompt: Prompt,
        firsts: Sequence[FirstToken],
        output_ids: Sequence[int] = (),
        num_drafted: int = 0,
    ) -> None:
        """Continue choices whose KV, that of `prompt` and `output_ids`, now lies in the reserved blocks. The blocks
        become those of the first choice, and cached; the others share them. Choices that are over already are not among
        `firsts`. Of the tokens that came, those among the first `num_drafted` have KV of a draft.

        Raises as `EngineCore.add` when one of them cannot be taken, and then takes none and releases the blocks.
        """
        requests = [
            self._new_requests.make(first.key, prompt, first.params, [*output_ids, first.token_id]) for first in firsts
        ]
        block_table = self._held.give(reservation.key)
        if block_table is None:
            raise KeyError(f"{reservation.key!r} holds no reservation")
        try:
            for request in requests:
                self._limits.check(request)
        except BatonError:
            self._pool.release(block_table)
            raise
        leader, *forks = requests
        leader.block_table = block_table
        leader.num_computed_tokens = prompt.num_tokens + len(output_ids)
        leader.num_cached_tokens = min(reservation.num_cached_tokens, prompt.num_tokens)
        if self._drafted is not None and num_drafted > reservation.num_cached_tokens:
            self._drafted.fill(block_table, reservation.num_cached_tokens, num_drafted)
        leader.num_published_blocks = reservation.num_cached_tokens // self._limits.block_size
        self._scheduler.add_computed(leader)
        for fork in forks:
            fork.num_cached_tokens = 0
            self._scheduler.add_fork(fork, leader, leader.num_computed_tokens)

    def hand_over(self, key: RequestKey, held_key: RequestKey, *, goes_on: bool = False) -> HandedOver | None:
        """End a request that generates, and hold the blocks with its KV under `held_key`, so that another node can go
        on with it. The step in flight may still write behind its tokens, into the last of these blocks. A request that
        `goes_on` does not end, and only full blocks are held: nothing writes into them any more.

        None, and nothing has changed, when there is no such request, when the KV of its tokens is not here, because it
        has just begun or was preempted, when a step in flight changes a state in its last block, or when `held_key` is
        in use.
        """
        request = self._requests.get(key)
        if self.is_used(held_key):
            return None
        if request is None or not request.is_wanted or request.forks or request.block_copy is not None:
            return None
        num_tokens = request.num_known_tokens - 1
        if num_tokens < request.num_prompt_tokens or self._in_flight.num_stored_tokens(request) < num_tokens:
            return None
        block_size = self._limits.block_size
        if not goes_on and self._limits.has_states and request.num_steps_in_flight:
            return None
        if goes_on and not (num_tokens := num_tokens // block_size * block_size):
            return None
        block_table = request.block_table[: -(-num_tokens // block_size)]
        self._pool.share(block_table)
        self._held.hold(held_key, block_table)
        prompt, next_token_id = request.prompt, request.token_ids[num_tokens]
        prompt = prompt.first(num_tokens) if num_tokens < prompt.num_tokens else prompt
        handed = HandedOver(
            prompt, tuple(request.token_ids[prompt.num_tokens : num_tokens]), next_token_id, block_table
        )
        if not goes_on:
            request.is_wanted = False
            self._in_flight.drop(request)
        return handed

    def lend(self, key: RequestKey, prompt: Prompt) -> BlockTable | None:
        """Hold what is cached of the beginning of `prompt` under `key`, so that another node can copy it. None when
        that is nothing, or when `key` is in use."""
        if self.is_used(key):
            return None
        return self._held.lend(key, self._new_requests.block_hashes(prompt, (), self._limits.block_size))

    def publish(self, reservation: Reservation, prompt: Prompt, blocks: range) -> None:
        """The KV of these full blocks of `prompt` has come: the prefix cache has them, and they are held still."""
        self._held.publish(reservation, prompt, blocks, self._limits.block_size)

    def block_table(self, key: RequestKey) -> Sequence[int]:
        """Blocks of a live request, or those held under this key, in sequence order; empty when there are neither."""
        request = self._requests.get(key)
        return request.block_table if request is not None else self._held.table(key) or ()

    def release(self, key: RequestKey) -> bool:
        """Release the blocks held under `key`. False when there are none."""
        return self._held.release(key)
