"""A scheduler with a device in pure Python behind it, which remembers what every slot of every block holds.

The device "computes" a token by writing the hash of the whole sequence up to it into its slot, and refuses to compute
when a slot before it holds anything else: KV that was lost, overwritten or of a wrong prefix is noticed at once.
The next token is a function of all tokens before it, so outputs can be compared with `continuation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api.sampling import DecodingParams
from engine.cache.block_pool import BlockPool
from engine.cache.hashing import extend_hashes
from engine.scheduler.request import Request, RequestOutput, SampledToken, ScheduledRequest, Step
from engine.scheduler.scheduler import Scheduler, SchedulerLimits

VOCAB_SIZE = 50
EOS = 0


def next_token(token_ids: Sequence[int]) -> int:
    """What the simulated model says after these tokens."""
    return hash((7919, *token_ids)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], params: DecodingParams, max_total_tokens: int) -> tuple[list[int], str]:
    """(output, finish reason) that a request must have, whatever the scheduling."""
    output: list[int] = []
    while True:
        output.append(next_token([*prompt, *output]))
        ends = (() if params.ignore_eos else (EOS,)) + params.stop_token_ids
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_total_tokens:
            return output, "length"


@dataclass
class Device:
    """KV as (block, slot) -> hash of the sequence up to that token."""

    block_size: int
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    num_computed_tokens: int = 0

    def write(self, token_ids: Sequence[int], block_table: Sequence[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[self._slot(block_table, position)] = hash(tuple(token_ids[: position + 1]))

    def execute(self, step: Step) -> dict[object, SampledToken]:
        for share in step.requests:
            self._check_context(share)
            self.write(share.token_ids, share.block_table, share.start, share.start + share.num_tokens)
            self.num_computed_tokens += share.num_tokens
        return {
            share.key: SampledToken(next_token(share.token_ids), None) for share in step.requests if share.needs_sample
        }

    def _slot(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        return block_table[position // self.block_size], position % self.block_size

    def _check_context(self, share: ScheduledRequest) -> None:
        for position in range(share.start):
            expected = hash(tuple(share.token_ids[: position + 1]))
            if self.slots.get(self._slot(share.block_table, position)) != expected:
                raise AssertionError(f"{share.key}: the KV of token {position} is not in its slot")


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
    ) -> None:
        limit = min(max_request_tokens or 10**9, num_blocks * block_size)
        self.limits = SchedulerLimits(block_size, max_num_seqs, budget, limit)
        self.pool = BlockPool(num_blocks, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(self.pool, self.limits, frozenset({EOS}))
        self.device = Device(block_size)
        self.outputs: dict[object, list[int]] = {}
        self.finished: dict[object, str] = {}
        self.cached: dict[object, int] = {}

    def request(self, key: object, prompt: Sequence[int], params: DecodingParams) -> Request:
        return Request(key, list(prompt), len(prompt), params, b"root", self.limits.max_request_tokens)

    def add(self, key: object, prompt: Sequence[int], params: DecodingParams | None = None) -> None:
        self.scheduler.add(self.request(key, prompt, params or DecodingParams(max_tokens=4, ignore_eos=True)))
        self.outputs[key] = []

    def add_computed(self, key: object, prompt: Sequence[int], params: DecodingParams) -> bool:
        """As after a handoff: KV of the prompt written by somebody else, first token drawn. False without room."""
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, self.limits.block_size, b"root")
        taken = self.scheduler.take_prefix(hashes, len(prompt), len(prompt))
        if taken is None:
            return False
        request = self.request(key, prompt, params)
        request.block_table, num_cached_tokens = taken
        self.device.write(prompt, request.block_table, num_cached_tokens, len(prompt))
        request.token_ids.append(next_token(prompt))
        request.num_computed_tokens = len(prompt)
        request.num_published_blocks = num_cached_tokens // self.limits.block_size
        self.outputs[key] = request.token_ids[len(prompt) :]
        reason = self.scheduler.finish_reason(request)
        if reason:
            self.finished[key] = reason
            self.pool.release(request.block_table)
        else:
            self.scheduler.add_computed(request)
        return True

    def abort(self, key: object) -> None:
        request = self.scheduler.remove(key)
        if request is not None:
            self.pool.release(request.block_table)

    def step(self) -> Step:
        holders = {request.key for request in self.live() if request.block_table}
        step = self.scheduler.schedule()
        self._check_step(step)
        self._check_oldest_keeps_its_blocks(holders)
        for output in self.scheduler.apply(step, self.device.execute(step)):
            self._note(output)
        self.check_blocks()
        return step

    def run(self, max_steps: int = 10_000) -> None:
        """Until every request has finished."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.live_keys()} did not finish")

    def live(self) -> list[Request]:
        found = [self.scheduler.get(key) for key in self.scheduler.live_keys()]
        return [request for request in found if request is not None]

    def check_blocks(self) -> None:
        """Blocks of live requests are exactly the held ones."""
        self.pool.check()
        owners = Counter(block_id for request in self.live() for block_id in request.block_table)
        assert self.pool.num_held == len(owners)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks

    def _check_step(self, step: Step) -> None:
        assert step.num_tokens <= self.limits.max_num_batched_tokens
        assert len({share.key for share in step.requests}) == len(step.requests) <= self.limits.max_num_seqs
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        for share in step.requests:
            assert share.num_tokens >= 1
            assert len(share.block_table) * self.limits.block_size >= share.start + share.num_tokens
        sizes = [share.num_tokens for share in step.requests]
        if max(sizes, default=0) > 1:
            scheduled = {share.key for share in step.requests}
            running = self.live()[: self.scheduler.num_running]
            assert {request.key for request in running if request.num_uncomputed_tokens == 1} <= scheduled

    def _check_oldest_keeps_its_blocks(self, holders: set[object]) -> None:
        oldest = min(self.live(), key=lambda request: request.arrival, default=None)
        if oldest is not None and oldest.key in holders:
            assert oldest.block_table

    def _note(self, output: RequestOutput) -> None:
        if output.token is not None:
            assert output.index == len(self.outputs[output.key])
            self.outputs[output.key].append(output.token.token_id)
        self.cached[output.key] = output.num_cached_tokens
        if output.has_left:
            self.finished[output.key] = output.finish_reason
            self.abort(output.key)
