"""An engine whose next token is a hash of all KV bytes of the sequence: one wrong byte changes every later token."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from engine.cache.block_pool import BlockPool
from engine.core import EngineCore
from engine.runner.base import ComputedStep, LayerStored, RunningStep
from engine.scheduler.request import SampledToken, ScheduledRequest, Step
from engine.scheduler.scheduler import Scheduler, SchedulerLimits
from kvtransfer.transports.base import Blocks
from tests.kvtransfer.pools import BLOCK_BYTES, BLOCK_SIZE

_SLOT_BYTES = BLOCK_BYTES // BLOCK_SIZE
_VOCABULARY = 50
EOS = _VOCABULARY


@dataclass(slots=True)
class OracleRunner:
    """Writes real bytes as KV. `error` is raised instead while it is set; `forced_token` is drawn while it is set."""

    blocks: Blocks
    error: Exception | None = None
    forced_token: int | None = None
    num_slots_written: int = field(default=0)
    overlaps: bool = False

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        if self.error is not None:
            raise self.error
        for request in step.requests:
            self._compute(request)
        if layer_stored is not None:
            layer_stored()
        return ComputedStep({request.key: self._draw(request) for request in step.requests if request.needs_sample})

    def _compute(self, request: ScheduledRequest) -> None:
        for position in range(request.start, request.start + request.num_tokens):
            content = blake2b(repr(list(request.token_ids[: position + 1])).encode(), digest_size=_SLOT_BYTES).digest()
            block_id, slot = request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.blocks[block_id, slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = np.frombuffer(content, np.uint8)
            self.num_slots_written += 1

    def _draw(self, request: ScheduledRequest) -> SampledToken:
        if self.forced_token is not None:
            return SampledToken(self.forced_token, None)
        num_tokens = request.start + request.num_tokens
        kv = self.blocks[list(request.block_table)].tobytes()[: num_tokens * _SLOT_BYTES]
        return SampledToken(int.from_bytes(blake2b(kv, digest_size=8).digest()) % _VOCABULARY, None)


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
