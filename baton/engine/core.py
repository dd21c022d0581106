"""EngineCore: the calls by which every program of Baton uses an engine, `step()` above all.

Owns the way of a request from `add` to its last output, and the parts of an engine: scheduler, steps in flight, and its
side of handoffs (`handoffs`, see `baton.engine.handoffs`). Does not know which program uses it, where requests come
from, or how KV travels: there are no roles in here.

Every block has an owner at every moment: the pool, requests, a step in flight, or a handoff. The blocks of a request
that was added with `first_token_only` become a handoff's when it leaves. Invariant, checked by `check`: requests,
handoffs and steps in flight are together exactly the owners that the pool has counted for each block.

Choices of one prompt can be asked for together: it is computed, or received, once. The forks become requests with their
first tokens; they share the prompt's full blocks and have a copy of the last one.

Where the runner allows it a step is launched while the one before it is computed (`baton.engine.steps_in_flight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.engine.cache.block_log import BlockLog
from baton.engine.cache.block_pool import BlockPool, CacheChanges
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.cache.offload import KvOffload
from baton.engine.handoffs import Handoffs
from baton.engine.held_blocks import HeldBlocks
from baton.engine.models.media import MediaFacts
from baton.engine.new_requests import NewRequests
from baton.engine.runner.base import Runner
from baton.engine.scheduler.draft_counts import DraftCounts
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import Reading
from baton.engine.scheduler.request import Awaited, choices_of
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.steps_in_flight import StepsInFlight, StepWatch
from baton.engine.structured.matcher import Grammars
from baton.wire.errors import InvalidRequest
from baton.wire.messages.membership import NodeStatus
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_GROWING_BLOCKS = 2
"""At once: it takes some milliseconds, for which a request that comes waits."""


def watch_nothing(step: Step) -> None:
    """A `StepWatch` for callers that do not follow layers."""


class EngineCore:
    """One model on one device. Without `grammars` requests with a grammar are refused, and those with media of a kind
    that is not in `media_facts`. `costs` learns what its steps cost. `offload`: that of `pool` and `scheduler`, to be
    read. `drafted`: what of the pool has KV of a draft."""

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
        drafted: DraftCoverage | None = None,
    ) -> None:
        self.offload = offload
        self._block_log: BlockLog | None = None
        self._held = HeldBlocks(pool)
        self._pool = pool
        self._scheduler = scheduler
        self.costs = costs or StepCosts()
        self._in_flight = StepsInFlight(runner, scheduler, pool, self.costs)
        self._new_requests = NewRequests(fingerprint, scheduler.limits.max_request_tokens, grammars, media_facts or {})
        self.handoffs = Handoffs(self._held, pool, scheduler, self._in_flight, self._new_requests, drafted)
        if drafted is not None:
            drafted.is_read = self._is_read

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
    def draft_counts(self) -> DraftCounts:
        """What was drafted and accepted since the start."""
        return self._scheduler.drafts.counts

    @property
    def limits(self) -> SchedulerLimits:
        """How much a step and a request may have."""
        return self._scheduler.limits

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
            drafts=self.draft_counts.by_method(),
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
        `first_token_only` the request leaves after one token, and its blocks are held until `handoffs.release(key)`,
        also when that token ended the request: a transfer may be reading them.

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
            self.handoffs.require_new(each)
        self._scheduler.add(request)

    def prepare(self, params: DecodingParams) -> None:
        """Begin with what a request of these parameters needs before it can be computed: its grammar."""
        self._new_requests.prepare(params)

    def hold_back(self, key: RequestKey, awaited: Awaited) -> None:
        """Admit a request that has just been added only when what it waits for is over. It holds nobody up."""
        request = self._scheduler.requests.get(key)
        if request is not None:
            request.awaited = awaited

    def abort(self, key: RequestKey) -> bool:
        """Drop a request or a fork in any state and release its blocks. Blocks held under its key are not released.
        Returns False when there is no such request.

        What a step in flight samples for it is dropped. A request whose forks are still to come goes on for them; the
        key of any other can be used again at once.
        """
        requests = self._scheduler.requests
        request = requests.remove_fork(key)
        if request is None:
            request = requests.get(key)
            if request is None or not request.is_wanted:
                return False
            request.is_wanted = False
        if not request.is_wanted and not request.forks:
            self._in_flight.drop(request)
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

    def grow(self) -> bool:
        """Give a little more of the pool its memory, while there is nothing else to do. False when all of it has."""
        return self._pool.grow(_GROWING_BLOCKS)

    def is_live(self, key: RequestKey) -> bool:
        """Whether there is a request or a fork of that key that has not left."""
        return key in self._scheduler.requests

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

    def save(self, time_left_s: Callable[[], float]) -> None:
        """Before a planned end: have a tier that outlives this process keep what is cached, while there is time."""
        if self.offload is not None:
            self.offload.save(self._pool, time_left_s)

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

    def _is_read(self, block_id: int) -> bool:
        """Whether a handoff reads this block, or is about to."""
        if self._held.has_block(block_id):
            return True
        return any(block_id in each.block_table for each in self._scheduler.requests if each.first_token_only)

    def _retire(self, output: RequestOutput) -> None:
        request = self._scheduler.requests.remove(output.key)
        if request is None:
            return
        if request.first_token_only:
            self._held.hold(output.key, request.block_table)
        else:
            self._in_flight.release(request)
