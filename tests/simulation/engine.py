"""The model of a simulation: small, deterministic, and such that a wrong byte of KV changes every later token.

The KV of a token is a digest of the sequence up to it, and the next token a digest of all KV of the sequence, read from
the blocks. So what a request must generate is known (`reference`), and blocks that were mixed up, released too early or
never written show in its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.drafts import Speculation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import PENDING_TOKEN, BlockCopy, ScheduledRequest
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.kvtransfer.transports.base import Blocks
from baton.wire.request_key import RequestKey
from tests.computed_step import ComputedStep
from tests.engine.scheduler.proposers import Guessing
from tests.kvtransfer.pools import BLOCK_BYTES, BLOCK_SIZE

POISON = (28, 28, 28)
"""How the prompt begins that no node survives."""
_SLOT_BYTES = BLOCK_BYTES // BLOCK_SIZE
_VOCABULARY = 29
EOS = _VOCABULARY
NUM_BLOCKS, MAX_NUM_SEQS, MAX_STEP_TOKENS = 24, 4, 8
FINGERPRINT = "model-a"


class Crash(BaseException):
    """The node computes the prompt that no node survives."""


class _Row(NamedTuple):
    """The part of a share that is read when its step is launched."""

    key: RequestKey
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    choices: tuple[tuple[RequestKey, int], ...]
    block_copy: BlockCopy | None
    num_drafts: int


@dataclass(slots=True)
class SimRunner:
    """Writes KV and samples. The next `num_failing` launches fail. With `is_asynchronous` a step touches its blocks as
    late as it may: when its result is collected."""

    blocks: Blocks
    is_asynchronous: bool = False
    num_failing: int = 0
    sampled: Mapping[RequestKey, SampledTokens] = field(default_factory=dict)

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """See `Runner`. Raises `Crash`."""
        if any(tuple(share.token_ids[: len(POISON)]) == POISON for share in step.requests):
            raise Crash
        if self.num_failing:
            self.num_failing -= 1
            raise MemoryError("no room for the step")
        late = _LateStep(self, [_row(share) for share in step.requests], layer_stored)
        return late if self.is_asynchronous else ComputedStep(late.result())

    def compute(self, rows: Sequence[_Row], layer_stored: LayerStored | None) -> Mapping[RequestKey, SampledTokens]:
        """Compute a step; the one before it is complete."""
        rows = [self._complete(row) for row in rows]
        for row in rows:
            if row.block_copy is not None:
                self.blocks[row.block_copy.target] = self.blocks[row.block_copy.source]
        for row in rows:
            self._write(row)
        if layer_stored is not None:
            layer_stored()
        sampled: dict[RequestKey, SampledTokens] = {}
        for row in rows:
            if row.choices:
                sampled |= self._sample(row)
        self.sampled = sampled
        return sampled

    def _complete(self, row: _Row) -> _Row:
        """The row with the token that the step before has sampled."""
        if row.token_ids[-1] != PENDING_TOKEN:
            return row
        return row._replace(token_ids=(*row.token_ids[:-1], self.sampled[row.key][-1].token_id))

    def _write(self, row: _Row) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            first = position % BLOCK_SIZE * _SLOT_BYTES
            content = np.frombuffer(_kv(row.token_ids[: position + 1]), np.uint8)
            self.blocks[row.block_table[position // BLOCK_SIZE], first : first + _SLOT_BYTES] = content

    def _sample(self, row: _Row) -> Mapping[RequestKey, SampledTokens]:
        num_tokens, whole = row.start + row.num_tokens, self.blocks[list(row.block_table)].tobytes()
        places = [whole[: count * _SLOT_BYTES] for count in range(num_tokens - row.num_drafts, num_tokens + 1)]
        return {key: tuple([SampledToken(_token(kv, choice), None) for kv in places]) for key, choice in row.choices}


@dataclass(frozen=True, slots=True)
class _LateStep:
    """A step that is computed when its result is collected."""

    runner: SimRunner
    rows: Sequence[_Row]
    layer_stored: LayerStored | None

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """See `RunningStep`."""
        return self.runner.compute(self.rows, self.layer_stored)

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """See `RunningStep`."""
        return {}


def _row(share: ScheduledRequest) -> _Row:
    choices = ((share.key, share.params.choice), *((fork.key, fork.params.choice) for fork in share.forks))
    return _Row(
        share.key,
        share.start,
        share.num_tokens,
        tuple(share.token_ids),
        tuple(share.block_table),
        choices if share.needs_sample else (),
        share.block_copy,
        share.num_drafts,
    )


def make_core(runner: SimRunner, clock: Callable[[], float], proposer: Proposer | None) -> EngineCore:
    """An engine that computes prompts in small chunks."""
    pool = BlockPool(len(runner.blocks))
    limits = SchedulerLimits(
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_request_tokens=len(runner.blocks) * BLOCK_SIZE,
        vocab_size=EOS + 1,
    )
    speculation = None if proposer is None else Speculation(proposer)
    scheduler = Scheduler(pool, limits, frozenset({EOS}), speculation=speculation)
    return EngineCore(pool, scheduler, runner, FINGERPRINT, costs=StepCosts(clock))


def guessing(chance: random.Random) -> Guessing:
    """Its drafts are mostly right."""
    return Guessing(
        lambda request, count: reference(tuple(request.token_ids), count, request.params.choice), 0.7, chance, most=3
    )


@lru_cache(maxsize=4096)
def reference(prompt_ids: tuple[int, ...], num_tokens: int, choice: int = 0) -> tuple[int, ...]:
    """The tokens that a request must generate."""
    token_ids = prompt_ids
    for _ in range(num_tokens):
        kv = b"".join(_kv(token_ids[: position + 1]) for position in range(len(token_ids)))
        token_ids += (_token(kv, choice),)
    return token_ids[len(prompt_ids) :]


@lru_cache(maxsize=65_536)
def _kv(token_ids: Sequence[int]) -> bytes:
    return blake2b(bytes(token_ids), digest_size=_SLOT_BYTES).digest()


def _token(kv: bytes, choice: int) -> int:
    return int.from_bytes(blake2b(kv + bytes(choice), digest_size=8).digest()) % _VOCABULARY
