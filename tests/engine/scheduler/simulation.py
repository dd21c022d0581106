"""An engine core with a device in pure Python behind it, which remembers what every slot of every block holds.

The device "computes" a token by writing the hash of the whole sequence up to it into its slot, and refuses to compute
when a slot before it holds anything else: KV that was lost, overwritten or of a wrong prefix is noticed at once.
The next token is a function of all tokens before it, so outputs can be compared with `continuation`.

A device of several stages has a step in each, and no pending tokens. An asynchronous device computes a step at any
moment between its launch and its result, by what it read at the launch. It takes pending tokens from what it sampled
last. What another node writes into reserved blocks (`reserve`) is there at once, in no order with the device: a step
that still writes into released blocks destroys it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.offload import KvOffload
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.held_blocks import Reservation
from baton.engine.scheduler.drafts import Speculation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import PENDING_TOKEN, BlockCopy, Request, ScheduledRequest, choices_of
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, SampledTokens, Step
from baton.engine.steps_in_flight import StepFailed
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.tiers import TierTokens
from tests.request_keys import key_of

Name: TypeAlias = str | int
"""What a test calls a request."""

VOCAB_SIZE = 50
EOS = 0


def next_token(token_ids: Sequence[int], choice: int = 0) -> int:
    """The token that the simulated model samples after these tokens."""
    return hash((7919 + choice, *token_ids)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], params: DecodingParams, max_total_tokens: int) -> tuple[list[int], str]:
    """(output, finish reason) that a request must have, whatever the scheduling."""
    output: list[int] = []
    while True:
        output.append(next_token([*prompt, *output], params.choice))
        ends = (() if params.ignore_eos else (EOS,)) + params.stop_token_ids
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_total_tokens:
            return output, "length"


class InjectedFailure(Exception):
    """A step that this simulation made fail."""


@dataclass(frozen=True)
class Row:
    """What the device read of one share when its step was launched."""

    key: RequestKey
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    needs_sample: bool
    choices: tuple[tuple[RequestKey, int], ...]
    block_copy: BlockCopy | None
    num_drafts: int

    def places(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        """`token_ids`, its own, up to each of those behind which a token is sampled."""
        return [token_ids[: len(token_ids) - num_behind] for num_behind in reversed(range(self.num_drafts + 1))]


def _row(share: ScheduledRequest) -> Row:
    choices = ((share.key, share.params), *share.forks)
    return Row(
        share.key,
        share.start,
        share.num_tokens,
        tuple(share.token_ids),
        tuple(share.block_table),
        share.needs_sample,
        tuple((key, params.choice) for key, params in choices),
        share.block_copy,
        share.num_drafts,
    )


@dataclass
class LaunchedStep:
    """See `RunningStep`."""

    device: Device
    rows: list[Row]
    tokens: dict[RequestKey, SampledTokens] = field(default_factory=dict)
    is_computed: bool = False
    has_failed: bool = False

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        self.device.collect(self)
        if self.has_failed:
            raise InjectedFailure("the device could not compute a step")
        return self.tokens

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        return {}


@dataclass
class Device:
    """KV as (block, slot) -> hash of the sequence up to that token. See `Runner`."""

    block_size: int
    is_asynchronous: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failure_rate: float = 0.0
    num_stages: int = 1
    slots: dict[tuple[int, int], int | None] = field(default_factory=dict)
    num_computed_tokens: int = 0
    most_in_flight: int = 0
    _launched: deque[LaunchedStep] = field(default_factory=deque)
    _sampled: dict[RequestKey, SampledTokens] = field(default_factory=dict)

    def write(self, token_ids: Sequence[int], block_table: Sequence[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[self._slot(block_table, position)] = hash(tuple(token_ids[: position + 1]))

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> LaunchedStep:
        rows = [_row(share) for share in step.requests]
        for row, share in zip(rows, step.requests, strict=True):
            num_pending = row.token_ids.count(PENDING_TOKEN)
            assert num_pending <= (1 if self._launched and self.num_stages == 1 else 0)
            assert row.needs_sample == (row.start + row.num_tokens == len(row.token_ids))
            if num_pending:
                assert row.token_ids[-1] == PENDING_TOKEN
                assert not share.params.needs_history, "penalties need the values"
        if self.chance.random() < self.failure_rate / 2:
            raise InjectedFailure("a step could not be launched")
        is_void = any(before.has_failed for before in self._launched)
        launched = LaunchedStep(self, rows, has_failed=is_void or self.chance.random() < self.failure_rate)
        self._launched.append(launched)
        assert len(self._launched) <= (2 if self.is_asynchronous else self.num_stages)
        self.most_in_flight = max(self.most_in_flight, len(self._launched))
        if self.chance.random() < 0.5:
            for one in self._launched:
                self._compute(one)
        return launched

    def collect(self, oldest: LaunchedStep) -> None:
        """Compute it, if that did not happen yet, and forget it."""
        assert self._launched[0] is oldest, "results are taken in the order of launches"
        self._compute(self._launched.popleft())

    def _compute(self, launched: LaunchedStep) -> None:
        if launched.is_computed:
            return
        launched.is_computed = True
        sampled: dict[RequestKey, SampledTokens] = {}
        for row in launched.rows:
            if row.block_copy is not None:
                self._copy(*row.block_copy)
        for row in launched.rows:
            if launched.has_failed:
                self._overwrite(row)
                continue
            token_ids = self._known(row)
            self._check_context(row, token_ids)
            self.write(token_ids, row.block_table, row.start, row.start + row.num_tokens)
            self.num_computed_tokens += row.num_tokens
            if row.needs_sample:
                for key, choice in row.choices:
                    sampled[key] = tuple(SampledToken(next_token(each, choice), None) for each in row.places(token_ids))
        if launched.has_failed:
            for later in self._launched:
                later.has_failed = later.has_failed or not later.is_computed
        launched.tokens, self._sampled = sampled, sampled

    def _known(self, row: Row) -> tuple[int, ...]:
        if row.token_ids[-1] != PENDING_TOKEN:
            return row.token_ids
        return (*row.token_ids[:-1], self._sampled[row.key][-1].token_id)

    def _copy(self, source: int, target: int) -> None:
        for slot in range(self.block_size):
            self.slots[target, slot] = self.slots.get((source, slot))

    def _overwrite(self, row: Row) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            self.slots[self._slot(row.block_table, position)] = None

    def _slot(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        return block_table[position // self.block_size], position % self.block_size

    def _check_context(self, row: Row, token_ids: Sequence[int]) -> None:
        for position in range(row.start):
            expected = hash(tuple(token_ids[: position + 1]))
            if self.slots.get(self._slot(row.block_table, position)) != expected:
                raise AssertionError(f"{row.key}: the KV of token {position} is not in its slot")


class Simulation:
    """Adds, steps and aborts; every step checks what must hold after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_request_tokens: int | None = None,
        prefix_caching: bool = True,
        device: Device | None = None,
        proposer: Proposer | None = None,
        offload: KvOffload | None = None,
    ) -> None:
        limit = min(max_request_tokens or 10**9, num_blocks * block_size)
        self.device = device or Device(block_size)
        self.limits = SchedulerLimits(block_size, max_num_seqs, budget, limit, num_stages=self.device.num_stages)
        on_evicted = None if offload is None else offload.evicted
        self.pool = BlockPool(num_blocks, prefix_caching=prefix_caching, on_evicted=on_evicted)
        speculation = None if proposer is None else Speculation(proposer)
        self.scheduler = Scheduler(self.pool, self.limits, frozenset({EOS}), speculation=speculation, offload=offload)
        self.core = EngineCore(self.pool, self.scheduler, self.device, "model", offload=offload)
        self.outputs: dict[Name, list[int]] = {}
        self.finished: dict[Name, str] = {}
        self.cached: dict[Name, int] = {}
        self.tiers: dict[Name, tuple[TierTokens, ...]] = {}
        self.num_failures = 0
        self.num_steps_ahead = 0
        self.num_rows_wasted = 0
        self.num_just_ended = 0
        self.follows_all = proposer is not None
        self._reserved: dict[Name, tuple[Reservation, list[int]]] = {}
        self._launched: list[Step] = []
        self._in_flight: deque[Step] = deque()
        self._holders: set[RequestKey] = set()
        self._num_preemptions = 0
        self._names: dict[RequestKey, Name] = {}

    def _key(self, name: Name) -> RequestKey:
        key = key_of(name)
        self._names[key] = name
        return key

    def name(self, share: ScheduledRequest) -> Name:
        """What the test calls the request that has this share."""
        return self._names[share.key]

    def request(
        self, name: Name, prompt: Sequence[int], params: DecodingParams, output_ids: Sequence[int] = (), **parts: Any
    ) -> Request:
        """`parts` of its prompt, beside the ids."""
        max_tokens = self.limits.max_request_tokens
        return Request(self._key(name), Prompt.of(prompt, **parts), params, b"root", max_tokens, output_ids)

    def add(
        self, name: Name, prompt: Sequence[int], params: DecodingParams | None = None, forks: Sequence[Name] = ()
    ) -> None:
        chosen = params or DecodingParams(max_tokens=4, ignore_eos=True)
        self.core.add(self._key(name), Prompt.of(prompt), chosen, forks=[self._key(fork) for fork in forks])
        for each in (name, *forks):
            self.outputs[each] = []

    def reserve(self, name: Name, prompt: Sequence[int]) -> bool:
        """Reserve blocks for a prompt, as for a handoff, and write its KV as another node would. False without room."""
        reservation = self.core.handoffs.reserve(self._key(name), Prompt.of(prompt))
        if reservation is None:
            return False
        self._reserved[name] = (reservation, list(prompt))
        self.device.write(prompt, reservation.block_table, reservation.num_cached_tokens, len(prompt))
        return True

    def deliver(self, name: Name, params: DecodingParams, forks: Sequence[Name] = ()) -> None:
        """As after a handoff: the choices go on here, except those that their first token ended."""
        reservation, prompt = self._reserved.pop(name)
        firsts: list[FirstToken] = []
        for key, own in choices_of([self._key(each) for each in (name, *forks)], params):
            each, first = self._names[key], next_token(prompt, own.choice)
            self.outputs[each] = [first]
            expected, reason = continuation(prompt, own, self.limits.max_request_tokens)
            if len(expected) == 1:
                self.finished[each] = reason
            else:
                firsts.append(FirstToken(key, own, first))
        if firsts:
            self.core.handoffs.add_reserved(reservation, Prompt.of(prompt), firsts)
        else:
            self.core.handoffs.release(self._key(name))

    def add_computed(self, name: Name, prompt: Sequence[int], params: DecodingParams) -> bool:
        """`reserve` and `deliver`. False without room."""
        has_room = self.reserve(name, prompt)
        if has_room:
            self.deliver(name, params)
        return has_room

    def abort(self, name: Name) -> None:
        self.core.abort(self._key(name))

    def step(self) -> Step:
        """One call of `EngineCore.step`; the first step that it launched."""
        self._launched = []
        self.num_just_ended = 0
        self._holders = {request.key for request in self.live() if request.block_table}
        self._num_preemptions = self.scheduler.num_preemptions
        try:
            outputs = self.core.step(self._watch)
        except StepFailed as error:
            if not isinstance(error.__cause__, InjectedFailure):
                raise
            self._note_failure()
        else:
            if self._in_flight:
                self.num_rows_wasted += len(self._in_flight.popleft().requests) - len(outputs)
            for output in outputs:
                self._note(output)
        self.check_blocks()
        return self._launched[0] if self._launched else Step(())

    def run(self, max_steps: int = 10_000) -> None:
        """Until every request has finished."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"{self.core.request_keys()} did not finish")

    def live(self) -> list[Request]:
        return list(self.scheduler.requests)

    def check_blocks(self) -> None:
        """Blocks with an owner are exactly the held ones."""
        self.core.check()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks

    def _watch(self, step: Step) -> None:
        if self.core.num_steps_in_flight:
            self.num_steps_ahead += 1
            assert self.scheduler.num_preemptions == self._num_preemptions, "nothing is preempted ahead"
        self._num_preemptions = self.scheduler.num_preemptions
        self._launched.append(step)
        self._in_flight.append(step)
        self._check_step(step)
        self._check_oldest_keeps_its_blocks()

    def _check_step(self, step: Step) -> None:
        budget, num_drafts = self.limits.max_num_batched_tokens, sum(share.num_drafts for share in step.requests)
        chunks = [share.num_tokens - (share.num_drafts > 0) for share in step.requests]
        assert sum(count for count in chunks if count > 1) <= budget
        assert step.num_tokens < budget + self.limits.max_num_seqs
        assert len({share.key for share in step.requests}) == len(step.requests) <= self.limits.max_num_seqs
        assert self.scheduler.requests.num_rows + num_drafts <= self.limits.max_num_seqs or not num_drafts
        assert self.scheduler.requests.num_running <= self.limits.max_num_seqs
        for share in step.requests:
            assert share.num_tokens >= 1
            assert len(share.block_table) * self.limits.block_size >= share.start + share.num_tokens
        sizes = [share.num_tokens for share in step.requests]
        if max(sizes, default=0) > 1 and self.limits.num_stages == 1:
            scheduled = {share.key for share in step.requests}
            running = self.live()[: self.scheduler.requests.num_running]
            streams = {request.key for request in running if request.num_uncomputed_tokens == 1}
            assert streams - {request.key for request in running if self._is_left_out(request)} <= scheduled

    def _is_left_out(self, request: Request) -> bool:
        """Its last token is pending, and nothing is to follow, or the next token needs its value."""
        num_tokens = len(request.token_ids)
        is_full = num_tokens - request.num_prompt_tokens == request.params.max_tokens
        is_last = is_full or num_tokens == self.limits.max_request_tokens or not request.is_wanted
        needs_last = self.follows_all or request.has_drafts or request.params.needs_last_token
        return request.token_ids[-1] == PENDING_TOKEN and (is_last or needs_last)

    def _check_oldest_keeps_its_blocks(self) -> None:
        oldest = min(self.live(), key=lambda request: request.arrival, default=None)
        if oldest is not None and oldest.key in self._holders:
            assert oldest.block_table

    def _note(self, output: RequestOutput) -> None:
        name = self._names[output.key]
        assert output.output_index == len(self.outputs[name])
        if output.tokens:
            self.outputs[name].extend(output.token_ids)
        self.cached[name] = output.num_cached_tokens
        self.tiers[name] = output.tiers
        if output.has_left:
            self.num_just_ended += 1
            self.finished[name] = output.finish_reason

    def _note_failure(self) -> None:
        self.num_failures += 1
        self._in_flight.clear()
        assert not self.core.num_steps_in_flight
        for request in self.live():
            assert PENDING_TOKEN not in request.token_ids
            assert request.token_ids[request.num_prompt_tokens :] == self.outputs[self._names[request.key]]
