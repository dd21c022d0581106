"""A draft model beside the model of an engine: what computes it, and its two places in there.

It is computed by a runner like the model's, over the last layers of the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.device.base import Device
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.cache.offload import KvOffload
from baton.engine.model_shard import Basis, attention_for, recorded_pass
from baton.engine.models.decoder import Decoder
from baton.engine.models.shard import WHOLE
from baton.engine.runner.base import Runner
from baton.engine.runner.drawing import INVERSE, RACE
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.live_requests import LiveRequests
from baton.engine.speculation.draft_model.checkpoint import DraftCheckpoint
from baton.engine.speculation.draft_model.passes import DraftPasses
from baton.engine.speculation.draft_model.prompts import PromptDrafts
from baton.engine.speculation.draft_model.proposer import DraftModelProposer
from baton.engine.speculation.runner import DraftedRunner
from baton.wire.layout import KvLayout


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The loaded checkpoint, and its passes."""

    checkpoint: DraftCheckpoint
    passes: DraftPasses

    def proposer(self, coverage: DraftCoverage) -> DraftModelProposer:
        """What the scheduler asks for drafts."""
        return DraftModelProposer(self.checkpoint, self.passes, coverage)

    def beside(self, runner: Runner, device: Device, coverage: DraftCoverage, requests: LiveRequests) -> Runner:
        """`runner`, with the draft KV of prompts that are computed for other nodes."""
        prompts = PromptDrafts(self.passes, coverage, requests, self.checkpoint.max_tokens)
        return DraftedRunner(runner, device, len(self.checkpoint.kvs), prompts.launch)


def draft_model(basis: Basis, decoder: Decoder, memory: KvMemory, offload: KvOffload | None) -> DraftModel:
    """The draft model of `decoder`, over its layers of the blocks in `memory`. Raises `InvalidSetting`."""
    checkpoint = basis.draft
    assert isinstance(checkpoint, DraftCheckpoint)  # it was loaded
    runner = _runner(basis, checkpoint, decoder, memory)
    passes = DraftPasses(runner, basis.limits.max_step_tokens, memory.layout.block_size, offload)
    return DraftModel(checkpoint, passes)


def _runner(basis: Basis, checkpoint: DraftCheckpoint, decoder: Decoder, memory: KvMemory) -> ModelRunner:
    layout = KvLayout.of_layers(memory.layout.dtype, memory.layout.block_size, checkpoint.kvs)
    attention = attention_for(basis, decoder, layout, WHOLE).build(memory.paged.last_layers(layout))
    ends, size = frozenset(checkpoint.config.eos_token_ids), checkpoint.config.vocab_size
    sampler = Sampler(ends, size, basis.kernels, RACE if checkpoint.is_raced else INVERSE)
    limits = replace(basis.limits, spare_block=memory.spare_block)
    run = recorded_pass(basis, decoder, attention)
    runner = ModelRunner(decoder, attention, memory.paged.blocks, sampler, basis.device, limits, run)
    if basis.records_steps:
        runner.record_graphs()
    runner.warm_up()
    return runner
