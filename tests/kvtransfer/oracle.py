"""An engine whose next token is a hash of all KV bytes of the sequence: one wrong byte changes every later token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import PENDING_TOKEN, BlockCopy, ScheduledRequest
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.kvtransfer.transports.base import Blocks
from baton.wire.request_key import RequestKey
from tests.computed_step import ComputedStep
from tests.kvtransfer.pools import BLOCK_BYTES, BLOCK_SIZE

_SLOT_BYTES = BLOCK_BYTES // BLOCK_SIZE
_VOCABULARY = 50
EOS = _VOCABULARY


@dataclass(frozen=True, slots=True)
class _Row:
    """The part of a share that is read when its step is launched."""

    key: RequestKey
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    needs_sample: bool
    choices: tuple[tuple[RequestKey, int], ...]
    block_copy: BlockCopy | None


@dataclass(slots=True)
class OracleRunner:
    """Writes real bytes as KV. `error` is raised instead while it is set; `forced_token` is sampled while it is set.
    The launch of number `failing_launch`, counted from 1, fails.

    With `is_asynchronous`, a step touches its blocks as late as possible: when its result is collected.
    """

    blocks: Blocks
    is_asynchronous: bool = False
    error: Exception | None = None
    failing_launch: int | None = None
    forced_token: int | None = None
    num_slots_written: int = 0
    num_launched: int = 0
    sampled: Mapping[RequestKey, SampledTokens] = field(default_factory=dict)

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        self.num_launched += 1
        if self.error is not None:
            raise self.error
        if self.num_launched == self.failing_launch:
            raise MemoryError("no room for the step")
        rows = [_row(share) for share in step.requests]
        late = _LateStep(self, rows, layer_stored)
        return late if self.is_asynchronous else ComputedStep(late.result())

    def compute(self, rows: Sequence[_Row], layer_stored: LayerStored | None) -> Mapping[RequestKey, SampledTokens]:
        """Compute one step; the one before it is complete."""
        if self.error is not None:
            raise self.error
        rows = [self._complete(row) for row in rows]
        for row in rows:
            if row.block_copy is not None:
                self.blocks[row.block_copy.target] = self.blocks[row.block_copy.source]
        for row in rows:
            self._write(row)
        if layer_stored is not None:
            layer_stored()
        due = [(row, key, choice) for row in rows if row.needs_sample for key, choice in row.choices]
        self.sampled = {key: self._sample(row, choice) for row, key, choice in due}
        return self.sampled

    def _complete(self, row: _Row) -> _Row:
        """The row with the token that the step before has sampled."""
        if row.token_ids[-1] != PENDING_TOKEN:
            return row
        return replace(row, token_ids=(*row.token_ids[:-1], self.sampled[row.key][0].token_id))

    def _write(self, row: _Row) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            content = blake2b(repr(list(row.token_ids[: position + 1])).encode(), digest_size=_SLOT_BYTES).digest()
            block_id, slot = row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.blocks[block_id, slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = np.frombuffer(content, np.uint8)
            self.num_slots_written += 1

    def _sample(self, row: _Row, choice: int) -> SampledTokens:
        if self.forced_token is not None:
            return (SampledToken(self.forced_token, None),)
        num_tokens = row.start + row.num_tokens
        kv = self.blocks[list(row.block_table)].tobytes()[: num_tokens * _SLOT_BYTES]
        token_id = int.from_bytes(blake2b(kv + bytes(choice), digest_size=8).digest()) % _VOCABULARY
        return (SampledToken(token_id, None),)


def _row(share: ScheduledRequest) -> _Row:
    return _Row(
        share.key,
        share.start,
        share.num_tokens,
        tuple(share.token_ids),
        tuple(share.block_table),
        share.needs_sample,
        ((share.key, share.params.choice), *((fork.key, fork.params.choice) for fork in share.forks)),
        share.block_copy,
    )


@dataclass(frozen=True, slots=True)
class _LateStep:
    """A step that is computed when its result is collected."""

    runner: OracleRunner
    rows: Sequence[_Row]
    layer_stored: LayerStored | None

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        return self.runner.compute(self.rows, self.layer_stored)

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        return {}


def make_core(blocks: Blocks, runner: OracleRunner, max_num_batched_tokens: int = 6) -> EngineCore:
    """An engine over `blocks` that computes prompts in small chunks."""
    pool = BlockPool(len(blocks))
    limits = SchedulerLimits(
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_request_tokens=len(blocks) * BLOCK_SIZE,
        vocab_size=EOS + 1,
    )
    return EngineCore(pool, Scheduler(pool, limits, frozenset({EOS})), runner, "model-a")
