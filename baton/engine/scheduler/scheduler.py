"""The scheduler: turns "tokens still to compute" into steps under one token budget.

Owns what each step computes, and what its result means for the requests in it; their order is `LiveRequests`' and their
blocks are `RequestBlocks`'. Knows no tensors, models, nodes or transports.

There are no phases. A request has known tokens and computed tokens; a step computes some of the difference. Requests
that need a single token (they are decoding) are in every step, so no stream waits for the prompt of another request.
Beside them prompts have the token budget, in chunks, by their turns: oldest first, unless a `StepBound` lets short ones
go before long ones. If those that decode took from it, a prompt of just the budget would leave a few tokens to the next
step, and its first token would wait for the chunk of the prompt behind it. For the same reason several prompts are in a
step only if it ends them all. Beside decoding requests a `StepBound`, where there is one, makes chunks as small as a
step's time allows; such a small step is filled up with the next prompt.

Blocks: a request is admitted when all its known tokens fit and KV that it waits for has come. Decoding grows block by
block; when none is left, the newest request is preempted: it gives its blocks up, and is computed again later.

A step goes through `schedule` (what to compute), `advance` (it was launched) and `apply` (its result is here); `rewind`
undoes `advance`. Between the two it is in flight, and the token it samples for a request stands as `PENDING_TOKEN` in
`token_ids`, so that `schedule_ahead` can plan the next step meanwhile. What needs results never happens ahead:
preemption, sampling with penalties or a grammar, and drafts. What only a result can tell (a stop token, a row of NaN)
is found in `apply`; the share of such a request in the next step then has no owner and is skipped.

A step samples one token of a request, or several where a `Proposer` has guessed what follows: see that module.

Forks: choices of one prompt are one request, of several rows, until its first token is sampled. The step that does it
samples one for each choice, and `apply` makes the forks requests of their own, which share the prompt's blocks.

Invariants:
- the oldest request is never preempted for a newer one, so it always makes progress;
- a request that could never fit is refused in `add`, not queued;
- a block table only grows while a request runs, and keeps its blocks while a step in flight writes into them;
- a block is published when the step that filled it was applied, so its hash covers known tokens only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.offload import KvOffload
from baton.engine.scheduler.drafts import Drafts, Speculation
from baton.engine.scheduler.limits import SchedulerLimits, require_room_for_media
from baton.engine.scheduler.live_requests import TURN, LiveRequests
from baton.engine.scheduler.output_ends import OutputEnds
from baton.engine.scheduler.reading import ReadSpan, RowsRead
from baton.engine.scheduler.request import MEDIA_GONE, PENDING_TOKEN, Request, ScheduledRequest
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.step import RequestOutput, SampledTokens, Step
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_series import StepSeries, can_begin
from baton.wire.errors import Overloaded
from baton.wire.request_key import RequestKey

_MOST_AWAITED = 64
"""Prompts whose first tokens a step is planned for; those behind them wait for them."""
_NOTHING: Mapping[RequestKey, RowsRead] = {}


class Scheduler:
    """Chooses steps and applies their results. `requests`, `blocks`, `drafts`: for reading, `remove` and `take`."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: frozenset[int],
        bound: StepBound | None = None,
        speculation: Speculation | None = None,
        offload: KvOffload | None = None,
    ) -> None:
        self.limits = limits
        self.requests = LiveRequests()
        self.blocks = RequestBlocks(pool, limits.block_size, has_states=limits.has_states, offload=offload)
        self.num_preemptions = 0
        self.drafts = Drafts(speculation, limits, self.blocks)
        self.requests.on_left = self.drafts.forget
        self._ends = OutputEnds(eos_token_ids, jumps_ahead=limits.jumps_ahead)
        self._eos_token_ids = eos_token_ids
        self._bound = bound
        self._lost: list[RequestOutput] = []
        self._series: StepSeries | None = None

    def add(self, request: Request) -> None:
        """Queue a request without blocks. Raises `ContextLengthExceeded`, `InvalidRequest` or `Overloaded`."""
        self.limits.check(request)
        num_waiting = self.requests.num_waiting
        if num_waiting >= self.limits.max_num_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting already")
        if request.prompt.media:
            require_room_for_media(self.requests)
        if self._bound is not None:
            self._bound.queued(request)
        self.requests.add(request)

    def add_computed(self, request: Request) -> None:
        """Queue a request whose `block_table` holds the KV of `num_computed_tokens` tokens and becomes its own."""
        self.limits.check(request)
        self.blocks.publish(request, request.num_computed_tokens)
        if self._bound is not None:
            self._bound.begun(request)
        self.requests.add(request)

    def add_fork(self, request: Request, source: Request, num_computed_tokens: int) -> None:
        """Queue a request that begins with the same `num_computed_tokens` tokens as `source`, and shares their KV."""
        self.blocks.fork(request, source, num_computed_tokens)
        request.last_due_s = source.last_due_s
        self.requests.add(request)

    def schedule(self, *, expects_streams: bool = False) -> Step:
        """The next step, while none is in flight; empty when nothing can be computed now. `expects_streams`: requests
        that decode may join at any moment, so a long step would hold them up."""
        series = self._series
        goes_on = series is not None and series.is_applied and series.num_changes == self.requests.num_changes
        if series is not None and goes_on and not self.drafts.follows_any(series.requests):
            step = series.next_step()
            if step is not None:
                return step
        step = self._fill(*self.requests.by_age(self.limits.num_stages), expects_streams=expects_streams)
        self._series = self._series_of(step)
        return step if self._series is None else self._series.first_step()

    def _series_of(self, step: Step) -> StepSeries | None:
        """The series that begins with `step`, where the next steps are known as long as no request comes or leaves."""
        running = self.requests.running
        if len(step.shares) != len(running) or self.requests.num_waiting or step.spans:
            return None
        requests = [running[share.key] for share in step.shares]
        if not can_begin(step.shares, requests) or self.drafts.follows_any(requests):
            return None
        return StepSeries(step.shares, requests, self.blocks, self._eos_token_ids, self.requests.num_changes)

    def schedule_ahead(self, *, expects_streams: bool = False) -> Step | None:
        """The step after the one that is in flight, if it can be known before that one's result, as `schedule`.

        Requests whose next token needs the value of the one before it (penalties, grammars, drafts) are left out as
        long as that is not known, and the others go on without them. None when room for the step needs a preemption, or
        when there is nothing to compute. To be asked again once the result was applied.
        """
        everyone, prompts = self.requests.by_age(self.limits.num_stages)
        decoding = [each for each in everyone if not (each.num_pending_tokens and self.drafts.needs_last_token(each))]
        if not self.requests.running:
            return None
        first, blocks = [*decoding, *prompts], self.blocks
        if sum(blocks.num_missing(request) for request in first if not blocks.has_room(request)) > blocks.num_available:
            return None
        step = self._fill(decoding, prompts, expects_streams=expects_streams)
        self._series = None
        return step if step.shares else None

    def advance(self, step: Step) -> None:
        """Record that `step` was launched, right after it was scheduled."""
        if self._series is not None and step.series is self._series:
            self._series.advance()
            return
        running = self.requests.running
        for share in step.requests:
            request = running[share.key]
            request.num_computed_tokens = share.start + share.num_tokens - share.num_drafts
            request.has_drafts = share.num_drafts > 0
            request.num_steps_in_flight += 1
            if share.needs_sample:
                request.token_ids.append(PENDING_TOKEN)
                request.num_pending_tokens += 1

    def apply(
        self, step: Step, sampled: Mapping[RequestKey, SampledTokens], read: Mapping[RequestKey, RowsRead] = _NOTHING
    ) -> list[RequestOutput]:
        """Record that `step`, the oldest in flight, was computed, and what it sampled and read; where no token is there
        of those that were due, the request ends. Requests that were removed since it was launched are skipped.

        The caller removes those that have left.
        """
        series = self._series
        if series is not None and step.series is series and series.num_changes == self.requests.num_changes:
            found = series.apply(sampled)
            if found is not None:
                return found
        running, outputs = self.requests.running, list[RequestOutput]()
        for share in step.requests:
            if (request := running.get(share.key)) is None or request.arrival != share.arrival:
                continue
            output = self._apply(request, share, sampled.get(share.key, ()), read.get(share.key) if read else None)
            if share.needs_sample and share.forks:
                outputs += self._fork(output, request, sampled)
            elif request.matcher is None or request.matcher.leaves_choice:
                outputs.append(output)
            else:
                outputs.append(self._ends.jump(request, output))
        return outputs

    def take_lost(self) -> list[RequestOutput]:
        """Requests that were removed since the last call because what is to be computed of them is not here: media
        whose KV was made elsewhere, and lost its place."""
        lost, self._lost = self._lost, []
        return lost

    def rewind(self, step: Step) -> None:
        """Record that `step`, the newest in flight, was not computed: its requests are where they were before it."""
        self._series = None
        for share in step.requests:
            if (request := self.requests.owner(share)) is None:
                continue
            request.num_computed_tokens = share.start
            request.num_steps_in_flight -= 1
            if share.needs_sample:
                request.token_ids.pop()
                request.num_pending_tokens -= 1
            if share.num_drafts:
                self.drafts.drop(request)

    def keys_of(self, step: Step) -> list[RequestKey]:
        """Keys of the requests of `step` that are still live, and of their forks."""
        requests = [request for share in step.requests if (request := self.requests.owner(share)) is not None]
        return [key for request in requests for key in (request.key, *(fork.key for fork in request.forks))]

    def _apply(
        self, request: Request, share: ScheduledRequest, tokens: SampledTokens, read: RowsRead | None
    ) -> RequestOutput:
        request.num_steps_in_flight -= 1
        if read is not None:
            request.unread_rows = range(read.first_row + read.num_rows, request.unread_rows.stop)
        if share.block_copy is not None:
            self.blocks.end_copy(request)
        num_known, finish_reason, draft = len(request.token_ids) - request.num_pending_tokens, "", None
        if share.needs_sample:
            request.num_pending_tokens -= 1
            if tokens:
                if self._bound is not None and request.last_due_s is None:
                    self._bound.begun(request)
                if share.num_drafts:
                    tokens, draft = self.drafts.accepted(request, tokens)
                tokens, finish_reason = self._ends.take(request, tokens)
        num_computed_tokens = share.start + share.num_tokens
        if share.num_drafts:
            num_computed_tokens = request.num_computed_tokens = len(request.token_ids) - 1
            self.drafts.drop(request)
        self.blocks.publish(request, num_computed_tokens)
        has_failed = share.needs_sample and not tokens
        has_left = bool(finish_reason) or has_failed or (request.first_token_only and bool(tokens))
        if not share.needs_sample and num_computed_tokens == len(request.token_ids):
            has_left = True  # it wants no token, and all of it is computed
        return RequestOutput(
            request.key,
            share.num_tokens,
            num_computed_tokens,
            request.num_cached_tokens or 0,
            num_known - request.num_prompt_tokens,
            tokens,
            finish_reason,
            has_left,
            has_failed,
            request.failure if has_failed else "",
            0,
            read,
            request.tiers,
            draft,
        )

    def _fork(
        self, output: RequestOutput, request: Request, sampled: Mapping[RequestKey, SampledTokens]
    ) -> list[RequestOutput]:
        """Make requests of the forks of `request`, whose first token has just been sampled. The outputs of all of its
        choices; `output` is its own."""
        if not request.is_wanted:
            output = output._replace(tokens=(), finish_reason="", has_left=True, has_failed=False)
        outputs = [self._ends.jump(request, output)]
        for fork in self.requests.take_forks(request):
            tokens, num_computed_tokens = sampled.get(fork.key, ()), output.num_computed_tokens
            finish_reason, forked = "", None
            if tokens:
                forked = request.forked(fork, num_computed_tokens, tokens[0].token_id)
                finish_reason = self._ends.finish_reason(forked)
                if not finish_reason and not request.first_token_only:
                    self.add_fork(forked, request, num_computed_tokens)
            has_left = not tokens or bool(finish_reason) or request.first_token_only
            index = output.output_index
            failure = "" if tokens else request.failure
            forked_output = RequestOutput(
                fork.key, 0, num_computed_tokens, 0, index, tokens, finish_reason, has_left, not tokens, failure
            )
            outputs.append(forked_output if forked is None else self._ends.jump(forked, forked_output))
        return outputs

    def _fill(self, decoding: Sequence[Request], prompts: Sequence[Request], *, expects_streams: bool = False) -> Step:
        """One token for each of `decoding`, and of those that came with their KV; and prompts with the budget."""
        running, has_room = self.requests.running, self.blocks.has_room
        budget, block_size = self.limits.max_num_batched_tokens, self.limits.block_size
        shares: dict[RequestKey, ScheduledRequest] = {}
        spans: list[ReadSpan] = []
        for request in decoding:
            has_slot = len(request.block_table) * block_size >= len(request.token_ids)  # a preempted one has none
            if has_slot or (request.key in running and self._make_room(request, shares)):
                share = shares[request.key] = request.share(1)
                if request.reading is not None and (span := request.span(share)) is not None:
                    spans.append(span)
        while self._first_is_computed and (admitted := self._admit()) is not None:
            self._share(admitted, 1, shares, spans)
        if jumped := [request for request in prompts if request.has_jumped]:
            prompts = [request for request in prompts if not request.has_jumped]
            for request in jumped:
                if budget > 0 and request.key in running and (has_room(request) or self._make_room(request, shares)):
                    budget -= self._share(request, budget, shares, spans)
        chunk = budget
        if self._bound is not None and (shares or expects_streams) and (prompts or self.requests.num_waiting):
            awaited = list(islice(merge(prompts, self.requests.waiting, key=TURN), _MOST_AWAITED))
            budget = min(budget, self._bound.prompt_tokens([running[key] for key in shares], awaited))
        is_shortened, is_first = budget < chunk, True
        begun = deque([request for request in prompts if request.key in running])
        while budget > 0 and (following := self._next_prompt(begun)) is not None:
            if not (is_first or is_shortened) and following.num_uncomputed_tokens > budget:
                break  # the one before it ends in this step, and is not to wait for a part of this one
            budget -= self._share(following, budget, shares, spans)
            is_first = False
        self.drafts.add(shares, running, self.requests.num_rows, budget)
        return Step(tuple(shares.values()), tuple([span for span in spans if span.key in shares]))

    def _next_prompt(self, begun: deque[Request]) -> Request | None:
        """The first of those that have `begun`, unless one waits whose turn is before it and that fits now."""
        waiting = self.requests.first_waiting
        if not begun or (waiting is not None and waiting.turn_s < begun[0].turn_s):
            return self._admit() or (begun.popleft() if begun else None)
        return begun.popleft()

    def _share(
        self,
        request: Request,
        budget: int,
        shares: dict[RequestKey, ScheduledRequest],
        spans: list[ReadSpan],
    ) -> int:
        count = min(request.num_uncomputed_tokens, budget)
        if count > 0:
            share = shares[request.key] = request.share(count)
            if request.reading is not None and (span := request.span(share)) is not None:
                spans.append(span)
        return count

    def _make_room(self, request: Request, shares: dict[RequestKey, ScheduledRequest]) -> bool:
        """Blocks for the tokens of a running request. False when `request` itself had to be preempted."""
        while self.blocks.num_available < self.blocks.num_missing(request):
            victim = self._newest()
            self._preempt(victim)
            shares.pop(victim.key, None)
            if victim is request:
                return False
        self.blocks.extend(request)
        return True

    def _newest(self) -> Request:
        """The request to preempt: of those that hold blocks, the newest."""
        holders = (*self.requests.running.values(), *self.requests.waiting_holders())
        return max(holders, key=lambda request: request.arrival)

    def _preempt(self, request: Request) -> None:
        if request.num_steps_in_flight:
            raise RuntimeError(f"{request.key!r} cannot lose its blocks: a step in flight writes into them")
        self.num_preemptions += 1
        self.blocks.release_all(request)
        self.requests.preempt(request)

    @property
    def _first_is_computed(self) -> bool:
        """Whether the next request to admit came with its KV: it needs no budget, but waits behind prompts for it."""
        request = self.requests.first_waiting
        return request is not None and bool(request.block_table) and request.num_uncomputed_tokens == 1

    def _admit(self) -> Request | None:
        """Move the next waiting request into the batch if it fits now. One that waits for KV counts as a row."""
        while (request := self.requests.first_waiting) is not None:
            self.blocks.end_load(request)
            if self.requests.num_rows + self.blocks.num_loads + len(request.forks) >= self.limits.max_num_seqs:
                return None
            if not (self._complete_blocks(request) if request.block_table else self.blocks.take_for(request)):
                return None
            if request.load is not None:
                self.requests.hold(request)
            elif not request.lacks_payload:
                return self.requests.admit(request)
            else:
                self._lose(request)
        return None

    def _lose(self, request: Request) -> None:
        self.blocks.release_all(request)
        self.requests.remove(request.key)
        index = len(request.token_ids) - request.num_prompt_tokens
        self._lost.append(RequestOutput(request.key, 0, 0, 0, index, (), "", True, True, MEDIA_GONE))

    def _complete_blocks(self, request: Request) -> bool:
        """Give a waiting request that holds blocks those that it lacks. False when they do not fit now."""
        while self.blocks.num_available < self.blocks.num_missing(request):
            others = [newer for newer in self.requests.waiting_holders() if newer.arrival > request.arrival]
            if self.requests.running or not others:
                return False  # running requests, older ones, or the end of a lease, will free blocks
            self._preempt(max(others, key=lambda waiting: waiting.arrival))
        self.blocks.extend(request)
        return True
