"""Runs a head over paged KV, as an engine does."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.device.host import HostStaging
from baton.engine.attention.base import SequenceShare
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.models.heads.base import DraftHead
from baton.wire.layout import KvLayout

_NUM_BLOCKS, _BLOCK_SIZE = 16, 4


class HeadRun:
    """One sequence of slots of `head`."""

    def __init__(self, head: DraftHead) -> None:
        layout = KvLayout.of_layers("float32", _BLOCK_SIZE, head.layer_kvs)
        blocks = torch.zeros(_NUM_BLOCKS, layout.block_bytes // 4)
        self._head = head
        self._attention = TorchAttention(PagedKv(layout, blocks), head.layer_rules)

    def store(self, start: int, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The head's hidden states of the slots from `start` on."""
        share = SequenceShare(start, len(token_ids), tuple(range(_NUM_BLOCKS)))
        self._attention.plan([share], HostStaging())
        positions = torch.arange(start, start + len(token_ids))
        return self._head.forward(hidden, token_ids, positions, self._attention)
