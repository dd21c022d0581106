"""An attention backend of another package: Baton's torch backend, and a count of what it computes.

    pip install ./examples/custom_attention_backend
    baton serve --attention-backend counting             # the log says "attention: counting"

A backend of your own replaces what `run` does: see docs/extending.md and `baton/engine/attention/base.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from baton.device.base import Device, Staging
from baton.engine.attention.base import AttentionBackend, LayerStored, PlannedShare
from baton.engine.attention.choose import AttentionChoice, AttentionShape
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.wire.errors import InvalidSetting

NAME = "counting"
_LOG_EVERY_STEPS = 1000
_log = logging.getLogger(__name__)


class CountingAttention:
    """Counts steps, their tokens, and the keys that these attend to (`num_pairs`, of one layer and head)."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.num_steps = self.num_tokens = self.num_pairs = 0
        self._inner = inner

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Called once for each step. A share is one sequence's part of it."""
        self.num_steps += 1
        for share in shares:
            self.num_tokens += share.num_tokens
            # token i of the share sees the `start` tokens before it, those of the share up to i, and itself
            self.num_pairs += share.num_tokens * share.start + share.num_tokens * (share.num_tokens + 1) // 2
        if self.num_steps % _LOG_EVERY_STEPS == 0:
            _log.info("%d steps, %d tokens, %d pairs", self.num_steps, self.num_tokens, self.num_pairs)
        self._inner.plan(shares, staging, layer_stored)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Called once for each layer of a step. Here would be the kernel."""
        return self._inner.run(layer, q, k, v)

    def for_graph(self, num_sequences: int) -> AttentionBackend | None:
        """None: steps of this backend are not recorded as CUDA graphs."""
        return None


def choose(device: Device, shape: AttentionShape) -> AttentionChoice:
    """What the entry point names. It may refuse a shape that it has no kernel for; the message is for the user."""
    if device.torch_device.type != "cpu":
        raise InvalidSetting(f"--attention-backend {NAME} computes on CPUs, not on {device.torch_device}")
    return AttentionChoice(NAME, 0, lambda pool: build(pool, shape))


def build(pool: PagedKv, shape: AttentionShape) -> CountingAttention:
    """The backend over one KV pool."""
    return CountingAttention(TorchAttention(pool, shape.rules))
