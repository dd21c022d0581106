"""Builds what drafts with a head: loads it beside its model, lets it follow the model's runner, and makes a proposer.

Owns the order: the model has taps before its layers are recorded, and the head follows before the first step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.engine.attention.choose import AttentionShape, choose_attention
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.offload import KvOffload
from baton.engine.model_shard import Basis, ModelShard
from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.taps import KeptStreams
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.speculation.heads.blocks import HeadBlocks
from baton.engine.speculation.heads.checkpoint import HeadCheckpoint
from baton.engine.speculation.heads.following import HeadFollower
from baton.engine.speculation.heads.head_pass import HeadPass
from baton.engine.speculation.heads.proposer import HeadProposer
from baton.engine.speculation.heads.slots import HeadSlots
from baton.runtime.process import return_freed_memory
from baton.wire.layout import KvLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head whose model keeps for it what it reads."""

    checkpoint: HeadCheckpoint
    head: DraftHead


@dataclass(frozen=True, slots=True)
class FollowingHead:
    """A head that follows the steps of a runner."""

    loaded: LoadedHead
    head_pass: HeadPass
    slots: HeadSlots
    basis: Basis

    def proposer(self, pool: BlockPool, offload: KvOffload | None) -> HeadProposer:
        """What drafts with it in the blocks of `pool`."""
        checkpoint, settings = self.loaded.checkpoint, self.basis.settings
        blocks = HeadBlocks(pool, settings.block_size, offload)
        device, num_tokens = self.basis.device, checkpoint.num_tokens
        return HeadProposer(checkpoint.method, self.loaded.head, self.head_pass, self.slots, blocks, device, num_tokens)


def load_head(basis: Basis, model: ModelShard) -> LoadedHead | None:
    """The head that was chosen for `model`, if one was. Raises `ModelLoadError`."""
    checkpoint, decoder = basis.draft, model.decoder
    if not isinstance(checkpoint, HeadCheckpoint) or not isinstance(decoder, Decoder):
        return None
    head = checkpoint.load(decoder, model.ops, basis.kernels)
    return_freed_memory()
    if basis.device.records and not basis.settings.enforce_eager:
        _log.warning("steps are not recorded, and take longer: a head reads what is between layers")
    if head.taps:
        decoder.taps = KeptStreams(head.taps)
    return LoadedHead(checkpoint, head)


def follow(basis: Basis, loaded: LoadedHead, memory: KvMemory, runner: ModelRunner) -> FollowingHead:
    """Let the head follow `runner`, over the last layer of the blocks in `memory`. Raises `InvalidSetting`."""
    head, settings, limits = loaded.head, basis.settings, basis.limits
    layout = KvLayout.of_layers(memory.layout.dtype, memory.layout.block_size, head.layer_kvs)
    shape = AttentionShape(head.num_heads, head.dtype, layout, limits.max_blocks_per_request, 0, head.layer_rules)
    choice = choose_attention(settings.attention_backend, basis.device, shape, basis.kernels)
    head_pass = HeadPass(head, choice.build(memory.paged.last_layers(layout)), basis.device, limits)
    slots = HeadSlots(2 * settings.max_num_seqs)
    runner.be_followed(HeadFollower(head, head_pass, slots))
    return FollowingHead(loaded, head_pass, slots, basis)
