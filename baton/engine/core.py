"""EngineCore: the calls by which every program of Baton uses an engine, `step()` above all.

It is the only place that moves blocks between handoffs (`baton.engine.held_blocks`), requests and the pool. Does not
know which program uses it, where requests come from, or how KV travels: there are no roles in here.

Every block has an owner at every moment: the pool, requests, a step in flight, or a handoff. The blocks of a request
pass to a handoff when it was added with `first_token_only`: they are held until another node has them. The blocks of a
handoff pass to a request in `add_reserved`: another node has written the KV. `hand_over` is the way back: the blocks of
a request that generates are held for a handoff, and another node goes on with it. The program that asked for held
blocks decides how long they are held, by a lease, and calls `release`. Invariant, checked by `check`: requests,
handoffs and steps in flight are together exactly the owners that the pool has counted for each block.

Choices of one prompt can be asked for together: it is computed, or received, once. The forks become requests with their
first tokens; they share the prompt's full blocks and have a copy of the last one.

Where the runner allows it a step is launched while the one before it is computed (`baton.engine.steps_in_flight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.cache.block_log import BlockLog
from baton.engine.cache.block_pool import BlockPool, BlockTable, CacheChanges
from baton.engine.cache.offload import KvOffload
from baton.engine.held_blocks import HeldBlocks, Reservation
from baton.engine.models.media import MediaFacts
from baton.engine.new_requests import NewRequests
from baton.engine.runner.base import Runner
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import Reading
from baton.engine.scheduler.request import Awaited, Request, choices_of
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.steps_in_flight import StepsInFlight, StepWatch
from baton.engine.structured.matcher import Grammars
from baton.wire.errors import BatonError, InvalidRequest
from baton.wire.messages import NodeStatus
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


def watch_nothing(step: Step) -> None:
    """A `StepWatch` for callers that do not follow layers."""


class EngineCore:
    """One model on one device. Without `grammars` requests with a grammar are refused, and those with media of a kind
    that is not in `media_facts`. `costs` learns what its steps cost. `offload`: that of `pool` and `scheduler`, to be
    read."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        runner: Runner,
        fingerprint: str,
        grammars: Grammars | None = None,
        costs: StepCosts | None = None,
        media_facts: Mapping[str, MediaFacts[Any]] | None = None,
        offload: KvOffload | None = None,
    ) -> None:
        self.offload = offload
        self._block_log: BlockLog | None = None
        self._held = HeldBlocks(pool)
        self._pool = pool
        self._scheduler = scheduler
        self.costs = costs or StepCosts()
        self._in_flight = StepsInFlight(runner, scheduler, pool, self.costs)
        self._new_requests = NewRequests(fingerprint, scheduler.limits.max_request_tokens, grammars, media_facts or {})

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """The kinds of media that it computes."""
        return self._new_requests.media_kinds

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something (it may still find no room)."""
        return bool(self._in_flight) or not self._scheduler.requests.is_empty

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were launched, and whose results `step` has not taken yet."""
        return len(self._in_flight)

    @property
    def awaits_readiness(self) -> bool:
        """Whether a request waits for its grammar or for KV of a store, which threads make: `step` may find work at any
        moment."""
        return self._scheduler.requests.awaits_readiness

    @property
    def limits(self) -> SchedulerLimits:
        """How much a step and a request may have."""
        return self._scheduler.limits

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt plus output that fits."""
        return self._scheduler.limits.max_request_tokens

    def status(self, loop_age_s: float = 0.0) -> NodeStatus:
        """Load and block counts now."""
        return NodeStatus(
            num_running=self._scheduler.requests.num_running,
            num_waiting=self._scheduler.requests.num_waiting,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_held_blocks=self._pool.num_held,
            loop_age_s=loop_age_s,
            num_preemptions=self._scheduler.num_preemptions,
            cost=self.costs.cost,
            num_leased_blocks=self._held.num_blocks,
            tiers=() if self.offload is None else self.offload.usage_by_tier,
        )

    def add(
        self,
        key: RequestKey,
        prompt: Prompt,
        params: DecodingParams,
        *,
        output_ids: Sequence[int] = (),
        first_token_only: bool = False,
        forks: Sequence[RequestKey] = (),
        reading: Reading | None = None,
    ) -> None:
        """Compute and continue `prompt`, whose media have payload, and what was generated behind it earlier. With
        `first_token_only` the request leaves after one token, and its blocks are held until `release(key)`, also when
        that token ended the request: a transfer may be reading them.

        `forks`: the keys of further choices, see `choices_of`. `reading`: what is read of the prompt, and comes with
        the outputs; None: what `params` ask for. One without tokens leaves when all of it is computed.
        Raises `ContextLengthExceeded` when it can never fit, `Overloaded` when the queue is full, `InvalidRequest` for
        token ids outside the vocabulary and more choices than a step may have, and `ValueError` for a key in use.
        """
        request = self._new_requests.make(key, prompt, params, output_ids, reading)
        if request.lacks_payload:
            raise InvalidRequest("a medium came without its payload", "messages")
        request.first_token_only = first_token_only
        request.forks = tuple(choices_of((key, *forks), params)[1:]) if forks else ()
        for each in (key, *forks):
            self._require_new(each)
        self._scheduler.add(request)

    def prepare(self, params: DecodingParams) -> None:
        """Begin with what a request of these parameters needs before it can be computed: its grammar."""
        self._new_requests.prepare(params)

    def check_size(self, num_tokens: int) -> None:
        """Raise `ContextLengthExceeded` when `num_tokens` known tokens leave no room for output."""
        self._scheduler.limits.check_size(num_tokens)

    def _require_new(self, key: RequestKey) -> None:
        if key in self._held or self.is_live(key):
            raise ValueError(f"{key!r} is in use already")

    def reserve(self, key: RequestKey, prompt: Prompt, output_ids: Sequence[int] = ()) -> Reservation | None:
        """Hold blocks for the KV of `prompt` and `output_ids`, reusing cached ones. Returns None when there is no room
        now, or when that would take the room which a request of the engine itself waits for. Raises
        `ContextLengthExceeded` when there will never be room, and `ModelNotFound` without its adapter."""
        num_tokens = prompt.num_tokens + len(output_ids)
        self.check_size(num_tokens)
        self._scheduler.limits.check_adapter(prompt)
        self._require_new(key)
        waiting = self._scheduler.requests.first_without_blocks
        if waiting is not None and not self._scheduler.blocks.has_room_beside(waiting, num_tokens):
            return None
        hashes = self._new_requests.block_hashes(prompt, output_ids, self._scheduler.limits.block_size)
        taken = self._scheduler.blocks.take(hashes, num_tokens, num_tokens)
        if taken is None:
            return None
        block_table, num_cached_tokens = taken
        self._scheduler.blocks.give_away(block_table[num_cached_tokens // self._scheduler.limits.block_size :])
        return self._held.reserve(key, block_table, num_cached_tokens, self._scheduler.limits.block_size, hashes)

    def add_reserved(
        self,
        reservation: Reservation,
        prompt: Prompt,
        firsts: Sequence[FirstToken],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Continue choices whose KV, that of `prompt` and `output_ids`, now lies in the reserved blocks. The blocks
        become those of the first choice, and cached; the others share them. Choices that are over already are not among
        `firsts`.

        Raises as `add` when one of them cannot be taken, and then takes none and releases the blocks.
        """
        requests = [
            self._new_requests.make(first.key, prompt, first.params, [*output_ids, first.token_id]) for first in firsts
        ]
        block_table = self._held.give(reservation.key)
        if block_table is None:
            raise KeyError(f"{reservation.key!r} holds no reservation")
        try:
            for request in requests:
                self._scheduler.limits.check(request)
        except BatonError:
            self._pool.release(block_table)
            raise
        leader, *forks = requests
        leader.block_table = block_table
        leader.num_computed_tokens = prompt.num_tokens + len(output_ids)
        leader.num_cached_tokens = min(reservation.num_cached_tokens, prompt.num_tokens)
        leader.num_published_blocks = reservation.num_cached_tokens // self._scheduler.limits.block_size
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
        request = self._scheduler.requests.get(key)
        if held_key in self._held or self.is_live(held_key):
            return None
        if request is None or not request.is_wanted or request.forks or request.block_copy is not None:
            return None
        num_tokens = request.num_known_tokens - 1
        if num_tokens < request.num_prompt_tokens or self._in_flight.num_stored_tokens(request) < num_tokens:
            return None
        block_size = self._scheduler.limits.block_size
        if not goes_on and self._scheduler.limits.has_states and request.num_steps_in_flight:
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
            self.abort(key)
        return handed

    def lend(self, key: RequestKey, prompt: Prompt) -> BlockTable | None:
        """Hold what is cached of the beginning of `prompt` under `key`, so that another node can copy it. None when
        that is nothing, or when `key` is in use."""
        if key in self._held or self.is_live(key):
            return None
        return self._held.lend(key, self._new_requests.block_hashes(prompt, (), self._scheduler.limits.block_size))

    def publish(self, reservation: Reservation, prompt: Prompt, blocks: range) -> None:
        """The KV of these full blocks of `prompt` has come: the prefix cache has them, and they are held still."""
        self._held.publish(reservation, prompt, blocks, self._scheduler.limits.block_size)

    def hold_back(self, key: RequestKey, awaited: Awaited) -> None:
        """Admit a request that has just been added only when what it waits for is over. It holds nobody up."""
        request = self._scheduler.requests.get(key)
        if request is not None:
            request.awaited = awaited

    def block_table(self, key: RequestKey) -> Sequence[int]:
        """Blocks of a live request, or those held under this key, in sequence order; empty when there are neither."""
        request = self._scheduler.requests.get(key)
        return request.block_table if request is not None else self._held.table(key) or ()

    def release(self, key: RequestKey) -> bool:
        """Release the blocks held under `key`. False when there are none."""
        return self._held.release(key)

    def abort(self, key: RequestKey) -> bool:
        """Drop a request or a fork in any state and release its blocks. Blocks held under its key are not released.
        Returns False when there is no such request.

        What a step in flight samples for it is dropped. A request whose forks are still to come goes on for them; the
        key of any other can be used again at once.
        """
        requests = self._scheduler.requests
        if requests.leader(key) is not None:
            request: Request | None = requests.remove_fork(key)
        else:
            request = requests.get(key)
            if request is None or not request.is_wanted:
                return False
            request.is_wanted = False
        if request is not None and not request.is_wanted and not request.forks:
            requests.remove(request.key)
            self._in_flight.release(request)
        return True

    def step(self, watch: StepWatch = watch_nothing) -> list[RequestOutput]:
        """The outputs of the oldest step in flight, after launching what can be launched meanwhile; with none in
        flight, of a new one. Empty when nothing fits now, or when all requests of the step were aborted.

        Blocks of requests that leave are released, or held (see `first_token_only`). `watch` is called with each step
        before it is launched, and returns what is called when a layer is stored. Steps are collected in the order of
        their launch. Raises `StepFailed` when that step could not be launched or computed; no request has advanced
        since the last outputs then. `DeviceFailed` passes: the process must end.
        """
        in_flight, expects_streams = self._in_flight, self._held.is_awaited
        if not in_flight:
            first = self._scheduler.schedule(expects_streams=expects_streams)
            if not first.shares:
                return self._scheduler.take_lost()
            in_flight.launch(first, watch)
        while (
            in_flight.can_launch_another
            and (ahead := self._scheduler.schedule_ahead(expects_streams=expects_streams)) is not None
        ):
            in_flight.launch(ahead, watch)
        outputs = in_flight.collect()
        for output in outputs:
            if output.has_left:
                self._retire(output)
        return outputs + self._scheduler.take_lost()

    def is_live(self, key: RequestKey) -> bool:
        """Whether there is a request or a fork of that key that has not left."""
        requests = self._scheduler.requests
        return requests.get(key) is not None or requests.leader(key) is not None

    def request_keys(self) -> list[RequestKey]:
        """Keys of all live requests and forks that are wanted."""
        return self._scheduler.requests.wanted_keys()

    def uncomputed_prompts(self) -> list[tuple[RequestKey, int]]:
        """Live requests whose prompts are not computed, and how many tokens are missing; a step in flight counts."""
        return [(each.key, missing) for each in self._scheduler.requests if (missing := each.num_uncomputed_tokens) > 1]

    def take_cache_changes(self) -> CacheChanges:
        """Prefix blocks stored and evicted since the last call. The log of blocks hears of them, too."""
        changes = self._pool.take_changes()
        if self._block_log is not None:
            self._block_log.changed(changes)
        return changes

    def log_blocks(self, log: BlockLog) -> None:
        """Have `log` follow the prefix cache, which is empty still."""
        self._block_log = log
        self._scheduler.blocks.on_published = self._held.on_published = log.published

    def cached_hashes(self) -> list[bytes]:
        """All findable prefix blocks."""
        return self._pool.published_hashes()

    def close(self) -> None:
        """End what threads of a KV store do with the pool's memory, before that is gone. Nothing is computed any
        more."""
        if self.offload is not None:
            self.offload.close()

    def check(self) -> None:
        """Raise `RuntimeError` when blocks are leaked, shared wrongly or freed while in use. O(pool), for tests."""
        owners: Counter[int] = Counter()
        for request in self._scheduler.requests:
            owners.update(request.held_blocks)
        for block_table in (*self._held.tables, *self._in_flight.held_tables()):
            owners.update(block_table)
        self._pool.check(owners)

    def _retire(self, output: RequestOutput) -> None:
        request = self._scheduler.requests.remove(output.key)
        if request is None:
            return
        if request.first_token_only:
            self._held.hold(output.key, request.block_table)
        else:
            self._in_flight.release(request)
