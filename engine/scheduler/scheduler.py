"""The scheduler: turns "tokens still to compute" into steps under one token budget.

Owns the waiting and running requests and the blocks they hold. Knows no tensors, models, nodes or transports: it is
built from a block pool and a few numbers, and runs thousands of steps a second in tests.

There are no phases. A request has known tokens and computed tokens; a step computes some of the difference. Requests
that need a single token (they are decoding) are served first, so no stream waits for somebody's prompt; what is left
of the budget goes to prompts, oldest first, in chunks.

Blocks: a request is admitted when all its known tokens fit; decoding then grows block by block. When no block is left,
the newest request gives its blocks back and is computed again later (preemption by recomputation).

A step goes through `schedule` (what to compute), `advance` (it was launched) and `apply` (its result is here); `rewind`
undoes `advance`. Between the two it is under way, and the token it draws for a request stands as `PENDING_TOKEN` in
`token_ids`, so that `schedule_ahead` can plan the next step on top of it. What needs results never happens ahead:
preemption, and drawing with penalties. What only a result can tell (a stop token, a row without a number) is found in
`apply`; the share such a request has in the step on top is then nobody's, and is passed over.

Invariants:
- the oldest request is never preempted for a newer one, so it always makes progress;
- a request that could never fit is refused in `add`, not queued;
- a block table only grows while a request runs, and keeps its blocks while a step under way writes into them;
- a block is published when the step that filled it was applied, so its hash covers known tokens only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine.cache.block_pool import BlockPool, BlockTable, pack_blocks
from engine.cache.hashing import extend_hashes
from engine.scheduler.request import PENDING_TOKEN, Request, RequestOutput, SampledToken, ScheduledRequest, Step
from wire.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from wire.messages import FINISH_LENGTH, FINISH_STOP
from wire.request_key import RequestKey

_ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is the token budget of a step; `max_request_tokens` bounds prompt plus output.

    Token ids lie below `vocab_size`: one that does not would fail the whole step it is computed in.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_request_tokens: int
    max_num_waiting: int = 4096
    vocab_size: int = 2**32


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    """The share of `request` that is its next `count` tokens."""
    # no keywords: with them it would take twice as long, as it would in `_apply`
    return ScheduledRequest(
        request.key,
        request.num_computed_tokens,
        count,
        request.token_ids,
        request.num_prompt_tokens,
        request.block_table,
        request.params,
        count == request.num_uncomputed_tokens,
        request.arrival,
    )


class Scheduler:
    """Chooses steps and applies their results."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, eos_token_ids: frozenset[int]) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._pool = pool
        self._eos_token_ids = eos_token_ids
        self._waiting: deque[Request] = deque()
        self._running: dict[RequestKey, Request] = {}
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the running batch."""
        return len(self._waiting)

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether a request waits that holds no blocks yet: it comes before anything new."""
        return bool(self._waiting) and not self._waiting[-1].block_table

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and are served each step."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether another step could compute something."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request without blocks. Raises `ContextLengthExceeded` or `Overloaded`."""
        self._check(request)
        if len(self._waiting) >= self.limits.max_num_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already")
        self._number(request)
        self._waiting.append(request)

    def add_computed(self, request: Request) -> None:
        """Queue a request whose `block_table` holds the KV of `num_computed_tokens` tokens and becomes its own."""
        self._check(request)
        self._number(request)
        self._publish_full_blocks(request, request.num_computed_tokens)
        # ahead of all that hold no blocks, behind those that came with theirs earlier
        place = next((i for i, waiting in enumerate(self._waiting) if not waiting.block_table), len(self._waiting))
        self._waiting.insert(place, request)

    def get(self, key: RequestKey) -> Request | None:
        """The live request of that key."""
        return self._running.get(key) or next((request for request in self._waiting if request.key == key), None)

    def remove(self, key: RequestKey) -> Request | None:
        """Forget a request; its block table is now the caller's to release."""
        request = self._running.pop(key, None)
        if request is None:
            request = next((waiting for waiting in self._waiting if waiting.key == key), None)
            if request is not None:
                self._waiting.remove(request)
        return request

    def live_keys(self) -> list[RequestKey]:
        """Keys of all live requests."""
        return [*self._running, *(request.key for request in self._waiting)]

    def schedule(self) -> Step:
        """The next step, while none is under way; empty when nothing can be computed now."""
        return self._fill(*self._by_age())

    def schedule_ahead(self) -> Step | None:
        """The step after the one that is under way, if it can be known before that one's result.

        None when it cannot: room for it needs a preemption, a token is to be drawn that needs the values of all before
        it (penalties), or there is nothing to compute. To be asked again once the result was applied.
        """
        decoding, prompts = self._by_age()
        needs_values = any(request.num_pending_tokens and request.params.needs_history for request in decoding)
        if needs_values or not self._running:
            return None
        first = decoding[: self.limits.max_num_batched_tokens]
        if sum(not self._has_room(request) for request in first) > self._pool.num_available:
            return None
        step = self._fill(decoding, prompts)
        return step if step.requests else None

    def _fill(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> Step:
        """One token for each of `decoding` while the budget lasts, and prompts with the rest of it."""
        budget = self.limits.max_num_batched_tokens
        shares: dict[RequestKey, ScheduledRequest] = {}
        for request in decoding:
            if budget > 0 and request.key in self._running and self._grow(request, shares):
                shares[request.key] = _scheduled(request, 1)
                budget -= 1
        budget = self.limits.max_num_batched_tokens - len(shares)
        for request in prompts:
            if request.key in self._running:
                budget -= self._share(request, budget, shares)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget -= self._share(admitted, budget, shares)
        return Step(tuple(shares.values()))

    def advance(self, step: Step) -> None:
        """Record that `step` was launched, right after it was scheduled."""
        for share in step.requests:
            request = self._running[share.key]
            request.num_computed_tokens = share.start + share.num_tokens
            request.num_steps_under_way += 1
            if share.needs_sample:
                request.token_ids.append(PENDING_TOKEN)
                request.num_pending_tokens += 1

    def apply(self, step: Step, sampled: Mapping[RequestKey, SampledToken]) -> list[RequestOutput]:
        """Record that `step`, the oldest under way, was computed and what it drew; a due token that is missing ends
        its request. Requests that were removed since it was launched are passed over.

        The caller removes those that have left.
        """
        owned = [(request, share) for share in step.requests if (request := self._owner(share)) is not None]
        return [self._apply(request, share, sampled.get(share.key)) for request, share in owned]

    def rewind(self, step: Step) -> None:
        """Record that `step`, the newest under way, was not computed: its requests are where they were before it."""
        for share in step.requests:
            request = self._owner(share)
            if request is None:
                continue
            request.num_computed_tokens = share.start
            request.num_steps_under_way -= 1
            if share.needs_sample:
                request.token_ids.pop()
                request.num_pending_tokens -= 1

    def keys_of(self, step: Step) -> list[RequestKey]:
        """Keys of the requests of `step` that are still live."""
        return [share.key for share in step.requests if self._owner(share) is not None]

    def _owner(self, share: ScheduledRequest) -> Request | None:
        """The request that has this share, unless it was removed; its key may be another's by now."""
        request = self._running.get(share.key)
        return request if request is not None and request.arrival == share.arrival else None

    def _apply(self, request: Request, share: ScheduledRequest, token: SampledToken | None) -> RequestOutput:
        request.num_steps_under_way -= 1
        num_known, finish_reason = request.num_known_tokens, ""
        if share.needs_sample:
            request.num_pending_tokens -= 1
            if token is not None:
                request.token_ids[num_known] = token.token_id
                finish_reason = self.finish_reason(request)
        num_computed_tokens = share.start + share.num_tokens
        self._publish_full_blocks(request, num_computed_tokens)
        has_failed = token is None and share.needs_sample
        has_left = bool(finish_reason) or has_failed or (token is not None and request.first_token_only)
        return RequestOutput(
            request.key,
            share.num_tokens,
            num_computed_tokens,
            request.num_cached_tokens or 0,
            num_known - request.num_prompt_tokens,
            token,
            finish_reason,
            has_left,
            has_failed,
        )

    def finish_reason(self, request: Request) -> str:
        """Why the last known token of `request` ends it, or ""."""
        params, num_tokens = request.params, request.num_known_tokens
        last = request.token_ids[num_tokens - 1]
        if num_tokens - request.num_prompt_tokens >= params.min_tokens:
            if last in self._eos_token_ids and not params.ignore_eos:
                return FINISH_STOP
            if last in params.stop_token_ids:
                return FINISH_STOP
        return FINISH_LENGTH if self._is_full(request, num_tokens) else ""

    def check_size(self, num_tokens: int) -> None:
        """Raise `ContextLengthExceeded` when so many tokens leave no room for output, `InvalidRequest` for none."""
        if num_tokens < 1:
            raise InvalidRequest("a request needs at least one token", "prompt")
        if num_tokens >= self.limits.max_request_tokens:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens leave no room for output: "
                f"at most {self.limits.max_request_tokens} tokens of prompt and output fit this node"
            )

    def _is_full(self, request: Request, num_tokens: int) -> bool:
        """Whether so many tokens are as many as `request` may have."""
        max_tokens = request.params.max_tokens
        if max_tokens is not None and num_tokens - request.num_prompt_tokens >= max_tokens:
            return True
        return num_tokens >= request.max_total_tokens

    def _awaits_last(self, request: Request) -> bool:
        """Whether the token that is being drawn for `request`, whatever it is, will be its last."""
        if not request.num_pending_tokens:
            return False
        return request.first_token_only or self._is_full(request, len(request.token_ids))

    def _check(self, request: Request) -> None:
        self.check_size(len(request.token_ids))
        if max(request.token_ids) >= self.limits.vocab_size:
            raise InvalidRequest(f"token id {max(request.token_ids)} is outside the vocabulary", "prompt")
        request.params.check_vocabulary(self.limits.vocab_size)

    def _number(self, request: Request) -> None:
        self._num_arrivals += 1
        request.arrival = self._num_arrivals

    def _by_age(self) -> tuple[list[Request], list[Request]]:
        """Running requests that decode, and those with more to compute, the oldest first; without those whose last
        token is being drawn."""
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in sorted(self._running.values(), key=_ARRIVAL):
            if not self._awaits_last(request):
                (decoding if request.num_uncomputed_tokens == 1 else prompts).append(request)
        return decoding, prompts

    def _share(self, request: Request, budget: int, shares: dict[RequestKey, ScheduledRequest]) -> int:
        count = min(request.num_uncomputed_tokens, budget)
        if count > 0:
            shares[request.key] = _scheduled(request, count)
        return count

    def _grow(self, request: Request, shares: dict[RequestKey, ScheduledRequest]) -> bool:
        """Make room for one more token. False when `request` itself had to be preempted."""
        if self._has_room(request):
            return True
        while self._pool.num_available < 1:
            victim = self._newest()
            self._preempt(victim)
            shares.pop(victim.key, None)
            if victim is request:
                return False
        request.block_table.extend(self._pool.allocate(1))
        return True

    def _has_room(self, request: Request) -> bool:
        """Whether the blocks of `request` have a slot for each of its tokens."""
        return len(request.block_table) * self.limits.block_size >= len(request.token_ids)

    def _newest(self) -> Request:
        """The request to preempt: holders of blocks that are not running go first, then the newest runner."""
        idle_holders = [request for request in self._waiting if request.block_table]
        return max(idle_holders or self._running.values(), key=lambda request: request.arrival)

    def _preempt(self, request: Request) -> None:
        if request.num_steps_under_way:
            raise RuntimeError(f"{request.key!r} cannot lose its blocks: a step under way writes into them")
        self.num_preemptions += 1
        self._pool.release(request.block_table)
        request.block_table = pack_blocks(())
        request.num_computed_tokens = request.num_published_blocks = 0
        if self._running.pop(request.key, None) is not None:
            self._waiting.appendleft(request)

    def _admit(self) -> Request | None:
        """Move the next waiting request into the batch if it fits now."""
        if not self._waiting or len(self._running) >= self.limits.max_num_seqs:
            return None
        request = self._waiting[0]
        if not self._take_blocks(request):
            return None
        self._waiting.popleft()
        self._running[request.key] = request
        return request

    def _take_blocks(self, request: Request) -> bool:
        """Give a request blocks for all its known tokens. False when they do not fit now."""
        if not request.block_table:
            return self._take_fresh_blocks(request)
        num_missing = self._num_blocks(len(request.token_ids)) - len(request.block_table)
        while self._pool.num_available < num_missing:
            others = [waiting for waiting in self._waiting if waiting.block_table and waiting is not request]
            if self._running or not others:
                return False  # what runs, or the end of somebody's lease, will free blocks
            self._preempt(max(others, key=lambda waiting: waiting.arrival))
        request.block_table.extend(self._pool.allocate(num_missing))
        return True

    def _take_fresh_blocks(self, request: Request) -> bool:
        """Blocks for a request that has none, cached ones first."""
        extend_hashes(request.block_hashes, request.token_ids, self.limits.block_size, request.hash_root)
        blocks = self.take_prefix(request.block_hashes, len(request.token_ids) - 1, len(request.token_ids))
        if blocks is None:
            return False
        request.block_table, num_cached_tokens = blocks
        request.num_computed_tokens = num_cached_tokens
        request.num_published_blocks = num_cached_tokens // self.limits.block_size
        # what is found again after a preemption was computed by this request itself
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def take_prefix(
        self, hashes: Sequence[bytes], max_cached_tokens: int, num_tokens: int
    ) -> tuple[BlockTable, int] | None:
        """Blocks for `num_tokens` tokens: (block table, tokens whose KV is already in it), or None when out of blocks.

        At most `max_cached_tokens` tokens come from the prefix cache (whoever needs logits computes one at least).
        """
        block_size = self.limits.block_size
        cached = self._pool.lookup(hashes[: max_cached_tokens // block_size])
        num_missing = self._num_blocks(num_tokens) - len(cached)
        if self._pool.num_available_beside(cached) < num_missing:
            return None
        self._pool.share(cached)
        return pack_blocks(cached + self._pool.allocate(num_missing)), len(cached) * block_size

    def _publish_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        block_size = self.limits.block_size
        num_full = num_computed_tokens // block_size
        if num_full == request.num_published_blocks:
            return
        if num_full > len(request.block_hashes):
            known = request.token_ids[: num_full * block_size]
            extend_hashes(request.block_hashes, known, block_size, request.hash_root)
        for index in range(request.num_published_blocks, num_full):
            self._pool.publish(request.block_table[index], request.block_hashes[index])
        request.num_published_blocks = num_full
